"""The step `prune`: a strategy decides which experts stay, merge or go."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from compressor.document.blocks import Block
from compressor.model.moe_layer import MoeLayer
from compressor.model.opened import OpenModel
from compressor.recipe.document import protected_blocks_of
from compressor.recipe.plan import ExpertPlan
from compressor.recipe.registry import load_strategy
from compressor.recipe.step import Requirements, Step, StepOptions
from compressor.steps.prune.options import Prune
from compressor.steps.prune.planning import plan_stage, requirements_of
from compressor.steps.prune.protecting import with_list
from compressor.steps.split.opening import with_top_k
from compressor.steps.state import State


@dataclass(frozen=True)
class PruneStep(Step[Prune]):
    """Drop or merge experts, with their rows of the routers."""

    @property
    def suggested_correction(self) -> str:
        """The strategy's own."""
        return load_strategy(self.options.strategy, self.options.options).correction

    def resolve(self, model: OpenModel, stage: Sequence[StepOptions]) -> Self:
        """Return the step with the experts that a file protects."""
        return self.with_options(protect=with_list(self.options.protect))

    def model_view(self, model: OpenModel) -> OpenModel:
        return with_top_k(model, self.options.top_k)

    def requirements(self, model: OpenModel, steps: Sequence[StepOptions], planned: bool) -> Requirements:
        return requirements_of(self.options, model, planned)

    def experts_left(self, layers: Sequence[MoeLayer], parts: int) -> int:
        return self.options.count(layers, parts)

    def decide(self, state: State) -> ExpertPlan:
        return plan_stage(self.options, state)

    def describe(self, entry: Mapping[str, Any]) -> Sequence[Block]:
        return protected_blocks_of((entry.get("plan") or {}).get("protected") or {})
