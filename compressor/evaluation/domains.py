"""How much worse a smaller model does in each domain of text: loss, KL, flips and ends, with paired intervals.

Sequences are paired: what a sequence costs the smaller model is compared with what it costs the base, and each token
counts alike. Bounds are one-sided, as the gate's are, by the tests of likelihoods there. n sequences, M marks.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean

from torch import Tensor

from compressor.document.blocks import Block, Strong, Table, Text, Words
from compressor.errors import CompressionError
from compressor.evaluation.evaluator import Figures
from compressor.evaluation.gate_statistics import PairedItems, evidence, ratio, ratio_error
from compressor.formatting import joined

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
OF_ENDS = (
    " Both models read the base's own answers. At an end: the mean probability of the token that ends an answer, or "
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
    """What judging without generating found, by domain."""

    domains: tuple[DomainFigures, ...]
    together: DomainFigures | None  # None of a single domain
    suffering: tuple[Suffering, ...]
    confidence: float = CONFIDENCE

    @property
    def rows(self) -> tuple[DomainFigures, ...]:
        return self.domains if self.together is None else (*self.domains, self.together)


def paired(base: Tensor, compressed: Tensor, weights: Tensor, confidence: float) -> Paired:
    """A figure from sums over each sequence, [n] each; `weights` [n] are what the sums are over."""
    one, other, sizes = (values.double().numpy() for values in (base, compressed, weights))
    found = evidence(PairedItems("", "", "", "likelihood", other, one, sizes), 0.0, 1 - confidence)
    means = float(ratio(one, sizes)), float(ratio(other, sizes))
    change, error = float(ratio(other - one, sizes)), float(ratio_error(other - one, sizes))
    return Paired(*means, change, float(found.lower), float(found.upper), error)


def figures_of(domain: str, figures: Figures, marks: Sequence[str], confidence: float) -> DomainFigures:
    """One row; raises `CompressionError` for figures that are not finite."""
    if not bool(figures.loss.isfinite().all() and figures.kl.isfinite().all()):
        raise CompressionError(
            f"on {domain} the models' losses are not finite, so nothing can be compared; check their weights, or pass "
            "--dtype float32 if they are sound"
        )
    tokens = figures.tokens.double()
    zeros = tokens * 0

    def mean(base: Tensor, compressed: Tensor) -> Paired:
        return paired(base * tokens, compressed * tokens, tokens, confidence)

    def probability(base: Tensor, compressed: Tensor, counts: Tensor) -> Paired | None:
        rows = counts > 0
        return paired(base[rows], compressed[rows], counts[rows], confidence) if bool(rows.any()) else None

    found = []
    columns = figures.marks.permute(1, 2, 0) if marks else ()
    for name, (due, base, ours, base_else, ours_else) in zip(marks, columns, strict=True):
        here, elsewhere = probability(base, ours, due), probability(base_else, ours_else, tokens - due)
        found.append(MarkFigures(name, int(due.sum()), here, elsewhere))
    loss, kl, flips = mean(figures.base_loss, figures.loss), mean(zeros, figures.kl), mean(zeros, figures.flips)
    return DomainFigures(domain, figures.sequences, int(tokens.sum()), loss, kl, flips, tuple(found))


def judged(
    figures: Figures, names: Mapping[int, str], marks: Sequence[str] = (), confidence: float = CONFIDENCE
) -> Judged:
    """The domains of these names, by the numbers of their evaluation sets, and all of them together."""
    rows = tuple(figures_of(name, figures.of({number}), marks, confidence) for number, name in names.items())
    together = figures_of(TOGETHER, figures.of(names), marks, confidence) if len(rows) > 1 else None
    return Judged(rows, together, suffering(rows, confidence), confidence)


def suffering(rows: Sequence[DomainFigures], confidence: float = CONFIDENCE) -> tuple[Suffering, ...]:
    """Domains whose loss or KL rises by more than `TIMES` the mean of the other domains, those by loss first.

    Domains are independent samples, so the error of the difference is the root of the sum of squares.
    """
    found = dict[str, Suffering]()
    quantile = NormalDist().inv_cdf(confidence)
    for measure in MEASURES if len(rows) > 1 else ():
        each = [getattr(row, measure) for row in rows]
        for place, (row, own) in enumerate(zip(rows, each, strict=True)):
            rest = [other for number, other in enumerate(each) if number != place]
            others = fmean(other.change for other in rest)
            error = math.hypot(own.standard_error, *(TIMES / len(rest) * other.standard_error for other in rest))
            if own.change >= LEAST and own.change - TIMES * max(others, 0.0) > quantile * error:
                found.setdefault(row.domain, Suffering(row.domain, measure, own.change, others))
    return tuple(found.values())


def judged_blocks(found: Judged, title: str) -> tuple[Block, ...]:
    """Which domains suffer, and the table; with marks a second one of the probabilities of ends."""

    def between(pair: Paired, scale: float = 1.0, digits: int = 4) -> str:
        return f"({pair.lower * scale:+.{digits}f} to {pair.upper * scale:+.{digits}f})"

    def of(pair: Paired | None, shown: str = "{:.4f}") -> str:
        if pair is None:
            return "-"
        return f"{shown.format(pair.base)} → {shown.format(pair.compressed)} {between(pair)}"

    named = {each.domain for each in found.suffering}
    rows: list[tuple[Words, ...]] = [
        (
            Strong(row.domain) if row.domain in named else row.domain,
            f"{row.sequences:,}",
            f"{row.tokens:,}",
            f"{row.loss.base:.4f}",
            f"{row.loss.change:+.4f} {between(row.loss)}",
            f"{row.kl.change:.4f} {between(row.kl)}",
            f"{100 * row.flips.change:.2f}% {between(row.flips, 100, 2)}",
        )
        for row in found.rows
    ]
    ruled = frozenset({len(found.domains) - 1})
    columns = ("domain", "sequences", "tokens", "base's loss", "rise of the loss", "KL", "flips")
    tables = [Table(title, columns, tuple(rows), frozenset({"domain"}), ("tokens", "sequences"), ruled)]
    names = [mark.name for mark in found.domains[0].marks]
    if names:
        heads = ("domain", *(column for name in names for column in (f"at {name}", "elsewhere")))
        ends = tuple(
            (row.domain, *(of(pair) for mark in row.marks for pair in (mark.here, mark.elsewhere)))
            for row in found.rows
        )
        tables.append(Table("Probability of the token that ends", heads, ends, frozenset({"domain"}), (), ruled))
    legend = LEGEND.format(confidence=100 * found.confidence) + (OF_ENDS if names else "")
    return *(Text(Strong(each.sentence), "bad") for each in found.suffering), *tables, Text(legend)


def domains_line(found: Sequence[Suffering]) -> str:
    """All that suffer in a sentence; '' if none does."""
    return joined([each.domain for each in found])
