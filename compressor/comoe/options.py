"""CoMoE's settings: of its layers, and of its training."""

import re
from typing import Annotated, Literal, Self

from pydantic import Field, FiniteFloat, PositiveInt, model_validator

from compressor.errors import CompressionError
from compressor.options import NamedOptions, Options

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")

Projection = Literal["pca", "tsne"]


class ComoeConfig(NamedOptions):
    """The LoRA experts and the layers that they stand beside; the paper's values by default."""

    rank: PositiveInt = 16
    """Rank of each expert."""
    experts: int = Field(4, ge=1, le=1024)
    """LoRA experts beside each layer."""
    top_k: PositiveInt = 2
    """Experts that a token activates."""
    # how names of linear layers end
    targets: tuple[Annotated[str, Field(min_length=1)], ...] = Field(TARGETS, min_length=1)
    alpha: float | None = Field(None, ge=-1e6, le=1e6)
    """The experts' sum is multiplied by alpha / rank (default: twice the rank)."""
    dropout: float = Field(0.05, ge=0, lt=1)
    """Dropout of the experts' inputs."""
    seed: int = Field(0, ge=0, lt=2**63)  # of how A and the router begin
    layers: str | None = None
    """Decoder layers with experts, separated by commas: low, middle, high (thirds), or numbers from
    0 such as 0-9 (default: all)."""
    dora: bool = False
    """Make each expert a DoRA: it learns the length of each row of its weights, too."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        self.decoder_layers(1)
        if self.top_k > self.experts:
            raise CompressionError(
                f"{self.top_k} of {self.experts} experts are to be activated; activate no more "
                "than there are"
            )
        return self

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


class TuningOptions(NamedOptions):
    """One training run; the paper's values by default, where it has them."""

    config: ComoeConfig = ComoeConfig()
    contrastive: FiniteFloat = Field(0.01, ge=0)  # lambda of equation 13
    """Weight of the contrastive loss; 0 leaves it out."""
    temperature: FiniteFloat = Field(0.07, gt=0)
    """Temperature of the contrastive loss."""
    anchors: Literal["one", "all"] = "one"
    """Activated experts of a token that are anchors: one that is drawn (Algorithm 1), or all, whose
    losses are added (equation 12)."""
    contrastive_tokens: int = Field(512, ge=0)
    """Tokens of a batch on which each layer computes the contrastive loss; 0: all."""
    steps: PositiveInt | None = None
    """Training steps, instead of epochs."""
    epochs: FiniteFloat = Field(2.0, gt=0)
    """Times that all items are seen."""
    batch_size: PositiveInt = 16
    """Items of a batch."""
    accumulation: PositiveInt = 1
    """Batches of a step."""
    cutoff: int | None = Field(None, ge=2)
    """Most tokens of an item; the first ones are cut (default: as many as the model takes)."""
    learning_rate: FiniteFloat = Field(2e-4, ge=0)
    """Learning rate of AdamW; it falls linearly to 0."""
    warmup: float = Field(0.0, ge=0, le=1)
    """Share of the steps in which the learning rate rises."""
    seed: int = Field(0, ge=0, lt=2**32)
    """Seed of everything that is drawn."""
    log_every: PositiveInt = 10
    """Steps between lines of the log."""
    save_every: PositiveInt = 100
    """Steps between checkpoints, from which a killed run goes on."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        top_k = self.config.top_k
        experts = self.config.experts
        if self.contrastive > 0 and not 2 <= top_k < experts:
            raise CompressionError(
                f"with {top_k} of {experts} experts activated the contrastive loss has no "
                f"{'positives' if top_k < 2 else 'negatives'}; activate at least 2 and leave at "
                "least 1 inactive, or pass --contrastive 0"
            )
        if self.save_every % self.log_every:
            raise CompressionError(
                f"--save-every {self.save_every} is no multiple of --log-every {self.log_every}; "
                "make it one, so that a run that goes on logs what it would have logged"
            )
        return self


class AskingOptions(Options):
    """How a model with LoRA experts is asked, and what is drawn of its experts."""

    with_base: bool = False
    """Evaluate the model without adapters, too."""
    batch_size: int = Field(16, ge=1)
    """Items of a batch."""
    timed_tokens: int = Field(0, ge=0)
    """Time a batch of answers of so many generated tokens, and take its memory; 0: don't."""
    projection: Projection = "pca"
    """How experts' outputs are drawn in two dimensions: pca or tsne."""
    scatter_layer: str | None = None
    """Layer whose experts' outputs are drawn (default: the last)."""
