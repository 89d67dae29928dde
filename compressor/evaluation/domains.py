"""How much worse a smaller model does in each domain of text: loss, KL, flips and ends, with paired intervals.

Sequences are paired: what a sequence costs the smaller model is compared with what it costs the base, and each token
counts alike. Bounds are one-sided, as the gate's are, by the tests of likelihoods there. n sequences, M marks.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import NormalDist, fmean

from torch import Tensor

from compressor.errors import CompressionError
from compressor.evaluation.evaluator import Figures
from compressor.evaluation.gate_statistics import PairedItems, evidence, ratio, ratio_error
from compressor.evaluation.judged import (
    CONFIDENCE,
    LEAST,
    MEASURES,
    TIMES,
    TOGETHER,
    DomainFigures,
    Judged,
    MarkFigures,
    Paired,
    Suffering,
)


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
    kl, flips = (replace(pair, lower=max(pair.lower, 0.0)) for pair in (kl, flips))  # neither is ever below 0
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


def suffering_of(figures: Figures, names: Mapping[int, str]) -> tuple[Suffering, ...]:
    """Those of these sets that suffer; none where figures are not finite."""
    if len(names) < 2 or not bool(figures.loss.isfinite().all() and figures.kl.isfinite().all()):
        return ()
    return judged(figures, names).suffering
