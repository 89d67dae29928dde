"""Many ways to put constants into one model, each run to the model's end on the same text in a single streamed pass."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from compressor.evaluation.heldout import Judge, Judgement, rows_at_once
from compressor.model.architecture import MoeLayer, layers_by_unit
from compressor.model.constant_experts import Substitutes, substitute
from compressor.model.opened import OpenModel
from compressor.model.streaming import LayerStream, LayerVisitor
from compressor.progress import Progress

Variant = Mapping[str, Substitutes]  # by experts module; a layer that is not named stays as it is


@dataclass(slots=True)
class Substituting(LayerVisitor):
    """Has each batch of a pass meet the constants of its variant: batch n those of variant n // `batches`."""

    model: OpenModel
    variants: Sequence[Variant]
    batches: int  # of each variant
    by_unit: Mapping[str, list[MoeLayer]] = field(init=False)
    layers: Sequence[MoeLayer] = ()

    def __post_init__(self) -> None:
        self.by_unit = layers_by_unit(self.model.architecture.layers)

    def loaded(self, unit: str) -> None:
        self.layers = self.by_unit.get(unit, ())

    def entering(self, batch: int) -> None:
        variant = self.variants[batch // self.batches]
        for layer in self.layers:
            found = variant.get(layer.name)
            substitute(self._experts(layer), None if found is None else self._on_device(found))

    def passed(self, unit: str) -> None:
        for layer in self.layers:
            substitute(self._experts(layer), None)
        self.layers = ()

    def _experts(self, layer: MoeLayer) -> Any:
        return self.model.partial.model.get_submodule(layer.name)

    def _on_device(self, found: Substitutes) -> Substitutes:
        partial = self.model.partial
        return replace(found, values=found.values.to(partial.device, partial.dtype))


@dataclass(slots=True)
class _VariantJudge(Judge):
    """Judges every variant against the first one, which is the original."""

    def entering(self, batch: int) -> None:
        self._batch = batch % (len(self.batches) // self.sets)


def judge_variants(
    model: OpenModel,
    variants: Sequence[Variant],
    batches: Sequence[torch.Tensor],
    progress: Progress,
    phase: str = "judge",
) -> list[Judgement]:
    """Loss of each variant, and KL of the original's next tokens to its own, on `batches` of token ids [B, L].

    One layer is in memory at a time; the states of all variants are, or lie on disk.
    """
    small = [part for batch in batches for part in batch.split(rows_at_once(batch.shape[1], model.vocabulary))]
    every = ({}, *variants)
    copies = [(number, part) for number in range(len(every)) for part in small]
    judge = _VariantJudge(copies, len(every))
    units = model.architecture.units
    stream = LayerStream(model.partial, judge.tokens, units, units, range(len(copies)))
    progress.start(phase, len(units))
    watching: AbstractContextManager[None] = judge.watch(model.partial.model)
    with watching:
        for unit in stream.passing(Substituting(model, every, len(small)), judge):
            progress.advance(unit)
    return judge.found[1:]
