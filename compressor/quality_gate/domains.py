"""Figures of a smaller model on each domain of text beside its base: loss, KL, flips and ends, with
paired intervals.

Figures are paired by sequence, and each token counts alike. Bounds are one-sided, as the gate's
are, by its tests of likelihoods. n sequences, M sets of stop tokens."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import NormalDist, fmean

import torch
from torch import Tensor

from compressor.divergence.evaluator import Figures
from compressor.errors import CompressionError
from compressor.quality_gate.domain_divergence import (
    CONFIDENCE,
    LEAST,
    MEASURES,
    TIMES,
    TOGETHER,
    DegradedDomain,
    DomainDivergence,
    DomainFigures,
    Paired,
    StopTokenFigures,
)
from compressor.quality_gate.statistics import PairedItems, evidence, ratio, ratio_error


def paired(base: Tensor, compressed: Tensor, weights: Tensor, confidence: float) -> Paired:
    """Return a figure from its sums over each sequence, [n] each, over `weights` [n] positions."""
    base_sums = base.double().numpy()
    compressed_sums = compressed.double().numpy()
    sizes = weights.double().numpy()
    rise = compressed_sums - base_sums
    bounds = evidence(
        PairedItems("", "", "", "likelihood", compressed_sums, base_sums, sizes),
        0.0,
        1 - confidence,
    )
    return Paired(
        base=float(ratio(base_sums, sizes)),
        compressed=float(ratio(compressed_sums, sizes)),
        change=float(ratio(rise, sizes)),
        lower=float(bounds.lower),
        upper=float(bounds.upper),
        standard_error=float(ratio_error(rise, sizes)),
    )


def figures_of(
    domain: str, figures: Figures, stop_tokens: Sequence[str], confidence: float
) -> DomainFigures:
    """Return the figures of a domain; raises `CompressionError` if they are not finite."""
    if not _are_finite(figures):
        raise CompressionError(
            f"on {domain} the models' losses are not finite, so nothing can be compared; check "
            "their weights, or pass "
            "--dtype float32 if they are sound"
        )
    tokens = figures.tokens.double()

    def mean(compressed: Tensor, base: Tensor) -> Paired:
        return paired(base * tokens, compressed * tokens, tokens, confidence)

    def mean_distance(compressed: Tensor) -> Paired:
        # the base's distance from itself is 0, and no model is below
        pair = mean(compressed, torch.zeros_like(tokens))
        return replace(pair, lower=max(pair.lower, 0.0))

    def probability(base: Tensor, compressed: Tensor, counts: Tensor) -> Paired | None:
        rows = counts > 0
        return (
            paired(base[rows], compressed[rows], counts[rows], confidence) if rows.any() else None
        )

    stop_figures = []
    for index, name in enumerate(stop_tokens):
        due, base, compressed, base_elsewhere, compressed_elsewhere = figures.stop_tokens[
            :, index
        ].T
        here = probability(base, compressed, due)
        elsewhere = probability(base_elsewhere, compressed_elsewhere, tokens - due)
        stop_figures.append(StopTokenFigures(name, int(due.sum()), here, elsewhere))
    return DomainFigures(
        domain=domain,
        sequences=figures.sequences,
        tokens=int(tokens.sum()),
        loss=mean(figures.loss, figures.base_loss),
        kl=mean_distance(figures.kl),
        flips=mean_distance(figures.flips),
        stop_tokens=tuple(stop_figures),
    )


def _are_finite(figures: Figures) -> bool:
    return bool(figures.loss.isfinite().all() and figures.kl.isfinite().all())


def domain_divergence(
    figures: Figures,
    names: Mapping[int, str],
    stop_tokens: Sequence[str] = (),
    confidence: float = CONFIDENCE,
) -> DomainDivergence:
    """Return the figures of each domain, by the numbers of their evaluation sets, and of all of
    them together.

    Degraded domains come first, then those whose losses rise most.
    """
    rows = []
    for number, name in names.items():
        rows.append(figures_of(name, figures.of({number}), stop_tokens, confidence))
    together = (
        figures_of(TOGETHER, figures.of(names), stop_tokens, confidence) if len(rows) > 1 else None
    )
    worst = degraded(rows, confidence)
    first = {row.domain for row in worst}
    rows.sort(key=lambda row: (row.domain in first, row.loss.change), reverse=True)
    return DomainDivergence(tuple(rows), together, worst, confidence)


def degraded(
    rows: Sequence[DomainFigures], confidence: float = CONFIDENCE
) -> tuple[DegradedDomain, ...]:
    """Return the domains whose loss or KL rises by more than `TIMES` the mean of the others, those
    by loss first.

    Domains are independent samples, so the error of the difference is the root of the sum of
    squares."""
    if len(rows) < 2:
        return ()
    by_domain = dict[str, DegradedDomain]()
    quantile = NormalDist().inv_cdf(confidence)
    for measure in MEASURES:
        pairs = [getattr(row, measure) for row in rows]
        for index, pair in enumerate(pairs):
            rest = pairs[:index] + pairs[index + 1 :]
            others = fmean(other.change for other in rest)
            errors = [TIMES / len(rest) * other.standard_error for other in rest]
            excess = pair.change - TIMES * max(others, 0.0)
            if pair.change >= LEAST and excess > quantile * math.hypot(
                pair.standard_error, *errors
            ):
                domain = rows[index].domain
                by_domain.setdefault(domain, DegradedDomain(domain, measure, pair.change, others))
    return tuple(by_domain.values())


def several_domains(figures: Figures, names: Mapping[int, str]) -> DomainDivergence | None:
    """Return the figures of several evaluation sets; None of a single one, or if they are not
    finite."""
    return domain_divergence(figures, names) if len(names) > 1 and _are_finite(figures) else None
