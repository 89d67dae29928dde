"""Options of the step `distill`: train the smaller model end to end toward its base's next-token
distribution."""

from collections.abc import Mapping
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from compressor.recipe.step import DEFAULT_LENGTH, StepOptions

# at the highest, by `train`
RATES: Mapping[str, float] = {"experts": 1e-3, "router": 3e-3, "lora": 2e-3, "all": 1e-3}
WARM_UP = 0.05  # of the steps, over which the rate rises; then it falls to 0 on a line


class Distill(StepOptions):
    """Train toward the base; the loss is the sum of its parts, each times its weight."""

    name: ClassVar[str] = "distill"
    implementation: ClassVar[str] = "compressor.steps.distill.step:DistillStep"
    in_place: ClassVar[bool] = True

    train: Literal["experts", "router", "lora", "all", "none"] = "experts"
    """Train experts (and routers), router, lora or all toward the base."""
    steps: int = Field(400, ge=1, le=10**6)
    """Optimizer steps."""
    tokens_per_step: int = Field(2048, ge=2, le=10**8)
    """Tokens in each step."""
    sequence_length: int = Field(DEFAULT_LENGTH, ge=2, le=10**6)
    """Tokens in each sequence."""
    learning_rate: float | None = Field(None, ge=1e-12, le=1e12)
    """Peak learning rate (default: 1e-3, lora 2e-3, router 3e-3)."""
    optimizer: Literal["adam", "adafactor"] | None = None
    """adam or adafactor (default: adam; with stream adafactor)."""
    rank: int = Field(16, ge=1, le=10**5)
    """Rank of LoRA's factors."""
    stream: bool = False
    """Train with one decoder layer in memory at a time."""
    kl: float = Field(1.0, ge=0, le=1e6)
    """Weight of the KL divergence from the base's next token."""
    cross_entropy: float = Field(0.0, ge=0, le=1e6)
    """Weight of the text's own next-token loss."""
    hidden_states: float = Field(0.0, ge=0, le=1e6)
    """Weight of the distance from the base's hidden states."""
    balance: Literal["sum", "worst"] = "sum"
    """sum trains on all tokens alike. With several calibration sources, worst weighs a source more
    the larger its KL on held-out text, and takes the state whose largest KL of a source is
    smallest."""
    evaluate_every: int | None = Field(None, ge=1, le=10**6)
    """Steps between evaluations on held-out text (default: an eighth of them)."""
    patience: int = Field(8, ge=1, le=10**6)
    """Evaluations without improvement before training stops."""

    @model_validator(mode="after")
    def _learns(self) -> Self:
        if not any((self.kl, self.cross_entropy, self.hidden_states)):
            raise ValueError(
                "nothing is learnt of no loss; give kl, cross_entropy or hidden_states a weight"
            )
        if self.tokens_per_step < self.sequence_length:
            raise ValueError(
                f"tokens_per_step {self.tokens_per_step} is less than one sequence of "
                f"{self.sequence_length} tokens; raise it or lower sequence_length"
            )
        return self

    @property
    def optimiser(self) -> str:
        """The optimizer's name: Adam's state is twice the parameters, Adafactor's a row and a
        column of each."""
        return self.optimizer or ("adafactor" if self.stream else "adam")

    @property
    def sequences(self) -> int:
        return self.tokens_per_step // self.sequence_length

    def rate_at(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0: up over the first ones, then down to
        0 on a line."""
        highest = self.learning_rate or RATES[self.train]
        warm = max(1, round(WARM_UP * self.steps))
        return highest * min((step + 1) / warm, (self.steps - step) / (self.steps - warm + 1))

    @property
    def rewrites(self) -> bool:
        return self.train not in ("router", "none")
