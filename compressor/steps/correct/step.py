"""The step `correct`: refit the remaining experts until each layer outputs what it did before."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from compressor.errors import CompressionError
from compressor.model.opened import OpenModel, refuse_shared_experts, shared_experts
from compressor.recipe.plan import ExpertPlan
from compressor.recipe.step import CONSTANTS, Requirements, Step, StepOptions
from compressor.steps.correct.options import NONE, Correct
from compressor.steps.correct.sequential import correct
from compressor.steps.state import State

logger = logging.getLogger(__name__)

HIDDEN_COPIES = 4  # of a layer: inputs and outputs as it was, and as it is
BASE_COPIES = 2  # more, toward the base's own hidden states


@dataclass(frozen=True)
class CorrectStep(Step[Correct]):
    """Refit the remaining experts, layer by layer, toward the base's output on the same input."""

    def resolve(self, model: OpenModel, stage: Sequence[StepOptions]) -> Self | None:
        """Return the step with the strategy's own method for `auto`; None if nothing is
        refitted."""
        method: str = self.options.method
        if method == "auto":
            suggested = [
                options.step().suggested_correction
                for options in stage
                if options is not self.options
            ]
            method = next((name for name in suggested if name is not None), NONE)
            shared = shared_experts(model) if method != NONE else None
            if shared:
                logger.warning(
                    "%s shares its experts with another layer, so nothing is corrected", shared
                )
                method = NONE
        return None if method == NONE else self.with_options(method=method)

    def requirements(
        self, model: OpenModel, steps: Sequence[StepOptions], planned: bool
    ) -> Requirements:
        """Return the need of calibration text, a part of it held out to evaluate on."""
        refuse_shared_experts(model)
        if self.options.toward and any(CONSTANTS in options.changes for options in steps):
            raise CompressionError("correct: toward is not known beside constants; leave it out")
        copies = HIDDEN_COPIES + (BASE_COPIES if self.options.toward != 0 else 0)
        return Requirements(text=True, heldout=1, passes=1, hidden_copies=copies)

    def refit(self, state: State) -> ExpertPlan | None:
        """Refit all layers in order, and keep them; the figures go to the layers of the step that
        pruned them."""
        plan = state.expert_plan()
        text = state.text
        if plan.has_constants:  # which refit their own
            return None
        assert text is not None
        return correct(
            state.model, plan, state.progress, state.cut(), text.fit, self.options, state.seed
        )
