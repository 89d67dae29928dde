"""The step `constants`: a constant stands for each expert that is left out (MoNE), as vLLM serves them."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field

from compressor.recipe.step import Needs, Step
from compressor.steps.prune.step import Protect

if TYPE_CHECKING:
    from compressor.model.opened import OpenModel
    from compressor.steps.state import State
    from compressor.steps.tensors import OutputJob


class Constants(Step):
    """Leave out the experts of which a constant misses least; layers may keep different numbers."""

    name: ClassVar[str] = "constants"
    order: ClassVar[int | None] = 1
    not_after: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("split", "prune", "constants"), "constants stand for whole experts of the source"),
        **dict.fromkeys(("routers", "distill", "quantize"), "constants are measured on the source"),
    }
    processes: ClassVar[bool] = False
    verified_by_kept: ClassVar[bool] = True

    experts: int | None = Field(None, description="Experts to keep in every MoE layer.")
    ratio: float | None = Field(None, description="Share of the experts to replace; no more than this goes.")
    experts_total: int | None = Field(
        None, description="Experts to keep over all MoE layers, which then keep different numbers."
    )
    budget: Literal["even", "uneven"] | None = Field(
        None, description="even (as many in every layer) or uneven (fewer where the model loses least)."
    )
    protect: Protect = Field(
        None, description="Experts that are not replaced: auto, graph:N or a JSON list, as for `prune`."
    )

    def resolved(self, model: "OpenModel", steps: Sequence[Step]) -> Self | None:
        from compressor.steps.prune.protecting import with_list

        return self.model_copy(update={"protect": with_list(self.protect)})

    def needs(self, model: "OpenModel", steps: Sequence[Step], planned: bool) -> Needs:
        from compressor.steps.constants.mone import needs_of

        return needs_of(self, model, steps)

    def plan(self, state: "State") -> Mapping[str, Any]:
        from compressor.steps.constants.mone import plan_stage

        return plan_stage(self, state)

    def refit(self, state: "State") -> Mapping[int, Mapping[str, Any]]:
        from compressor.steps.constants.mone import refit_constants

        return refit_constants(state)

    def job(self, state: "State") -> "OutputJob":
        from compressor.steps.constants.mone import constants_job

        return constants_job(state)
