"""What is put beside which layers."""

from dataclasses import dataclass

from compressor.errors import CompressionError

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")
MOST_EXPERTS = 1024
MOST_SCALING = 1e6


@dataclass(frozen=True, slots=True)
class ComoeConfig:
    """What is put beside which layers; the paper's values by default."""

    rank: int = 16
    experts: int = 4
    top_k: int = 2
    targets: tuple[str, ...] = TARGETS  # how the names of the linear layers end
    alpha: float | None = None  # what the experts add is multiplied by alpha / rank; None: twice the rank
    dropout: float = 0.05  # of what goes into the experts, in training
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
