"""Options of the step `correct`: refit the remaining experts until each layer outputs what it did
before."""

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import Field

from compressor.recipe.step import CONSTANTS, EXPERTS, FORMAT, WEIGHTS, StepOptions

NONE = "none"


class Correct(StepOptions):
    """Refit the remaining experts, layer by layer, toward the base's output on the same input."""

    name: ClassVar[str] = "correct"
    implementation: ClassVar[str] = "compressor.steps.correct.step:CorrectStep"
    changes: ClassVar[frozenset[str]] = frozenset({WEIGHTS})
    order: ClassVar[int | None] = 2
    only_after: ClassVar[Mapping[str, str]] = {EXPERTS: "prune", CONSTANTS: "constants"}
    cannot_follow: ClassVar[Mapping[str, str]] = {
        FORMAT: "it would write the experts that it refits unquantised"
    }

    method: Literal["auto", "none", "ridge", "tune"] = "tune"
    """Refit kept experts: none, ridge, tune or auto. ridge solves for the down projections in
    closed form. tune then trains router, gate, up and down projections by gradient steps. auto is
    the strategy's own method."""
    steps: int = Field(300, ge=1, le=10**5)
    """Optimizer steps of tune for each layer."""
    tokens: int = Field(2048, ge=1, le=10**6)
    """Tokens of each optimizer step."""
    toward: float | None = Field(None, ge=0, le=1)
    """Share of the way from the base's output on the smaller model's hidden states to the base's
    own hidden states that is fitted. Above 0, calibration text also passes the base. The default is
    0.5, or 0 where that is not known: beside constants, in multi-token-prediction heads, and where
    experts' outputs pass a norm."""
    rate: float = Field(0.3, gt=0, lt=1)
    """Learning rate of tune, as a multiple of the remaining error."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """Number format of tune's products, which are summed in float32. auto is bfloat16 on GPUs that
    multiply it."""
    balance: Literal["sum", "worst"] | None = None
    """sum fits all tokens alike. With several calibration sources, worst weighs a source more the
    larger its held-out error, and keeps a refit that lowers the largest of these. The default is
    worst for ridge and sum for tune."""
    deterministic: bool = False
    """Use operations that give the same bits each time; on a GPU some are slower."""

    @property
    def balances(self) -> bool:
        """Return True if sources count the more, the larger their errors."""
        return self.balance == "worst" or (self.balance is None and self.method == "ridge")

    @property
    def wanted(self) -> bool:
        """Return True if anything is refitted."""
        return self.method != NONE
