"""Simulate the accuracy gate on item-level results with a known true drop: how often it says what.

    python -m scripts.simulate_gate [--runs 5000] [--confidence 0.95]

A pass is false if the true drop is at the margin or over it, a fail if it is at the margin or under it; `!` marks a
rate of either that exceeds 1 - confidence by more than three binomial errors. Beside the gate's paired test stands
what another one makes of the same samples: a comparison of two means, clusters ignored, or no correction over tasks.
"""

import argparse
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import norm

from compressor.evaluation.gate_statistics import (
    at_least,
    at_most,
    freedom_of,
    holm,
    most_careful,
    ratio,
    ratio_error,
    skewness,
    student,
)

Array = NDArray[Any]
Tests = tuple[Array, Array]  # p-values of pass and of fail
MARGIN = 0.02
ACCURACY = 0.7  # of the base


def rates(tests: Tests, alpha: float) -> tuple[float, float]:
    """Shares of runs that pass and that fail."""
    return float((tests[0] < alpha).mean()), float((tests[1] < alpha).mean())


def row(label: str, excess: float, gate: Tests, other: Tests, alpha: float) -> str:
    """One line; `excess` is the true drop less the margin."""
    cells, runs = [], len(gate[0])
    limit = alpha + 3 * math.sqrt(alpha * (1 - alpha) / runs)
    for passed, failed in (rates(gate, alpha), rates(other, alpha)):
        marks = (passed > limit and excess >= 0, failed > limit and excess <= 0)
        shares = (passed, failed, 1 - passed - failed)
        cells += [f"{share:8.2%}{'!' if mark else ' '}" for share, mark in zip(shares, (*marks, False), strict=True)]
    return f"{label:44}" + " ".join(cells)


def heading(title: str, other: str) -> str:
    """The line above a table."""
    columns = " ".join(f"{name:>8} " for name in ("pass", "fail", "unclear") * 2)
    return f"\n{title}\n{'':44}{'the gate':<30}{other}\n{'':44}{columns}"


def two_means(drop: Array, error: Array, margin: float) -> Tests:
    """A comparison of two means with a known error."""
    distance = (drop - margin) / np.maximum(error, 1e-12)
    return norm.cdf(distance), norm.sf(distance)


def exact(lost: Array, gained: Array, items: int, margin: float) -> Tests:
    """The gate's exact test of each pair of counts [...], reckoned once for each that differs."""
    pairs, back = np.unique(np.stack([lost.ravel(), gained.ravel()], axis=1), axis=0, return_inverse=True)
    passing, failing = (
        np.array([test(int(b), int(c), items, margin) for b, c in pairs]) for test in (at_most, at_least)
    )
    return passing[back].reshape(lost.shape), failing[back].reshape(lost.shape)


def answers(random: np.random.Generator, drop: float, flips: float, items: int, size: Any) -> tuple[Array, ...]:
    """Numbers of items that both, only the base and only the compressed model get right: three of [size]."""
    lost, gained = (flips + drop) / 2, (flips - drop) / 2
    counts = random.multinomial(items, [ACCURACY - lost, lost, gained, 1 - ACCURACY - gained], size=size)
    return counts[..., 0], counts[..., 1], counts[..., 2]


def correlation(drop: float, flips: float) -> float:
    """Of the two models' answers to an item."""
    after = ACCURACY - drop
    both = ACCURACY - (flips + drop) / 2
    return (both - ACCURACY * after) / math.sqrt(ACCURACY * (1 - ACCURACY) * after * (1 - after))


def right_or_wrong(random: np.random.Generator, runs: int, alpha: float) -> Iterator[str]:
    """Independent items answered right or wrong."""
    yield heading(f"Right or wrong, margin {MARGIN}, base accuracy {ACCURACY}", "two means, unpaired")
    for items in (50, 200, 1000, 5000):
        for flips in (0.05, 0.15, 0.4):
            for drop in (0.0, MARGIN / 2, MARGIN, 2 * MARGIN):
                both, lost, gained = answers(random, drop, flips, items, runs)
                means = (both + lost) / items, (both + gained) / items
                error = np.sqrt(sum(mean * (1 - mean) for mean in means) / (items - 1))
                label = f"n {items:5}, correlation {correlation(drop, flips):4.2f}, true drop {drop:.2f}"
                gate, other = exact(lost, gained, items, MARGIN), two_means(means[0] - means[1], error, MARGIN)
                yield row(label, drop - MARGIN, gate, other, alpha)


def clustered(random: np.random.Generator, runs: int, alpha: float) -> Iterator[str]:
    """Groups of tasks, whose drops differ by up to 0.08 either way from that of the whole."""
    yield heading(f"1,000 items right or wrong in clusters of other drops, margin {MARGIN}", "clusters ignored")
    for groups in (5, 20, 57):
        for uneven in (False, True):
            shares = np.linspace(1, 3, groups) / 2 if uneven else np.ones(groups)
            sizes = (1000 * shares / groups).astype(int)
            items, weights = int(sizes.sum()), sizes.astype(float)
            for drop in (0.0, MARGIN, 2 * MARGIN):
                drops = drop + random.uniform(-0.08, 0.08, size=(runs, groups))
                lost = random.binomial(sizes, (0.15 + drops) / 2)
                gained = random.binomial(sizes - lost, (0.15 - drops) / 2 / (1 - (0.15 + drops) / 2))
                net = (lost - gained).astype(float)
                other = exact(lost.sum(axis=1), gained.sum(axis=1), items, MARGIN)
                found = student(ratio(net, weights), ratio_error(net, weights), freedom_of(weights), MARGIN, alpha)
                gate = np.maximum(found.p_pass, other[0]), np.maximum(found.p_fail, other[1])
                label = f"{groups:2} {'uneven' if uneven else 'even'} clusters, true drop {drop:.2f}"
                yield row(label, drop - MARGIN, gate, other, alpha)


def continuous(random: np.random.Generator, runs: int, alpha: float) -> Iterator[str]:
    """Scores between 0 and 1, and likelihoods of documents of uneven length."""
    yield heading(f"Perplexity of documents, margin {MARGIN:.0%}", "two means, unpaired")
    for items, skewed in ((62, False), (62, True), (250, False), (250, True)):
        words = random.integers(100, 2000, size=items).astype(float)
        for drop in (0.0, MARGIN, 2 * MARGIN):
            base = words * (-2.5 + 0.3 * random.standard_normal((runs, items)))
            draw = random.standard_exponential if skewed else random.standard_normal
            drops = words * (math.log1p(drop) + 0.03 * (draw((runs, items)) - skewed))
            label = f"{items:4} {'skewed' if skewed else 'symmetric'} documents, true rise {drop:.0%}"
            yield from _continuous(label, base, drops, words, drop, alpha, True)
    yield heading(f"Scores between 0 and 1, of which half differ, margin {MARGIN}", "two means, unpaired")
    for items in (100, 400):
        for drop in (0.0, MARGIN, 2 * MARGIN):
            base = random.beta(2, 1, size=(runs, items))
            up = random.random((runs, items)) < 0.25 + drop / 2
            shift = np.where(random.random((runs, items)) < 0.5, np.where(up, 4 * drop, 0.0), 0.0)
            noise = 0.1 * random.standard_normal((runs, items))
            drops = noise + shift - 2 * drop * (0.25 + drop / 2) + drop
            label = f"{items:4} items, true drop {drop:.2f}"
            yield from _continuous(label, base, drops, np.ones(items), drop, alpha, False)


def _continuous(
    label: str, base: Array, drops: Array, weights: Array, drop: float, alpha: float, likelihood: bool
) -> Iterator[str]:
    """The paired t-tests as the gate makes them of scores most of which differ, and two means: [runs, n], [n]."""
    margin = math.log1p(MARGIN) if likelihood else MARGIN
    estimate, error, freedom = ratio(drops, weights), ratio_error(drops, weights), freedom_of(weights)
    found = most_careful(
        [student(estimate, error, freedom, margin, alpha, skew) for skew in (0.0, skewness(drops, weights))]
    )
    unpaired = np.hypot(ratio_error(base, weights), ratio_error(base - drops, weights))
    yield row(label, drop - MARGIN, (found.p_pass, found.p_fail), two_means(estimate, unpaired, margin), alpha)


def several(random: np.random.Generator, runs: int, alpha: float) -> Iterator[str]:
    """Five tasks of 500 items: what is said of the whole, and whether any of them passes or fails."""
    yield heading(f"Five tasks of 500 items, margin {MARGIN}", "without Holm's correction")
    for name, drops in {
        "all drops 0": (0.0,) * 5,
        "all drops at the margin": (MARGIN,) * 5,
        "one drop at the margin, four 0": (MARGIN, *(0.0,) * 4),
        "one drop at 4 margins, four 0": (4 * MARGIN, *(0.0,) * 4),
        "all drops at 4 margins": (4 * MARGIN,) * 5,
    }.items():
        columns = []
        for drop in drops:
            _, lost, gained = answers(random, drop, 0.1, 500, runs)
            columns.append(exact(lost, gained, 500, MARGIN))
        raw = tuple(np.stack([column[side] for column in columns], axis=1) for side in (0, 1))
        both = tuple(map(holm, raw)), raw
        # the whole passes if the largest p of a pass is under alpha, and fails if the smallest of a fail is
        gate, other = ((p[0].max(axis=1), p[1].min(axis=1)) for p in both)
        yield row(f"{name}: the whole", max(drops) - MARGIN, gate, other, alpha)
        if len(set(drops)) == 1:
            gate, other = ((p[0].min(axis=1), p[1].min(axis=1)) for p in both)
            yield row(f"{name}: any task", max(drops) - MARGIN, gate, other, alpha)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--runs", type=int, default=5000)
    parser.add_argument("--confidence", type=float, default=0.95)
    chosen = parser.parse_args()
    alpha, random = 1 - chosen.confidence, np.random.default_rng(0)
    error = math.sqrt(alpha * (1 - alpha) / chosen.runs)
    print(f"{chosen.runs} runs a row, confidence {chosen.confidence}; binomial error of {alpha:.2%} is {error:.2%}")
    for table in (right_or_wrong, clustered, continuous, several):
        for line in table(random, chosen.runs, alpha):
            print(line, flush=True)


if __name__ == "__main__":
    main()
