"""The rows of a comparison as tables and pictures show them: labels, random drops on one line, data in words."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from compressor.calibration.sources import without_folders
from compressor.comparison.rows import Comparison, Row


def label(row: Row) -> str:
    """What tells a line from the others; random drops that differ in their seed alone share one."""
    parts = ["random" if row.is_random else row.name]
    if row.correction != "none":
        parts.append(f"+ {row.correction}")
    if row.source is not None:
        parts.append(f"for {row.source}")
    return " ".join(parts)


@dataclass(frozen=True, slots=True)
class Entry:
    """One line: a model, or the random drops to one expert count that differ in their seed alone."""

    label: str
    rows: tuple[Row, ...]

    @property
    def experts(self) -> int:
        """Per MoE layer, the same in all rows."""
        return self.rows[0].experts

    @property
    def is_random(self) -> bool:
        """Whether experts were dropped at random."""
        return self.rows[0].is_random

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


def entries(rows: Iterable[Row]) -> tuple[Entry, ...]:
    """The rows in their order, random drops joined where the first of them stands."""
    found: dict[tuple[str, int, int | None], list[Row]] = {}
    for number, row in enumerate(rows):
        found.setdefault((label(row), row.experts, None if row.is_random else number), []).append(row)
    return tuple(Entry(key[0], tuple(together)) for key, together in found.items())


def ranked(comparison: Comparison) -> tuple[Entry, ...]:
    """All entries but the original: many experts first, and the least loss first among equally many."""
    return tuple(sorted(entries(comparison.rows[1:]), key=lambda entry: (-entry.experts, sort_key(entry.loss))))


def best_rows(comparison: Comparison) -> frozenset[int]:
    """Numbers of the rows with the least loss of each expert count; the original does not compete."""
    best: dict[int, int] = {}
    for number, row in enumerate(comparison.rows[1:], start=1):
        leader = best.setdefault(row.experts, number)
        if sort_key(row.loss) < sort_key(comparison.rows[leader].loss):
            best[row.experts] = number
    return frozenset(best.values())


def _with_tokens(name: str, tokens: Any) -> str:
    return f"{name} ({tokens:,} tokens)" if isinstance(tokens, int) else name


def _listed(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _calibration_data(calibration: Mapping[str, Any]) -> str:
    if not calibration:
        return "no data"
    plain = without_folders(calibration)
    parts = plain.get("sources") or [plain]
    return _listed([_with_tokens(part["source"], part.get("tokens")) for part in parts])


def data_line(comparison: Comparison) -> str:
    """What was calibrated with and evaluated on, and the seed, as a sentence."""
    evaluated = [_with_tokens(name, tokens) for name, tokens in comparison.evaluation.items()] or ["no data"]
    return (
        f"Calibrated with {_calibration_data(comparison.calibration)} in {comparison.calibration_seconds:.1f} s, "
        f"evaluated on {_listed(evaluated)}, seed {comparison.seed}."
    )
