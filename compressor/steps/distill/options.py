"""What a recovery is asked for: what is trained, toward what, how long and how boldly."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

from compressor.errors import CompressionError
from compressor.records import read_as

RATES: Mapping[str, float] = {"experts": 1e-3, "router": 3e-3, "lora": 2e-3, "all": 1e-3}  # at the highest, by method
METHODS = tuple(RATES)
OPTIMIZERS = ("adam", "adafactor")
WARM_UP = 0.05  # of the steps, over which the rate rises; then it falls to 0 on a line
EVALUATIONS = 8  # of held-out text, if nothing else is asked for
PATIENCE = 8  # evaluations without a better one: at high rates the best state comes as the rate falls to 0
BOUNDS: Mapping[str, tuple[float, float]] = {
    "distill": (0, 1e6),
    "cross_entropy": (0, 1e6),
    "hidden_states": (0, 1e6),
    "contrastive": (0, 1e6),
    "temperature": (1e-3, 1e3),
    "negatives": (1, 10**6),
    "steps": (1, 10**6),
    "tokens_per_step": (2, 10**8),
    "learning_rate": (1e-12, 1e12),
    "rank": (1, 10**5),
    "length": (2, 10**6),
    "evaluate_every": (1, 10**6),
    "patience": (1, 10**6),
}


@dataclass(frozen=True, slots=True)
class Recovery:
    """How a smaller model is trained toward its original; the loss is the sum of its parts, each times its weight."""

    method: str = "experts"
    distill: float = 1.0  # times the divergence from the original's next-token distribution
    cross_entropy: float = 0.0  # times the loss of the text's own next token
    hidden_states: float = 0.0  # times the normalised square distance of the last layer's outputs from the original's
    contrastive: float = 0.0  # times CoMoE's contrastive loss of every MoE layer's experts
    temperature: float = 0.07  # of the contrastive loss
    negatives: int = 8  # inactive experts that it samples for a token
    steps: int = 400
    tokens_per_step: int = 2048
    learning_rate: float | None = None  # by default the method's own
    optimizer: str | None = None  # by default adam, and adafactor layer by layer
    rank: int = 16  # of LoRA's factors
    stream: bool = False  # layer by layer, on a machine smaller than the model
    length: int = 256  # tokens of a sequence
    evaluate_every: int | None = None  # steps; by default an eighth of them
    patience: int = PATIENCE

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise CompressionError(f"there is no recovery method {self.method!r}; known are {', '.join(METHODS)}")
        if self.optimizer not in (None, *OPTIMIZERS):
            raise CompressionError(f"there is no optimizer {self.optimizer!r}; known are {', '.join(OPTIMIZERS)}")
        for name, (least, most) in BOUNDS.items():
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and least <= value <= most):
                option = "sequence-length" if name == "length" else name.replace("_", "-")
                raise CompressionError(f"--{option} {value:g} is out of range; give {least:g} to {most:,g}")
        if not any((self.distill, self.cross_entropy, self.hidden_states)):
            raise CompressionError("nothing is learnt of no loss; give --distill, --cross-entropy or --hidden-states")
        if self.tokens_per_step < self.length:
            raise CompressionError(
                f"--tokens-per-step {self.tokens_per_step} is less than one sequence of {self.length} tokens; raise it "
                "or lower --sequence-length"
            )

    @property
    def rate(self) -> float:
        """The learning rate at its highest."""
        return self.learning_rate or RATES[self.method]

    @property
    def optimiser(self) -> str:
        """The optimiser's name: Adam's state is twice the parameters, Adafactor's a row and a column of each."""
        return self.optimizer or ("adafactor" if self.stream else "adam")

    @property
    def sequences(self) -> int:
        """Sequences of a step."""
        return self.tokens_per_step // self.length

    @property
    def every(self) -> int:
        """Steps from one evaluation to the next."""
        return self.evaluate_every or math.ceil(self.steps / EVALUATIONS)

    def rate_at(self, step: int) -> float:
        """The learning rate of a step, counted from 0: up over the first ones, then down to 0 on a line."""
        warm = max(1, round(WARM_UP * self.steps))
        return self.rate * min((step + 1) / warm, (self.steps - step) / (self.steps - warm + 1))

    @classmethod
    def from_plan(cls, asked: Mapping[str, Any]) -> Self:
        """What a plan asks for; raises `CompressionError` for a field of another kind."""
        return read_as(cls, {name: value for name, value in asked.items() if name in cls.__slots__}, "recover")

    def to_dict(self) -> dict[str, Any]:
        """What a plan says of it; what was left to a default is said, too."""
        settled = {"learning_rate": self.rate, "optimizer": self.optimiser, "evaluate_every": self.every}
        return {**asdict(self), **settled}
