"""The constant of every expert, what is missed when it stands for the expert, and a pass that computes with constants.

An expert with output o and gate weight g adds g o to a token. The constant c that misses least of it over all tokens,
sum g^2 ||o - c||^2, is c = sum g^2 o / sum g^2, and leaves sum g^2 ||o||^2 - ||sum g^2 o||^2 / sum g^2. MoNE
(arXiv:2507.00390) takes the plain mean of o and chooses by its variance and by the expert's routed tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from compressor.data.batches import Calibration
from compressor.evaluation.evaluator import Variants
from compressor.kept import keep_tensors, kept_tensors, told_of
from compressor.model.architecture import MoeLayer
from compressor.model.constant_experts import Substitutes, substitute
from compressor.model.opened import OpenModel
from compressor.progress import Progress
from compressor.statistics.statistics import LayerStatistics, collect

NEEDS = frozenset({"squared_gate_sum", "squared_gate_output_sum", "squared_gated_norm_sum"})

Variant = Mapping[str, Substitutes]  # by experts module; a layer that is not named stays as it is


@dataclass(frozen=True, slots=True, eq=False)
class LayerConstants:
    """Of each expert of a layer its best constant, `values` [E, H] in float32, and what that misses, `missed` [E]."""

    values: Tensor
    missed: Tensor  # in float64: sum over the expert's tokens of g^2 ||o - c||^2

    @classmethod
    def of(cls, stats: LayerStatistics) -> "LayerConstants":
        """Of a layer whose statistics hold `NEEDS`; all 0 for an expert no token reached."""
        share = stats.squared_gate_sum.double().clamp(min=torch.finfo(torch.float64).tiny)
        output = stats.squared_gate_output_sum.double()
        values = output / share[:, None]
        missed = (stats.squared_gated_norm_sum.double() - (output * values).sum(-1)).clamp(min=0)
        return cls(values.float(), missed)

    def replaceable(self, count: int, protected: frozenset[int] = frozenset()) -> tuple[int, ...]:
        """The `count` experts whose constants miss least, ascending; none that is protected.

        Among equals the one with the higher number comes first.
        """
        backwards = self.missed.flip(0).argsort(stable=True)
        order = (len(self.missed) - 1 - backwards).tolist()
        return tuple(sorted([expert for expert in order if expert not in protected][:count]))


def measure(
    model: OpenModel, calibration: Calibration, progress: Progress, seed: int, kept: Path | None = None
) -> dict[str, LayerConstants]:
    """The constants of all layers by experts module, from one pass over the calibration text that is not held out.

    A resumed run reads them from `kept`, a folder whose name says what they were measured on.
    """
    names = [layer.name for layer in model.architecture.layers]
    paths = {} if kept is None else {name: kept / f"{name}.safetensors" for name in names}
    if paths and all(told_of(path) is not None for path in paths.values()):
        return {name: LayerConstants(**kept_tensors(path)) for name, path in paths.items()}
    constants: dict[str, LayerConstants] = {}
    for stats in collect(model, NEEDS, calibration, progress, seed):
        name = stats.layer.name
        own = constants[name] = LayerConstants.of(stats)
        if name in paths:
            keep_tensors(paths[name], {"values": own.values, "missed": own.missed}, name)
    return constants


def substitutes_of(dropped: Mapping[str, Sequence[int]], constants: Mapping[str, LayerConstants]) -> Variant:
    """The constants of the experts that are `dropped`, both by experts module."""
    chosen = {name: sorted(experts) for name, experts in dropped.items() if experts}
    return {name: Substitutes(tuple(own), constants[name].values[own]) for name, own in chosen.items()}


def replacing(
    layers: Sequence[MoeLayer],
    constants: Mapping[str, LayerConstants],
    numbers: Sequence[int],
    protected: Mapping[str, frozenset[int]],
) -> Variant:
    """The constants of a division: of each layer's `numbers`, in their order, the experts that are missed least."""
    dropped = {
        layer.name: constants[layer.name].replaceable(number, protected.get(layer.name, frozenset()))
        for layer, number in zip(layers, numbers, strict=True)
    }
    return substitutes_of(dropped, constants)


class Substituting(Variants):
    """Has each batch of a pass meet the constants of its variant, those of the first unless an evaluator says else."""

    def __init__(self, model: OpenModel, variants: Sequence[Variant]) -> None:
        self.model, self.variants = model, variants

    def entering(self, batch: int) -> None:
        partial = self.model.partial
        for layer in self.at.moe_layers:
            found = None if self.variant is None else self.variants[self.variant].get(layer.name)
            if found is not None:
                found = replace(found, values=found.values.to(partial.device, partial.dtype))
            substitute(partial.model.get_submodule(layer.name), found)

    def passed(self, unit: str) -> None:
        for layer in self.at.moe_layers:
            substitute(self.model.partial.model.get_submodule(layer.name), None)
