"""What a comparison found: one row for each way of making the model smaller, beside the original and random drops.

Tables and pictures show rows as entries, which have a label and in which random drops share one line.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any

from compressor.data.sources import without_folders
from compressor.records import finite, plain_json
from compressor.words import joined


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
    flips: float  # share of the positions at which the greedy token is not the original's
    error: float | None  # mean over layers of ||y - y'||^2 / ||y||^2 on held-out calibration tokens
    seconds: float  # deciding, and correcting with the evaluation on the way; not the pass that all plans share
    peak_memory: int  # bytes of anonymous memory at the highest while it was corrected and evaluated
    loss_by_source: Mapping[str, float] = field(default_factory=dict)
    source: str | None = None  # the calibration source that it was planned for, if for one alone
    seed: int | None = None  # of a random drop
    split: int = 1  # parts that each expert became before; `experts` then counts parts
    top_k: int | None = None  # experts that a token visits, where that was chosen
    active: int | None = None  # parameters that a token passes; None where stored elements are no parameters
    undone: bool = False  # the correction took the whole model further away on held-out calibration text

    @property
    def kept(self) -> float:
        """Experts of the source's size that stay in each layer."""
        return self.experts / self.split

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


def finer(row: Row) -> str:
    """ ", 2 parts, top 3" of a row whose experts were split, or whose top-k was chosen."""
    parts = f", {row.split} parts" if row.split > 1 else ""
    return parts + (f", top {row.top_k}" if row.top_k is not None else "")


def label(row: Row) -> str:
    """What tells a line from the others; random drops that differ in their seed alone share one."""
    parts = [f"{'random' if row.is_random else row.name}{finer(row)}"]
    if row.correction != "none":
        parts.append(f"+ {row.correction}{' (undone)' if row.undone else ''}")
    if row.source is not None:
        parts.append(f"for {row.source}")
    return " ".join(parts)


@dataclass(frozen=True, slots=True)
class Entry:
    """One line: a model, or the random drops to one expert count that differ in their seed alone."""

    label: str
    rows: tuple[Row, ...]

    @property
    def first(self) -> Row:
        """One of the rows, which are alike but in their seeds and what was measured."""
        return self.rows[0]

    @property
    def losses(self) -> tuple[float, ...]:
        """Loss of each row."""
        return tuple(row.loss for row in self.rows)

    @property
    def loss(self) -> float:
        """Mean over the rows."""
        return fmean(self.losses)

    @property
    def error(self) -> float | None:
        """Mean layer error, or None if a row has none."""
        errors = [row.error for row in self.rows if row.error is not None]
        return fmean(errors) if len(errors) == len(self.rows) else None


def sort_key(loss: float) -> float:
    """Puts what is not a number last."""
    return math.inf if math.isnan(loss) else loss


def entries(rows: Iterable[Row], apart: bool = False) -> tuple[Entry, ...]:
    """The rows in their order, random drops joined where the first of them stands unless they shall stay `apart`."""
    found: dict[tuple[str, int, int | None], list[Row]] = {}
    for number, row in enumerate(rows):
        found.setdefault((label(row), row.experts, None if row.is_random and not apart else number), []).append(row)
    return tuple(Entry(key[0], tuple(together)) for key, together in found.items())


def ranked(comparison: Comparison, apart: bool = False) -> tuple[Entry, ...]:
    """All entries but the original: many experts first, and the least loss first among equally many."""
    return tuple(
        sorted(entries(comparison.rows[1:], apart), key=lambda entry: (-entry.first.kept, sort_key(entry.loss)))
    )


def best_rows(comparison: Comparison) -> frozenset[int]:
    """Numbers of the rows with the least loss of each size of layers; the original does not compete."""
    best: dict[float, int] = {}
    for number, row in enumerate(comparison.rows[1:], start=1):
        leader = best.setdefault(row.kept, number)
        if sort_key(row.loss) < sort_key(comparison.rows[leader].loss):
            best[row.kept] = number
    return frozenset(best.values())


def with_active(comparison: Comparison) -> bool:
    """Whether rows differ in how many experts a token visits, and it is known what that comes to."""
    rows = comparison.rows
    return any(row.top_k is not None for row in rows) and all(row.active is not None for row in rows)


def data_line(comparison: Comparison) -> str:
    """What was calibrated with and evaluated on, and the seed, as a sentence."""
    calibrated = without_folders(comparison.calibration) if comparison.calibration else {}
    sources = calibrated.get("sources") or ([calibrated] if calibrated else [])

    def listed(tokens: Iterable[tuple[str, Any]]) -> str:
        return joined([f"{name} ({n:,} tokens)" if isinstance(n, int) else name for name, n in tokens]) or "no data"

    return (
        f"Calibrated with {listed((part['source'], part.get('tokens')) for part in sources)} in "
        f"{comparison.calibration_seconds:.1f} s, evaluated on {listed(comparison.evaluation.items())}, "
        f"seed {comparison.seed}."
    )
