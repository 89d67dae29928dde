"""The step `distill`: train the smaller model end to end toward its base's next-token distribution on text."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from compressor.document.blocks import Block, Table, Text
from compressor.errors import CompressionError
from compressor.formatting import short
from compressor.recipe.document import changed, divergence, flips
from compressor.recipe.step import DEFAULT_LENGTH, Needs, Result, Step, TextPart

if TYPE_CHECKING:
    from torch import Tensor

    from compressor.model.opened import OpenModel
    from compressor.steps.state import State

RATES: Mapping[str, float] = {"experts": 1e-3, "router": 3e-3, "lora": 2e-3, "all": 1e-3}  # at the highest, by `train`
WARM_UP = 0.05  # of the steps, over which the rate rises; then it falls to 0 on a line
EVALUATIONS = 8  # of held-out text, if nothing else is asked for
COLUMNS = ("step", "KL", "loss", "flips", "training")
Evaluation = tuple[int, float, float]  # step, KL from the base, next-token loss


class Distill(Step):
    """Train toward the base; the loss is the sum of its parts, each times its weight."""

    name: ClassVar[str] = "distill"
    not_after: ClassVar[Mapping[str, str]] = {"constants": "stock transformers cannot load constants"}

    train: Literal["experts", "router", "lora", "all", "none"] = Field(
        "experts", description="Train experts (and routers), router, lora or all toward the base."
    )
    steps: int = Field(400, ge=1, le=10**6, description="Optimizer steps.")
    tokens_per_step: int = Field(2048, ge=2, le=10**8, description="Tokens in each step.")
    sequence_length: int = Field(DEFAULT_LENGTH, ge=2, le=10**6, description="Tokens in each sequence.")
    learning_rate: float | None = Field(
        None,
        ge=1e-12,
        le=1e12,
        description="Peak learning rate (default: 1e-3, lora 2e-3, router 3e-3).",
    )
    optimizer: Literal["adam", "adafactor"] | None = Field(
        None, description="adam or adafactor (default: adam; with stream adafactor)."
    )
    rank: int = Field(16, ge=1, le=10**5, description="Rank of LoRA's factors.")
    stream: bool = Field(False, description="Train with one decoder layer in memory at a time.")
    kl: float = Field(1.0, ge=0, le=1e6, description="Weight of the KL divergence from the base's next token.")
    cross_entropy: float = Field(0.0, ge=0, le=1e6, description="Weight of the text's own next-token loss.")
    hidden_states: float = Field(0.0, ge=0, le=1e6, description="Weight of the distance from the base's hidden states.")
    contrastive: float = Field(0.0, ge=0, le=1e6, description="Weight of CoMoE's contrastive loss between experts.")
    temperature: float = Field(0.07, ge=1e-3, le=1e3, description="Temperature of the contrastive loss.")
    negatives: int = Field(8, ge=1, le=10**6, description="Inactive experts that the contrastive loss samples.")
    evaluate_every: int | None = Field(
        None, ge=1, le=10**6, description="Steps between evaluations on held-out text (default: an eighth of them)."
    )
    patience: int = Field(8, ge=1, le=10**6, description="Evaluations without improvement before training stops.")

    @model_validator(mode="after")
    def _learns(self) -> Self:
        if not any((self.kl, self.cross_entropy, self.hidden_states)):
            raise ValueError("nothing is learnt of no loss; give kl, cross_entropy or hidden_states a weight")
        if self.tokens_per_step < self.sequence_length:
            raise ValueError(
                f"tokens_per_step {self.tokens_per_step} is less than one sequence of {self.sequence_length} tokens; "
                "raise it or lower sequence_length"
            )
        return self

    @property
    def rate(self) -> float:
        return self.learning_rate or RATES[self.train]

    @property
    def optimiser(self) -> str:
        """The optimizer's name: Adam's state is twice the parameters, Adafactor's a row and a column of each."""
        return self.optimizer or ("adafactor" if self.stream else "adam")

    @property
    def sequences(self) -> int:
        return self.tokens_per_step // self.sequence_length

    @property
    def every(self) -> int:
        return self.evaluate_every or math.ceil(self.steps / EVALUATIONS)

    def rate_at(self, step: int) -> float:
        """The learning rate of a step, counted from 0: up over the first ones, then down to 0 on a line."""
        warm = max(1, round(WARM_UP * self.steps))
        return self.rate * min((step + 1) / warm, (self.steps - step) / (self.steps - warm + 1))

    def resolved(self, model: "OpenModel", steps: Sequence[Step]) -> Self | None:
        """None where nothing is trained."""
        return None if self.train == "none" else self

    def needs(self, model: "OpenModel", steps: Sequence[Step], planned: bool) -> Needs:
        """Text of its own to train on, and held-out text; refuses tensors that cannot be trained as they are stored."""
        from compressor.steps.distill.engines import stored_dtypes, trained_layers

        if self.train != "router" and any(step.name == "quantize" for step in steps):
            fault = f"train {self.train} changes weights that quantize has packed"
            raise CompressionError(f"distill: {fault}; put distill before quantize, or give train: router")
        layers = trained_layers(model, self)
        if not model.layout.quantized or not steps:  # merging and correcting dequantise first
            stored_dtypes(model, layers)
        part = TextPart(self.steps * self.sequences, self.sequence_length, min(8, self.sequences), self.sequences)
        state = {"adam": 12, "adafactor": 4}[self.optimiser] if self.train in ("experts", "all") else 0
        whole = 0 if self.stream else model.partial.dtype.itemsize + state
        return Needs(part=part, passes=2, whole=whole)  # the base's, and forward and back for the gradients

    def asks_base(self, batches: "Sequence[Tensor]") -> "Sequence[Tensor]":
        """All batches: the base's next-token distributions on them are what is trained toward."""
        return batches

    @property
    def asks_hidden(self) -> bool:
        """Whether the base's last hidden states are needed, too."""
        return self.hidden_states > 0

    def whole(self, state: "State") -> Result | None:
        """Train, evaluate on held-out text, and take the best state if it is nearer to the base."""
        from compressor.steps.distill.training import distill

        return distill(self, state)

    def describe(self, entry: Mapping[str, Any]) -> Sequence[Block]:
        """What was trained for how long, KL before and after, and a row for each evaluation, with training losses."""
        result = entry.get("result") or {}
        training = f"{self.train}, at most {self.steps} steps of {self.tokens_per_step} tokens"
        outcome = f"{divergence(result, True)}, after {result.get('best')} steps"
        if not changed(entry):
            outcome = f"nothing was changed; {divergence(result, False)}"
        rows = []
        for evaluation in _evaluations(entry):
            losses = [f"{name} {short(value)}".replace("_", " ") for name, value in evaluation["training"].items()]
            rows.append(
                (
                    f"{evaluation['step']:,}",
                    short(evaluation["kl"], 5),
                    short(evaluation["loss"], 5),
                    flips(evaluation["flips"]) if "flips" in evaluation else "-",
                    ", ".join(losses) or "-",
                )
            )
        return (
            Text(f"Distillation ({training}): {outcome}."),
            *([Text(f"Training ended: {ended}.")] if (ended := result.get("ended")) else []),
            *(
                [Table("Held-out text during the distillation", COLUMNS, tuple(rows), frozenset(COLUMNS[4:]))]
                if rows
                else []
            ),
        )


def curve(entry: Mapping[str, Any]) -> list[Evaluation]:
    """The evaluations on held-out text, in the order of their steps."""
    return [(each["step"], float(each["kl"]), float(each["loss"])) for each in _evaluations(entry)]


def _evaluations(entry: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    result = entry.get("result") or {}
    return list(result.get("curve", ()))
