"""CoMoE's settings: of its layers, and of its training."""

import math
from dataclasses import dataclass

from compressor.entry_points import option
from compressor.errors import CompressionError

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")
MOST_EXPERTS = 1024
MOST_SCALING = 1e6


@dataclass(frozen=True, slots=True)
class ComoeConfig:
    """What is put beside which layers; the paper's values by default."""

    rank: int = option(16, "Of each expert.")
    experts: int = option(4, "Beside each layer.")
    top_k: int = option(2, "Experts that a token activates.")
    targets: tuple[str, ...] = TARGETS  # how the names of the linear layers end
    alpha: float | None = option(None, "What experts add is multiplied by alpha / rank (default: twice the rank).")
    dropout: float = option(0.05, "Of what experts get.")  # in training
    seed: int = 0  # of how A and the router begin

    def __post_init__(self) -> None:
        """Refuses what cannot be meant."""
        if self.rank < 1 or not 1 <= self.experts <= MOST_EXPERTS:
            raise CompressionError(
                f"rank {self.rank} with {self.experts} experts is no adapter; give a rank of at least 1 and 1 to "
                f"{MOST_EXPERTS} experts"
            )
        if not 1 <= self.top_k <= self.experts:
            raise CompressionError(
                f"top-k is {self.top_k} of {self.experts} experts; activate at least 1 and no more than there are"
            )
        if not self.targets or not all(self.targets):
            raise CompressionError(f"no layer is named to put experts beside; name some, such as {', '.join(TARGETS)}")
        if not (abs(self.scaling) <= MOST_SCALING and 0 <= self.dropout < 1):
            raise CompressionError(
                f"alpha is {self.alpha} and dropout {self.dropout:g}; take twice the rank, and a share below 1"
            )
        if not 0 <= self.seed < 2**63:
            raise CompressionError(f"seed {self.seed} is no seed; give a whole number from 0 on")

    @property
    def scaling(self) -> float:
        """What the experts' sum is multiplied by."""
        return 2.0 if self.alpha is None else self.alpha / self.rank

    def check_contrast(self) -> None:
        """Refuse a contrastive loss that would have no positives, or no negatives."""
        if not 2 <= self.top_k < self.experts:
            raise CompressionError(
                f"with top-k {self.top_k} of {self.experts} experts the contrastive loss has "
                f"{'no positives' if self.top_k < 2 else 'no negatives'}; activate at least 2 experts and leave at "
                "least 1 inactive, or pass --contrastive 0"
            )


@dataclass(frozen=True, slots=True)
class TuningOptions:
    """One training run; the paper's values by default, where it tells them."""

    contrastive: float = option(0.01, "Weight of the contrastive loss; 0 leaves it out.")  # lambda of equation 13
    temperature: float = option(0.07, "Of the contrastive loss.")
    contrastive_tokens: int | None = option(512, "Tokens of a batch that it is computed on in each layer; 0: all.")
    steps: int | None = option(None, "Instead of epochs.")
    epochs: float = option(2.0, "Times that all items are seen.")
    batch_size: int = option(16, "Items of a batch.")
    accumulation: int = option(1, "Batches of a step.")
    learning_rate: float = option(2e-4, "Of AdamW; it falls to 0 in a line.")
    warmup: float = option(0.0, "Share of the steps in which the rate rises.")
    seed: int = option(0, "For everything that is drawn.")
    log_every: int = option(10, "Steps of a line in the log.")
    save_every: int = option(100, "Steps after which a killed run can go on.")

    def __post_init__(self) -> None:
        """Refuses what cannot be meant."""
        counts = ("steps", "batch_size", "accumulation", "contrastive_tokens", "log_every", "save_every")
        for name, fits, wanted in (
            ("contrastive", 0 <= self.contrastive < math.inf, "a number of 0 or more"),
            ("learning_rate", 0 <= self.learning_rate < math.inf, "a number of 0 or more"),
            ("temperature", 0 < self.temperature < math.inf, "a number above 0, such as 0.07"),
            ("warmup", 0 <= self.warmup <= 1, "a share of the steps, from 0 to 1"),
            ("epochs", 0 < self.epochs < math.inf, "a number above 0, such as 2"),
            *((name, (getattr(self, name) or 0) >= 1, "a whole number of at least 1") for name in counts),
            ("seed", 0 <= self.seed < 2**32, f"a whole number from 0 to {2**32 - 1}"),
        ):
            if not fits and getattr(self, name) is not None:
                raise CompressionError(f"--{name.replace('_', '-')} is {getattr(self, name)}; give {wanted}")
        if self.save_every % self.log_every:
            raise CompressionError(
                f"--save-every {self.save_every} is no multiple of --log-every {self.log_every}; make it one, so that "
                "a run that goes on logs what it would have logged"
            )

    def total_steps(self, items: int) -> int:
        """Steps that training on so many items takes."""
        if self.steps is not None:
            return self.steps
        batches = math.ceil(items / self.batch_size)
        return max(1, math.ceil(self.epochs * math.ceil(batches / self.accumulation)))
