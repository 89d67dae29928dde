"""Options of reconstruction: refit the remaining experts until each layer outputs what it did."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from compressor.options import NamedOptions, validated

NONE = "none"


class Correct(NamedOptions):
    """Refit the remaining experts, layer by layer, toward the base's output on the same input."""

    def __init__(self, *method: str, **named: Any) -> None:
        """Take options by name, or the method alone (`Correct("tune")`)."""
        super().__init__(**dict(zip(("method",), method, strict=False)), **named)

    method: Literal["auto", "none", "ridge", "tune"] = "tune"
    """Refit kept experts: none, ridge, tune or auto. ridge solves for the down projections in
    closed form. tune then trains router, gate, up and down projections by gradient steps. auto is
    the strategy's own method."""
    steps: int = Field(384, ge=1, le=10**5)
    """Optimizer steps of tune for each layer."""
    tokens: int = Field(512, ge=1, le=10**6)
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


def _by_method(value: Any) -> Any:
    """Return options that are named by their method alone as a mapping; nothing is none of them."""
    if value is None or isinstance(value, str):
        value = {"method": value or NONE}
    if isinstance(value, Mapping):
        return validated(Correct, value, "correct", "correct has no option")
    return value


Correcting = Annotated[Correct, BeforeValidator(_by_method)]
