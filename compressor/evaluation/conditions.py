"""Conditions of the gate beside its tasks: what a smaller model's behaviour may differ by, and whether it does."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from compressor.document.blocks import Table, Tone, Toned
from compressor.errors import CompressionError

Verdict = Literal["pass", "fail", "inconclusive"]
SIGNS: Mapping[Verdict, tuple[Tone, str]] = {
    "pass": ("good", "✓"),
    "fail": ("bad", "✗"),
    "inconclusive": ("unsure", "?"),
}


@dataclass(frozen=True, slots=True)
class GateCondition:
    """One figure with a limit: its upper bound within the limit passes, its lower bound beyond it fails."""

    name: str  # such as "loops", or "flips on code"
    option: str  # that sets the limit
    limit: float
    observed: float  # what the limit is for, such as the rise of a rate
    lower: float  # one-sided confidence bounds of it
    upper: float
    items: int
    unit: str  # of the items, in the plural
    verdict: Verdict
    base: float | None = None  # the figure of either model, where each has one
    compressed: float | None = None
    advice: str = ""  # what would decide it, where it is inconclusive

    @property
    def sentence(self) -> str:
        """Name, figure, bounds and limit."""
        figure = f"{self.observed:+.4f} (at least {self.lower:+.4f}, at most {self.upper:+.4f})"
        return f"the {self.name} is {figure} on {self.items:,} {self.unit}; {self.limit:g} is allowed by {self.option}"


def check_confidence(confidence: float) -> None:
    """Refuse a confidence that no bound has."""
    if not 0.5 < confidence < 1:
        raise CompressionError(f"--confidence {confidence} should lie between 0.5 and 1, such as 0.95")


def conditions_table(conditions: Sequence[GateCondition]) -> Table:
    """A row for each condition."""

    def shown(value: float | None) -> str:
        return "-" if value is None else f"{value:.4f}"

    columns = ("condition", "of", "base", "compressed", "allowed", "rise", "at least", "at most", "verdict")
    rows = tuple(
        (
            condition.name,
            f"{condition.items:,} {condition.unit}",
            shown(condition.base),
            shown(condition.compressed),
            f"{condition.limit:g}",
            f"{condition.observed:+.4f}",
            f"{condition.lower:+.4f}",
            f"{condition.upper:+.4f}",
            Toned(condition.verdict, *SIGNS[condition.verdict]),
        )
        for condition in conditions
    )
    return Table("Conditions on behaviour", columns, rows, frozenset({"of", "verdict"}), ("of", "at least"))
