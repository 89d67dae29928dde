"""The record of judging without generating, by domain: the record, and how it is shown."""

from collections.abc import Mapping
from dataclasses import dataclass

from compressor.document.blocks import Block, Strong, Table, Text, Words

CONFIDENCE = 0.95
TIMES = 3.0  # the mean of the other domains, above which a domain suffers
LEAST = 1e-3  # nats per token, below which none does
TOGETHER = "all together"
MEASURES: Mapping[str, str] = {"loss": "loss", "kl": "KL from the base"}
LEGEND = (
    "Loss and KL (of the base's next-token distribution to the smaller model's) are in nats per token; flips is the "
    "share of positions whose greedy token is not the base's. In brackets: one-sided bounds of the difference from the "
    "base, paired by sequence, each with confidence {confidence:g}%."
)
OF_BOTH = ("base", "smaller", "change")
OF_ENDS = (
    " Both models read the base's own answers. At the end: the mean probability of the token that ends an answer, or "
    "its thinking, where the base's answer has it; elsewhere: at all other tokens of the answers."
)


@dataclass(frozen=True, slots=True)
class Paired:
    """A figure of both models on the same sequences; a change is the smaller model's less the base's."""

    base: float
    compressed: float
    change: float
    lower: float  # one-sided bounds of the change
    upper: float
    standard_error: float


@dataclass(frozen=True, slots=True)
class MarkFigures:
    """The probability of a token such as that which ends a text; None where there are no such positions."""

    name: str
    count: int  # positions where it comes next
    here: Paired | None
    elsewhere: Paired | None


@dataclass(frozen=True, slots=True)
class DomainFigures:
    """One domain, or all together; loss and KL in nats per token, flips a share of positions."""

    domain: str
    sequences: int
    tokens: int
    loss: Paired
    kl: Paired
    flips: Paired
    marks: tuple[MarkFigures, ...] = ()


@dataclass(frozen=True, slots=True)
class Suffering:
    """A domain that loses more than `TIMES` the mean of the others, beyond the error of both."""

    domain: str
    measure: str  # a key of `MEASURES`
    change: float  # nats per token
    others: float  # mean of the other domains' changes

    @property
    def sentence(self) -> str:
        what, verb = MEASURES[self.measure], "rises by" if self.measure == "loss" else "is"
        compared = f"more than {TIMES:g} times the mean of the other domains, {self.others:.3g}"
        return f"The domain {self.domain} suffers: its {what} {verb} {self.change:.3g} nats per token, {compared}."


@dataclass(frozen=True, slots=True)
class Judged:
    """The record of judging without generating, by domain."""

    domains: tuple[DomainFigures, ...]
    together: DomainFigures | None  # None of a single domain
    suffering: tuple[Suffering, ...]
    confidence: float = CONFIDENCE
    note: str = ""  # what the text lacks

    @property
    def rows(self) -> tuple[DomainFigures, ...]:
        """Every domain, then all together."""
        return self.domains if self.together is None else (*self.domains, self.together)

    @property
    def overall(self) -> DomainFigures:
        """Figures of all text."""
        return self.domains[0] if self.together is None else self.together


def heldout_blocks(judged: Judged) -> tuple[Block, ...]:
    """Output and base on a run's held-out text, in a line; of several sources a table, too."""
    loss, rise, kl, flips = overall_words(judged.overall)
    sequences = judged.overall.sequences
    line = (
        f"Held-out text ({sequences:,} sequences): loss of the base and of the output {loss} ({rise}) nats "
        f"per token, KL from the base {kl}, another greedy token at {flips} of positions (±: 95% interval)"
    )
    blocks: list[Block] = [Text(line)]
    if judged.together is not None:
        blocks += judged_blocks(judged, "Held-out text by source, compared with the base")
    if judged.note:
        blocks.append(Text(judged.note))
    return tuple(blocks)


def overall_words(row: DomainFigures) -> tuple[str, str, str, str]:
    """Loss of base and output, its rise, KL and flips, with two-sided 95% intervals by Student's t over sequences."""
    from scipy.stats import t  # which takes a while

    width = float(t.isf(0.025, row.sequences - 1))
    loss, kl, flips = row.loss, row.kl, row.flips
    return (
        f"{loss.base:.4f} → {loss.compressed:.4f}",
        f"{loss.change:+.4f} ± {width * loss.standard_error:.4f}",
        f"{kl.change:.4f} ± {width * kl.standard_error:.4f}",
        f"{flips.change:.1%} ± {width * flips.standard_error:.1%}",
    )


def judged_blocks(judged: Judged, title: str) -> tuple[Block, ...]:
    """Which domains suffer, and the table; with marks a second one of the probabilities of ends."""

    def changed(pair: Paired, scale: float = 1.0, sign: str = "+", unit: str = "") -> str:
        values = [scale * value for value in (pair.change, pair.lower, pair.upper)]
        digits = 3 if abs(values[0]) >= 0.1 else 5
        change, lower, upper = (f"{value:{mark}.{digits}f}" for value, mark in zip(values, (sign, "", ""), strict=True))
        return f"{change}{unit} ({lower} to {upper})"

    def both(pair: Paired | None) -> tuple[str, ...]:
        return ("-",) * 3 if pair is None else (f"{pair.base:.4f}", f"{pair.compressed:.4f}", changed(pair))

    named = {each.domain for each in judged.suffering}
    rows: list[tuple[Words, ...]] = [
        (
            Strong(row.domain) if row.domain in named else row.domain,
            f"{row.sequences:,}",
            f"{row.tokens:,}",
            f"{row.loss.base:.4f}",
            changed(row.loss),
            changed(row.kl, sign=""),
            changed(row.flips, 100, "", "%"),
        )
        for row in judged.rows
    ]
    ruled = frozenset({len(judged.domains) - 1})
    columns = ("domain", "sequences", "tokens", "base's loss", "rise of the loss", "KL", "flips")
    tables = [Table(title, columns, tuple(rows), frozenset({"domain"}), ("tokens", "sequences"), ruled)]
    marks = judged.domains[0].marks
    for place, mark in enumerate(marks):
        heads = ("domain", "ends", *(f"{what} {at}" for at in ("at the end", "elsewhere") for what in OF_BOTH))
        ends = tuple(
            (row.domain, f"{row.marks[place].count:,}", *both(row.marks[place].here), *both(row.marks[place].elsewhere))
            for row in judged.rows
        )
        caption = f"Probability of the token that ends {mark.name}"
        tables.append(Table(caption, heads, ends, frozenset({"domain"}), ("ends",), ruled))
    legend = LEGEND.format(confidence=100 * judged.confidence) + (OF_ENDS if marks else "")
    return *(Text(Strong(each.sentence), "bad") for each in judged.suffering), *tables, Text(legend)
