"""One step of the optimiser on a decoder layer's float32 masters, wherever they and its state wait between steps.

Gradients are clipped to a norm of 1 for each decoder layer: a step layer by layer never sees the norm of all.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compressor.kept import keep_tensors, kept_tensors
from compressor.steps.distill.trained import Masters

MOST_NORM = 1.0  # of a decoder layer's gradients
MOMENTS = "of "  # begins the name of a tensor of the optimiser's state in a file

Moments = dict[str, dict[str, Tensor]]  # the optimiser's state by master


class NotFiniteError(Exception):
    """A loss or a gradient is no number, so the step must not be taken."""


@dataclass(slots=True)
class LayerState:
    """A decoder layer's masters, and what the optimiser remembers of each."""

    masters: Masters
    moments: Moments = field(default_factory=dict)


def update(state: LayerState, gradients: Mapping[str, Tensor], optimizer: str, rate: float) -> None:
    """Clip the gradients and take a step, in place. Raises `NotFiniteError` for gradients that are no numbers.

    Adafactor (Shazeer and Stern 2018) keeps a row and a column of a matrix's second moments. Its steps are as long as
    Adam's at the same rate: root mean square `rate`, not relative to a tensor's size.
    """
    norm = math.sqrt(sum(float(value.double().square().sum()) for value in gradients.values()))
    if not math.isfinite(norm):
        raise NotFiniteError
    for name, leaf in state.masters.items():
        leaf.grad = gradients[name] * (min(1.0, MOST_NORM / norm) if norm else 1.0)
    made: Any = _OPTIMIZERS[optimizer](list(state.masters.values()), rate)
    for name, leaf in state.masters.items():
        if name in state.moments:
            made.state[leaf] = state.moments[name]
    made.step()
    for name, leaf in state.masters.items():
        state.moments[name], leaf.grad = dict(made.state[leaf]), None


def _adam(leaves: list[Tensor], rate: float) -> torch.optim.Optimizer:
    return torch.optim.Adam(leaves, lr=rate)


def _adafactor(leaves: list[Tensor], rate: float) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(leaves, lr=rate, eps=(None, 1.0))  # a floor of 1 under a tensor's size: rate as it is


_OPTIMIZERS = {"adam": _adam, "adafactor": _adafactor}


def file_of(folder: Path, unit: str) -> Path:
    """Where a layer's state lies."""
    return folder / f"{unit}.safetensors"


def keep_state(folder: Path, unit: str, state: LayerState) -> None:
    """Write a layer's state, whole or not at all."""
    moments = {f"{MOMENTS}{name} {kind}": value for name, own in state.moments.items() for kind, value in own.items()}
    keep_tensors(file_of(folder, unit), {**state.masters, **moments}, {"unit": unit})


def kept_state(folder: Path, unit: str, device: torch.device, moments: bool = True) -> LayerState:
    """A layer's state as `keep_state` has written it, in tensors of its own; perhaps the masters alone."""
    state = LayerState({})
    for name, value in kept_tensors(file_of(folder, unit)).items():
        if not name.startswith(MOMENTS):
            state.masters[name] = value.to(device, copy=True)
        elif moments:
            key, _, kind = name.removeprefix(MOMENTS).rpartition(" ")
            own = value.clone() if kind == "step" else value.to(device, copy=True)
            state.moments.setdefault(key, {})[kind] = own
    return state
