"""Figures of a smaller model on each domain of text beside its base: loss, KL, flips and ends, with
paired intervals.

Figures are paired by sequence, and each token counts alike. Bounds are one-sided, as the gate's
are, by its tests of likelihoods. n sequences, M sets of stop tokens."""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
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
    base_sums, compressed_sums, sizes = (
        sums.double().numpy() for sums in (base, compressed, weights)
    )
    rise = compressed_sums - base_sums
    pairs = PairedItems(compressed_sums, base_sums, sizes, "likelihood")
    bounds = evidence(pairs, 0.0, 1 - confidence)
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
    if not bool(figures.loss.isfinite().all() and figures.kl.isfinite().all()):
        raise CompressionError(
            f"on {domain} the models' losses are not finite, so nothing can be compared; check "
            "their weights, or pass --dtype float32 if they are sound"
        )
    tokens = figures.tokens.double()

    distances = []
    for means in (figures.kl, figures.flips):
        # the base's distance from itself is 0, and no model is below
        pair = paired(torch.zeros_like(tokens), means * tokens, tokens, confidence)
        distances.append(replace(pair, lower=max(pair.lower, 0.0)))
    stop_figures = []
    for index, name in enumerate(stop_tokens):
        due, *sums = figures.stop_tokens[:, index].T
        places = []
        for counts, base, compressed in ((due, *sums[:2]), (tokens - due, *sums[2:])):
            rows = counts > 0
            sides = base[rows], compressed[rows], counts[rows]
            places.append(paired(*sides, confidence) if rows.any() else None)
        stop_figures.append(StopTokenFigures(name, int(due.sum()), *places))
    return DomainFigures(
        domain=domain,
        sequences=figures.sequences,
        tokens=int(tokens.sum()),
        loss=paired(figures.base_loss * tokens, figures.loss * tokens, tokens, confidence),
        kl=distances[0],
        flips=distances[1],
        stop_tokens=tuple(stop_figures),
    )


def domain_divergence(
    figures: Figures,
    names: Mapping[int, str],
    stop_tokens: Sequence[str] = (),
    confidence: float = CONFIDENCE,
) -> DomainDivergence:
    """Return the figures of each domain, by the numbers of their evaluation sets, and of all of
    them together.

    Degraded domains, whose loss or KL rises by more than `TIMES` the mean of the others, come
    first, then those whose losses rise most. Raises `CompressionError` if figures are not finite.
    """
    rows = [
        figures_of(name, figures.of({number}), stop_tokens, confidence)
        for number, name in names.items()
    ]
    together = None
    if len(rows) > 1:
        together = figures_of(TOGETHER, figures.of(names), stop_tokens, confidence)
    worst = dict[str, DegradedDomain]()
    quantile = NormalDist().inv_cdf(confidence)
    for measure in MEASURES if together else ():
        pairs = [getattr(row, measure) for row in rows]
        for index, pair in enumerate(pairs):
            rest = pairs[:index] + pairs[index + 1 :]
            others = fmean(other.change for other in rest)
            # domains are independent samples
            errors = [TIMES / len(rest) * other.standard_error for other in rest]
            error = math.hypot(pair.standard_error, *errors)
            excess = pair.change - TIMES * max(others, 0.0)
            if pair.change >= LEAST and excess > quantile * error:
                domain = rows[index].domain
                worst.setdefault(domain, DegradedDomain(domain, measure, pair.change, others))
    rows.sort(key=lambda row: (row.domain in worst, row.loss.change), reverse=True)
    return DomainDivergence(tuple(rows), together, tuple(worst.values()), confidence)


def several_domains(figures: Figures, names: Mapping[int, str]) -> DomainDivergence | None:
    """Return the figures of several evaluation sets; None of a single one, or if they are not
    finite."""
    with suppress(CompressionError):
        return domain_divergence(figures, names) if len(names) > 1 else None
    return None
