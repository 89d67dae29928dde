"""Training a layer's experts through their rounding, for schemes of two or three bits.

Weights, the scales of their groups and the router are moved toward the layer's own output before it was quantised. The
gradient passes a rounding as if it were the identity (straight-through estimator, Bengio et al. 2013, arXiv:1308.3432),
which gives a scale s of weights w the gradient of LSQ (Esser et al. 2020, arXiv:1902.08153): round(w/s) - w/s, or the
bound where w/s is clipped. What is no nearer on held-out tokens is not taken.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from compressor.distributed import ranks
from compressor.model.experts import Parameters, apply_expert, expert_parameters, matrix_of
from compressor.steps.correct.cut_layer import CutLayer, Recording
from compressor.steps.correct.refit import MOST_RATE, float_router
from compressor.steps.correct.tuning import tune
from compressor.steps.quantize.matrices import Matrix
from compressor.steps.quantize.scheme import Scales, Scheme

TOKENS = 1024  # of an optimizer step
RATE = 0.3  # learning rate, times the error that is left


@dataclass(slots=True)
class RoundedLayer(CutLayer):
    """A layer whose leaves are weights before rounding, and scales [O, n] as `<parameter>.<part>`."""

    scheme: Scheme | None = None

    def slot_output(self, slot: int, x: Tensor) -> Tensor:
        """Output [m, H] of an expert with its weights rounded, before its gate weight, for tokens [m, H]."""
        leaves, made = self.parameters[slot], dict[str, Tensor]()
        for name, value in expert_parameters(self.experts, slot).items():
            if name not in leaves:  # a bias
                made[name] = value.detach().float()
                continue
            parts = [part for part in ("gate", "up", "down") if f"{name}.{part}" in leaves]
            matrices = [self._through_rounding(leaves, name, part) for part in parts]
            paired = len(matrices) == 2 and not self.experts.is_concatenated
            matrix = torch.stack(matrices, 1).flatten(0, 1) if paired else torch.cat(matrices)
            made[name] = matrix.T if self.experts.is_transposed else matrix
        return apply_expert(self.experts, made, x)

    def _through_rounding(self, leaves: Parameters, name: str, part: str) -> Tensor:
        assert self.scheme is not None
        weight, scale = matrix_of(self.experts, name, leaves[name], part), leaves[f"{name}.{part}"][..., None]
        most = 2 ** (self.scheme.bits - 1)
        ratio = (weight.reshape(*scale.shape[:-1], -1) / scale).clamp(-most, most - 1)
        codes = ratio + (self.scheme.nearest(ratio.detach()) - ratio).detach()
        return (codes * scale).flatten(-2)


@dataclass(frozen=True, slots=True)
class Tuned:
    """What a layer's training came to; nothing was taken where `kept` is empty."""

    kept: Mapping[Matrix, tuple[Tensor, Scales]]  # codes [1, O, I] and scales
    router: tuple[str, ...] = ()  # keys of its tensors that were trained, in the live model
    error: tuple[float, float] | None = None  # on held-out tokens, before and after


def tune_rounded(
    live: Any,
    recording: Recording,
    scheme: Scheme,
    scales: Mapping[Matrix, Tensor],
    router: Collection[str],
    dtype: torch.dtype,
    steps: int,
    seed: int,
) -> Tuned:
    """Train a quantised layer of the live model toward the recorded outputs: weights, `scales` [O, n] and `router`.

    `router` are keys of tensors that may change; scales are stored in `dtype`.
    """
    layer, fit, heldout = recording.layer, recording.positions(heldout=False), recording.positions(heldout=True)
    if not min(ranks().all_reduce(torch.tensor([len(fit), len(heldout)])).tolist()):
        return Tuned({})
    modules = [live.get_submodule(name) for name in (layer.name, layer.router, layer.block)]
    dtypes = {key: value.dtype for key, value in live.state_dict().items() if key in router}
    with float_router(live, layer, recording) as every, torch.no_grad():
        leaves = {key: value for key, value in every.items() if key in router}
        cut = RoundedLayer.of(recording, *modules)
        cut.scheme = scheme
        cut.parameters = [{name: own[name] for name in own if not name.endswith("_bias")} for own in cut.parameters]
        for matrix, scale in scales.items():
            cut.parameters[matrix.expert or 0][_leaf(matrix)] = scale.clone()
        old, before = [value.detach().clone() for value in leaves.values()], cut.error(heldout)
        tune(cut, fit, [*leaves.values()], steps, TOKENS, min(RATE * before, MOST_RATE), seed)
        for name, value in (entry for own in cut.parameters for entry in own.items()):
            if "." in name:  # a scale, as it's stored
                value.copy_(value.abs().to(dtype).clamp(min=torch.finfo(dtype).tiny))
        for key, value in leaves.items():
            value.copy_(value.to(dtypes[key]))
        after = cut.error(heldout)
        if not after < before:
            for value, unchanged in zip(leaves.values(), old, strict=True):
                value.copy_(unchanged)
            return Tuned({}, (), (before, before))
    made = dict[Matrix, tuple[Tensor, Scales]]()
    for matrix in scales:
        own, name = cut.parameters[matrix.expert or 0], matrix.key.rpartition(".")[2]
        found = Scales(own[_leaf(matrix)][None])
        made[matrix] = (
            scheme.codes(matrix_of(modules[0], name, own[name], matrix.part)[None].contiguous(), found),
            found,
        )
    return Tuned(made, tuple(leaves), (before, after))


def _leaf(matrix: Matrix) -> str:
    return f"{matrix.key.rpartition('.')[2]}.{matrix.part}"
