"""The step `constants`: a constant stands for each expert that is left out (MoNE), as vLLM serves them."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field, JsonValue, field_validator

from compressor.recipe.step import Needs, Step
from compressor.steps.prune.step import check_protect

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
    protect: str | tuple[dict[str, JsonValue], ...] | None = Field(
        None, description="Experts that are not replaced: auto, graph:N or a JSON list, as for `prune`."
    )

    _check = field_validator("protect")(check_protect)

    def resolved(self, model: "OpenModel", steps: Sequence[Step]) -> Self | None:
        """With the protected experts that a file lists."""
        from compressor.steps.prune.protecting import with_list

        return self.model_copy(update={"protect": with_list(self.protect)})

    def needs(self, model: "OpenModel", steps: Sequence[Step], planned: bool) -> Needs:
        """Calibration text; held-out text for an uneven budget."""
        from compressor.steps.constants.planning import needs_of

        return needs_of(self, model, steps)

    def plan(self, state: "State") -> Mapping[str, Any]:
        """Which experts are replaced in each layer."""
        from compressor.steps.constants.planning import plan_stage

        return plan_stage(self, state)

    def refit(self, state: "State") -> Mapping[int, Mapping[str, Any]]:
        """What a correction beside it makes of constants and experts that stay."""
        from compressor.steps.constants.writing import refit_constants

        return refit_constants(state)

    def job(self, state: "State") -> "OutputJob":
        """What stays is copied as it is stored, and constants are added."""
        from compressor.steps.constants.writing import constants_job

        return constants_job(state)
