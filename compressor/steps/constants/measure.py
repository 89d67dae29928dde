"""The constant of every expert, and what is missed when it stands for the expert.

An expert with output o and gate weight g adds g o to a token. The constant c that misses least of it over all tokens,
sum g^2 ||o - c||^2, is c = sum g^2 o / sum g^2, and leaves sum g^2 ||o||^2 - ||sum g^2 o||^2 / sum g^2. MoNE
(arXiv:2507.00390) takes the plain mean of o and chooses by its variance and by how often the expert is visited.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from compressor.data.batches import Calibration
from compressor.kept import keep_tensors, kept_tensors, told_of
from compressor.model.architecture import MoeLayer
from compressor.model.constant_experts import Substitutes
from compressor.model.opened import OpenModel
from compressor.progress import Progress
from compressor.statistics.collecting import collect
from compressor.statistics.statistics import LayerStatistics

NEEDS = frozenset({"squared_gate_sum", "squared_gate_output_sum", "squared_gated_norm_sum"})


@dataclass(frozen=True, slots=True, eq=False)
class LayerConstants:
    """Of each expert of a layer its best constant, `values` [E, H] in float32, and what that misses, `missed` [E]."""

    values: Tensor
    missed: Tensor  # in float64: sum over the expert's tokens of g^2 ||o - c||^2

    @property
    def order(self) -> list[int]:
        """All experts, the one whose constant misses least first; among equals the one with the higher number."""
        backwards = self.missed.flip(0).argsort(stable=True)
        return (len(self.missed) - 1 - backwards).tolist()

    def replaceable(self, count: int, protected: frozenset[int] = frozenset()) -> tuple[int, ...]:
        """The `count` experts whose constants miss least, ascending; none that is protected."""
        return tuple(sorted([expert for expert in self.order if expert not in protected][:count]))


def layer_constants(gate: Tensor, output: Tensor, norm: Tensor) -> LayerConstants:
    """sum g^2 [E], sum g^2 o [E, H], sum g^2 ||o||^2 [E] -> constants and what they miss; 0 for an unvisited expert."""
    share = gate.double().clamp(min=torch.finfo(torch.float64).tiny)
    values = output.double() / share[:, None]
    missed = (norm.double() - (output.double() * values).sum(-1)).clamp(min=0)
    return LayerConstants(values.float(), missed)


def of_statistics(stats: LayerStatistics) -> LayerConstants:
    """The constants of a layer whose statistics hold `NEEDS`."""
    return layer_constants(stats.squared_gate_sum, stats.squared_gate_output_sum, stats.squared_gated_norm_sum)


def measure(
    model: OpenModel, calibration: Calibration, progress: Progress, seed: int, kept: Path | None = None
) -> dict[str, LayerConstants]:
    """The constants of all layers by experts module, from one pass over the calibration text that is not held out.

    A run that was killed finds them again in `kept`, a folder that tells by its name what they were measured on.
    """
    layers = model.architecture.layers
    if kept is not None and all(told_of(_path(kept, layer)) is not None for layer in layers):
        loaded = {layer.name: kept_tensors(_path(kept, layer)) for layer in layers}
        return {name: LayerConstants(found["values"], found["missed"]) for name, found in loaded.items()}
    made: dict[str, LayerConstants] = {}
    for stats in collect(model, NEEDS, calibration, progress, seed):
        found = made[stats.layer.name] = of_statistics(stats)
        if kept is not None:
            keep_tensors(_path(kept, stats.layer), {"values": found.values, "missed": found.missed}, stats.layer.name)
    return made


def _path(folder: Path, layer: MoeLayer) -> Path:
    return folder / f"{layer.name}.safetensors"


def substitutes_of(
    dropped: Mapping[str, Sequence[int]], constants: Mapping[str, LayerConstants]
) -> dict[str, Substitutes]:
    """The constants of the experts that are `dropped`, both by experts module."""
    chosen = {name: sorted(experts) for name, experts in dropped.items() if experts}
    return {name: Substitutes(tuple(own), constants[name].values[own]) for name, own in chosen.items()}


def replacing(
    layers: Sequence[MoeLayer],
    constants: Mapping[str, LayerConstants],
    numbers: Sequence[int],
    protected: Mapping[str, frozenset[int]],
) -> dict[str, Substitutes]:
    """The constants of a division: of each layer's `numbers`, in their order, the experts that are missed least."""
    dropped = {
        layer.name: constants[layer.name].replaceable(number, protected.get(layer.name, frozenset()))
        for layer, number in zip(layers, numbers, strict=True)
    }
    return substitutes_of(dropped, constants)
