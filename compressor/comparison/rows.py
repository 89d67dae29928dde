"""What a comparison found: one row for each way of making the model smaller, beside the original and random drops."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from compressor.calibration.sources import without_folders
from compressor.records import finite, plain_json


@dataclass(frozen=True, slots=True)
class Row:
    """One model of the comparison. Losses are in nats per evaluated token, on text that no part of a plan saw."""

    name: str  # the strategy with its options, or "original"
    strategy: str
    correction: str  # none, ridge or tune
    experts: int  # per MoE layer
    parameters: int
    bytes: int
    loss: float
    perplexity: float
    kl: float  # of the original's next-token distribution to this model's, nats per token
    error: float | None  # mean over layers of ||y - y'||^2 / ||y||^2 on held-out calibration tokens
    seconds: float  # deciding, and correcting with the evaluation on the way; not the pass that all plans share
    peak_memory: int  # bytes of anonymous memory at the highest while it was corrected and evaluated
    loss_by_source: Mapping[str, float] = field(default_factory=dict)
    source: str | None = None  # the calibration source that it was planned for, if for one alone
    seed: int | None = None  # of a random drop

    @property
    def is_random(self) -> bool:
        """Whether experts were dropped at random."""
        return self.strategy == "random"


@dataclass(frozen=True, slots=True)
class Comparison:
    """All rows, the original first, with what they were measured on."""

    model: str
    rows: tuple[Row, ...]
    calibration: Mapping[str, Any]  # identity of the calibration data
    evaluation: Mapping[str, int]  # tokens of each evaluation set
    calibration_seconds: float  # the pass that all plans share
    seed: int
    versions: Mapping[str, str]
    protected: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # by module; in no row merged or dropped

    @property
    def original(self) -> Row:
        """The model as it is."""
        return self.rows[0]

    def increase(self, row: Row) -> float:
        """Loss above the original's, nats per token."""
        return row.loss - self.original.loss

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types without folders; None for a number that JSON cannot write."""
        content = asdict(self)
        content["calibration"] = without_folders(self.calibration) if self.calibration else {}
        for entry, row in zip(content["rows"], self.rows, strict=True):
            entry["loss_increase"] = self.increase(row)
        found: dict[str, Any] = plain_json(content, finite)
        return found
