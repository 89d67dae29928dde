"""How much worse a smaller model does in each domain of text: loss, KL, flips and ends, with paired intervals.

Sequences are paired: what a sequence costs the smaller model is compared with what it costs the base, and each token
counts alike. Bounds are one-sided, as the gate's are, by the tests of likelihoods there. n sequences, M marks.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import NormalDist, fmean

from torch import Tensor

from compressor.divergence.evaluator import Figures
from compressor.errors import CompressionError
from compressor.quality_gate.domain_divergence import (
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
from compressor.quality_gate.statistics import PairedItems, evidence, ratio, ratio_error


def paired(base: Tensor, compressed: Tensor, weights: Tensor, confidence: float) -> Paired:
    """Return a figure from sums over each sequence, [n] each; `weights` [n] are what the sums are over."""
    of_base, of_compressed, sizes = base.double().numpy(), compressed.double().numpy(), weights.double().numpy()
    rise = of_compressed - of_base
    bounds = evidence(PairedItems("", "", "", "likelihood", of_compressed, of_base, sizes), 0.0, 1 - confidence)
    return Paired(
        float(ratio(of_base, sizes)),
        float(ratio(of_compressed, sizes)),
        float(ratio(rise, sizes)),
        float(bounds.lower),
        float(bounds.upper),
        float(ratio_error(rise, sizes)),
    )


def figures_of(domain: str, figures: Figures, marks: Sequence[str], confidence: float) -> DomainFigures:
    """Return one row; raises `CompressionError` for figures that are not finite."""
    if not _are_finite(figures):
        raise CompressionError(
            f"on {domain} the models' losses are not finite, so nothing can be compared; check their weights, or pass "
            "--dtype float32 if they are sound"
        )
    tokens = figures.tokens.double()

    def mean(compressed: Tensor, base: Tensor | None = None) -> Paired:
        if base is None:  # of the base it is 0, and of no model below
            pair = paired(tokens * 0, compressed * tokens, tokens, confidence)
            return replace(pair, lower=max(pair.lower, 0.0))
        return paired(base * tokens, compressed * tokens, tokens, confidence)

    def probability(base: Tensor, compressed: Tensor, counts: Tensor) -> Paired | None:
        rows = counts > 0
        return paired(base[rows], compressed[rows], counts[rows], confidence) if bool(rows.any()) else None

    mark_figures = list[MarkFigures]()
    for number, name in enumerate(marks):
        due, base, compressed, base_elsewhere, compressed_elsewhere = figures.marks[:, number].T
        at_end = probability(base, compressed, due)
        elsewhere = probability(base_elsewhere, compressed_elsewhere, tokens - due)
        mark_figures.append(MarkFigures(name, int(due.sum()), at_end, elsewhere))
    return DomainFigures(
        domain,
        figures.sequences,
        int(tokens.sum()),
        mean(figures.loss, figures.base_loss),
        mean(figures.kl),
        mean(figures.flips),
        tuple(mark_figures),
    )


def _are_finite(figures: Figures) -> bool:
    return bool(figures.loss.isfinite().all() and figures.kl.isfinite().all())


def judged(
    figures: Figures, names: Mapping[int, str], marks: Sequence[str] = (), confidence: float = CONFIDENCE
) -> Judged:
    """The domains of these names, by the numbers of their evaluation sets, and all of them together."""
    rows = tuple(figures_of(name, figures.of({number}), marks, confidence) for number, name in names.items())
    together = figures_of(TOGETHER, figures.of(names), marks, confidence) if len(rows) > 1 else None
    return Judged(rows, together, suffering(rows, confidence), confidence)


def suffering(rows: Sequence[DomainFigures], confidence: float = CONFIDENCE) -> tuple[Suffering, ...]:
    """Return the domains whose loss or KL rises by more than `TIMES` the mean of the others, those by loss first.

    Domains are independent samples, so the error of the difference is the root of the sum of squares.
    """
    if len(rows) < 2:
        return ()
    by_domain = dict[str, Suffering]()
    quantile = NormalDist().inv_cdf(confidence)
    for measure in MEASURES:
        pairs = [getattr(row, measure) for row in rows]
        for number, pair in enumerate(pairs):
            rest = pairs[:number] + pairs[number + 1 :]
            others = fmean(other.change for other in rest)
            errors = [TIMES / len(rest) * other.standard_error for other in rest]
            excess = pair.change - TIMES * max(others, 0.0)
            if pair.change >= LEAST and excess > quantile * math.hypot(pair.standard_error, *errors):
                domain = rows[number].domain
                by_domain.setdefault(domain, Suffering(domain, measure, pair.change, others))
    return tuple(by_domain.values())


def suffering_of(figures: Figures, names: Mapping[int, str]) -> tuple[Suffering, ...]:
    """Those of these sets that suffer; none where figures are not finite."""
    return judged(figures, names).suffering if len(names) > 1 and _are_finite(figures) else ()
