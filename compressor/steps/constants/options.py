"""Options of the step `constants`: a constant stands for each expert that is left out (MoNE), as
vLLM serves them."""

from collections.abc import Mapping
from typing import ClassVar, Literal

from compressor.recipe.step import (
    CONSTANTS,
    EXPERTS,
    FORMAT,
    ROUTERS,
    SUB_EXPERTS,
    WEIGHTS,
    StepOptions,
)
from compressor.steps.prune.options import Protect, protecting_packages


class Constants(StepOptions):
    """Leave out the experts of which a constant misses least; layers may keep different numbers."""

    name: ClassVar[str] = "constants"
    implementation: ClassVar[str] = "compressor.steps.constants.step:ConstantsStep"
    changes: ClassVar[frozenset[str]] = frozenset({CONSTANTS})
    order: ClassVar[int | None] = 1
    cannot_follow: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(
            (SUB_EXPERTS, EXPERTS, CONSTANTS), "constants stand for whole experts of the source"
        ),
        **dict.fromkeys((ROUTERS, WEIGHTS, FORMAT), "constants are measured on the source"),
    }
    processes: ClassVar[bool] = False
    verified_by_kept: ClassVar[bool] = True

    experts: int | None = None
    """Experts to keep in every MoE layer."""
    ratio: float | None = None
    """Share of the experts to replace; no more than this goes."""
    experts_total: int | None = None
    """Experts to keep over all MoE layers, which then keep different numbers."""
    budget: Literal["even", "uneven"] | None = None
    """even (as many in every layer) or uneven (fewer where the model loses least)."""
    protect: Protect = None
    """Experts that are not replaced: auto, graph:N or a JSON list, as for `prune`."""

    @property
    def packages(self) -> tuple[str, ...]:
        return protecting_packages(self.protect)
