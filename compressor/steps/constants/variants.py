"""Constants put into a model while text passes it: one set of them, or many side by side in a single streamed pass."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from compressor.evaluation.evaluator import Variants
from compressor.model.architecture import MoeLayer
from compressor.model.constant_experts import Substitutes, substitute
from compressor.model.opened import OpenModel

Variant = Mapping[str, Substitutes]  # by experts module; a layer that is not named stays as it is


class Substituting(Variants):
    """Has each batch of a pass meet the constants of its variant, those of the first unless an evaluator says else."""

    def __init__(self, model: OpenModel, variants: Sequence[Variant]) -> None:
        self.model, self.variants = model, variants

    def entering(self, batch: int) -> None:
        for layer in self.at.moe_layers:
            found = None if self.variant is None else self.variants[self.variant].get(layer.name)
            substitute(self._experts(layer), None if found is None else self._on_device(found))

    def passed(self, unit: str) -> None:
        for layer in self.at.moe_layers:
            substitute(self._experts(layer), None)

    def _experts(self, layer: MoeLayer) -> Any:
        return self.model.partial.model.get_submodule(layer.name)

    def _on_device(self, found: Substitutes) -> Substitutes:
        partial = self.model.partial
        return replace(found, values=found.values.to(partial.device, partial.dtype))
