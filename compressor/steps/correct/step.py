"""The step `correct`: refit the remaining experts until each layer outputs what it did before."""

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field

from compressor.errors import CompressionError
from compressor.recipe.step import Needs, Step

if TYPE_CHECKING:
    from compressor.model.opened import OpenModel
    from compressor.steps.state import State

logger = logging.getLogger(__name__)

CONSTANTS, NONE = "constants", "none"


class Correct(Step):
    """Refit the remaining experts, layer by layer, toward the base's output on the same input."""

    name: ClassVar[str] = "correct"
    order: ClassVar[int | None] = 2
    only_after: ClassVar[tuple[str, ...]] = ("prune", CONSTANTS)
    not_after: ClassVar[Mapping[str, str]] = {"quantize": "it would write the experts that it refits unquantised"}

    method: Literal["auto", "none", "ridge", "tune"] = Field(
        "tune",
        description="Refit kept experts: none, ridge, tune or auto. ridge solves for the down projections in closed "
        "form. tune then trains router, gate, up and down projections by gradient steps. auto is what the strategy "
        "asks for.",
    )
    steps: int = Field(300, ge=1, le=10**5, description="Optimizer steps of tune for each layer.")
    tokens: int = Field(2048, ge=1, le=10**6, description="Tokens of each of them.")
    toward: float | None = Field(
        None,
        ge=0,
        le=1,
        description="How much of the way from the base's output on the smaller model's hidden states to the base's own "
        "hidden states is fitted. Above 0, calibration text also passes the base. The default is 0.5, or 0 where that "
        "is not known: beside constants, in multi-token-prediction heads, and where experts' outputs pass a norm.",
    )
    rate: float = Field(0.3, gt=0, lt=1, description="Learning rate of tune, times the error that is left.")
    deterministic: bool = Field(
        False, description="Keep to operations that give the same bits each time; on a GPU some are slower."
    )

    @property
    def wanted(self) -> bool:
        return self.method != NONE

    def resolved(self, model: "OpenModel", steps: Sequence[Step]) -> Self | None:
        """With the strategy's own method for `auto`; None where nothing is refitted."""
        method: str = self.method
        if method == "auto":
            from compressor.model.opened import shared_experts
            from compressor.recipe.registry import load_strategy

            prune: Any = next((step for step in steps if step.name == "prune"), None)
            method = NONE if prune is None else load_strategy(prune.strategy, prune.options).correction
            if method != NONE and (shared := shared_experts(model)):
                logger.warning("%s shares its experts with another layer, so nothing is corrected", shared)
                method = NONE
        return None if method == NONE else self.model_copy(update={"method": method})

    def needs(self, model: "OpenModel", steps: Sequence[Step], planned: bool) -> Needs:
        """Calibration text, a part of it held out to judge by."""
        from compressor.model.opened import refuse_shared_experts

        refuse_shared_experts(model)
        if self.toward and any(step.name == CONSTANTS for step in steps):
            raise CompressionError("correct: toward is not known beside constants; leave it out")
        return Needs(text=True, heldout=1, passes=1)

    def refit(self, state: "State") -> Mapping[int, Mapping[str, Any]]:
        """Refit all layers in order, and keep them; the figures stand with the layers of what pruned them."""
        from compressor.recipe.steps_plan import decisions
        from compressor.steps.correct.in_order import correct

        if state.step_of(CONSTANTS) is not None:  # it refits its own
            return {}
        number = state.number_of("prune")
        assert state.text is not None and number is not None
        stage, files = state.stage_plan(), state.cut()
        return {
            number: decisions(correct(state.model, stage, state.progress, files, state.text.fit, self, state.visited))
        }
