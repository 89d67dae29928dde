"""CoMoE's settings: of its layers, and of its training."""

import re
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field, FiniteFloat, PositiveInt

from compressor.entry_points import option
from compressor.errors import CompressionError
from compressor.records import check_fields

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")

Targets = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(min_length=1)]
Projection = Literal["pca", "tsne"]
NotNegative = Annotated[FiniteFloat, Field(ge=0)]
Positive = Annotated[FiniteFloat, Field(gt=0)]


@dataclass(frozen=True, slots=True)
class ComoeConfig:
    """The LoRA experts and the layers that they stand beside; the paper's values by default."""

    rank: PositiveInt = option(16, "Rank of each expert.")
    experts: Annotated[int, Field(ge=1, le=1024)] = option(4, "LoRA experts beside each layer.")
    top_k: PositiveInt = option(2, "Experts that a token activates.")
    targets: Targets = TARGETS  # how the names of the linear layers end
    alpha: Annotated[float, Field(ge=-1e6, le=1e6)] | None = option(
        None, "The experts' sum is multiplied by alpha / rank (default: twice the rank)."
    )
    # in training
    dropout: Annotated[float, Field(ge=0, lt=1)] = option(0.05, "Dropout of the experts' inputs.")
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0  # of how A and the router begin
    layers: str | None = option(
        None,
        "Decoder layers with experts, separated by commas: low, middle, high (thirds), or numbers "
        "from 0 such as 0-9 "
        "(default: all).",
    )
    dora: bool = option(
        False, "Make each expert a DoRA: it learns the length of each row of its weights, too."
    )

    def __post_init__(self) -> None:
        check_fields(self)
        self.decoder_layers(1)
        if self.top_k > self.experts:
            raise CompressionError(
                f"{self.top_k} of {self.experts} experts are to be activated; activate no more "
                "than there are"
            )

    @property
    def scaling(self) -> float:
        """The factor of the experts' sum."""
        return 2.0 if self.alpha is None else self.alpha / self.rank

    def decoder_layers(self, count: int) -> set[int]:
        """Return the numbers of the layers with experts among `count` decoder layers.

        Of the paper's 32 layers, the lower two thirds have 10 each and the highest has 12.
        """
        if self.layers is None:
            return set(range(count))
        third = max(1, count // 3)
        bounds = {"low": (0, third), "middle": (third, 2 * third), "high": (2 * third, count)}
        numbers = set[int]()
        for part in self.layers.split(","):
            word = part.strip()
            span = re.fullmatch(r"(\d+)(?:-(\d+))?", word)
            if word in bounds:
                numbers.update(range(*bounds[word]))
            elif span:
                first = int(span[1])
                numbers.update(range(first, min(int(span[2] or first) + 1, count)))
            else:
                raise CompressionError(
                    f"--layers has {word!r}; write low, middle, high or numbers such as 0-9, "
                    "separated by commas"
                )
        return numbers


@dataclass(frozen=True, slots=True)
class TuningOptions:
    """One training run; the paper's values by default, where it has them."""

    config: ComoeConfig = ComoeConfig()
    # lambda of equation 13
    contrastive: NotNegative = option(0.01, "Weight of the contrastive loss; 0 leaves it out.")
    temperature: Positive = option(0.07, "Temperature of the contrastive loss.")
    anchors: Literal["one", "all"] = option(
        "one",
        "Activated experts of a token that are anchors: one that is drawn (Algorithm 1), or all, "
        "whose losses are "
        "added (equation 12).",
    )
    contrastive_tokens: Annotated[int, Field(ge=0)] = option(
        512, "Tokens of a batch on which each layer computes the contrastive loss; 0: all."
    )
    steps: PositiveInt | None = option(None, "Training steps, instead of epochs.")
    epochs: Positive = option(2.0, "Times that all items are seen.")
    batch_size: PositiveInt = option(16, "Items of a batch.")
    accumulation: PositiveInt = option(1, "Batches of a step.")
    cutoff: Annotated[int, Field(ge=2)] | None = option(
        None,
        "Most tokens of an item; the first ones are cut (default: as many as the model takes).",
    )
    learning_rate: NotNegative = option(2e-4, "Learning rate of AdamW; it falls linearly to 0.")
    warmup: Annotated[float, Field(ge=0, le=1)] = option(
        0.0, "Share of the steps in which the learning rate rises."
    )
    seed: Annotated[int, Field(ge=0, lt=2**32)] = option(0, "Seed of everything that is drawn.")
    log_every: PositiveInt = option(10, "Steps between lines of the log.")
    save_every: PositiveInt = option(
        100, "Steps between checkpoints, from which a killed run goes on."
    )

    def __post_init__(self) -> None:
        check_fields(self)
        top_k = self.config.top_k
        experts = self.config.experts
        if self.contrastive > 0 and not 2 <= top_k < experts:
            raise CompressionError(
                f"with {top_k} of {experts} experts activated the contrastive loss has no "
                f"{'positives' if top_k < 2 else 'negatives'}; activate at least 2 and leave at "
                "least 1 inactive, or "
                "pass --contrastive 0"
            )
        if self.save_every % self.log_every:
            raise CompressionError(
                f"--save-every {self.save_every} is no multiple of --log-every {self.log_every}; "
                "make it one, so that "
                "a run that goes on logs what it would have logged"
            )
