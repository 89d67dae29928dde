"""The step `constants`: a constant stands for each expert that is left out (MoNE), as vLLM serves them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from compressor.model.moe_layer import MoeLayer
from compressor.model.opened import OpenModel
from compressor.recipe.plan import ExpertPlan
from compressor.recipe.step import Requirements, Step, StepOptions
from compressor.steps.constants.mone import constants_job, plan_stage, refit_constants, requirements_of, total_kept
from compressor.steps.constants.options import Constants
from compressor.steps.prune.protecting import with_list
from compressor.steps.state import State
from compressor.steps.tensors import OutputJob


@dataclass(frozen=True)
class ConstantsStep(Step[Constants]):
    """Leave out the experts of which a constant misses least; layers may keep different numbers."""

    def resolve(self, model: OpenModel, stage: Sequence[StepOptions]) -> Self:
        """Return the step with the experts that a file protects."""
        return self.with_options(protect=with_list(self.options.protect))

    def requirements(self, model: OpenModel, steps: Sequence[StepOptions], planned: bool) -> Requirements:
        return requirements_of(self.options, model, steps)

    def experts_left(self, layers: Sequence[MoeLayer], parts: int) -> int:
        return total_kept(self.options, layers) // len(layers)

    def decide(self, state: State) -> ExpertPlan:
        return plan_stage(self.options, state)

    def refit(self, state: State) -> ExpertPlan | None:
        return refit_constants(state)

    def writer(self, state: State) -> OutputJob:
        return constants_job(state)
