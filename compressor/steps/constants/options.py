"""Options of the step `constants`: a constant stands for each expert that is left out (MoNE), as
vLLM serves them."""

from typing import ClassVar, Literal

from compressor.recipe.step import StepOptions
from compressor.steps.correct.options import Correct, Correcting
from compressor.steps.prune.options import Protect, protecting_packages


class Constants(StepOptions):
    """Leave out the experts of which a constant misses least; layers may keep different numbers."""

    name: ClassVar[str] = "constants"
    implementation: ClassVar[str] = "compressor.steps.constants.step:ConstantsStep"
    format: ClassVar[str | None] = "mone"
    processes: ClassVar[bool] = False

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

    correct: Correcting = Correct("none")
    """Refit constants and the experts that stay, as for `prune`."""

    @property
    def rewrites(self) -> bool:
        return self.correct.wanted

    def fault_after(self, earlier: StepOptions) -> str:
        return "constants are measured on the source, and stand for its experts"

    @property
    def packages(self) -> tuple[str, ...]:
        return protecting_packages(self.protect)
