"""Simulate the accuracy gate on item-level results with a known true drop: how often it says what.

    python -m scripts.simulate_gate [--runs 5000] [--confidence 0.95]

A pass is false if the true drop is at the margin or over it, a fail if it is at the margin or under it; `!` marks a
rate of either that exceeds 1 - confidence by more than three binomial errors. Beside the gate's paired tests stands
what another one makes of the same samples: a comparison of two means, or a gate that every task has to pass by itself.
"""

import math
from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import norm

from compressor.quality_gate.options import TASK_DROPS
from compressor.quality_gate.statistics import (
    at_most,
    freedom_of,
    holm,
    most_careful,
    ratio,
    ratio_error,
    skewness,
    student,
)
from scripts.benchmarks import frame

Array = NDArray[Any]
Tests = tuple[Array, Array]  # p-values of pass and of fail
MARGIN = 0.02
ACCURACY = 0.7  # of the base


def row(label: str, excess: float, gate: Tests, other: Tests, alpha: float) -> str:
    """Return one line; `excess` is the true drop less the margin."""
    cells, runs = [], len(gate[0])
    limit = alpha + 3 * math.sqrt(alpha * (1 - alpha) / runs)
    for p_pass, p_fail in (gate, other):
        passed, failed = float((p_pass < alpha).mean()), float((p_fail < alpha).mean())
        marks = (passed > limit and excess >= 0, failed > limit and excess <= 0, False)
        for share, mark in zip((passed, failed, 1 - passed - failed), marks, strict=True):
            cells.append(f"{share:8.2%}{'!' if mark else ' '}")
    return f"{label:44}" + " ".join(cells)


def heading(title: str, other: str) -> str:
    """Return the lines above a table."""
    columns = " ".join(f"{name:>8} " for name in ("pass", "fail", "unclear") * 2)
    return f"\n{title}\n{'':44}{'the gate':<30}{other}\n{'':44}{columns}"


def two_means(drop: Array, error: Array, margin: float) -> Tests:
    """Compare two means with a known error."""
    distance = (drop - margin) / np.maximum(error, 1e-12)
    return norm.cdf(distance), norm.sf(distance)


def exact(lost: Array, gained: Array, items: int, margin: float) -> Tests:
    """Make the gate's exact test of each pair of counts [...], once for each that differs."""
    stacked = np.stack([lost.ravel(), gained.ravel()], axis=1)
    pairs, back = np.unique(stacked, axis=0, return_inverse=True)
    passing = np.array([at_most(int(b), int(c), items, margin) for b, c in pairs])
    failing = np.array([at_most(int(c), int(b), items, -margin) for b, c in pairs])
    return passing[back].reshape(lost.shape), failing[back].reshape(lost.shape)


def right_or_wrong(random: np.random.Generator, runs: int, alpha: float) -> Iterator[str]:
    """Simulate independent items answered right or wrong."""
    yield heading(f"Right or wrong, margin {MARGIN}, base accuracy {ACCURACY}", "two means, unpaired")
    for items, flips, drop in product((50, 200, 1000, 5000), (0.05, 0.15, 0.4), (0.0, MARGIN / 2, MARGIN, 2 * MARGIN)):
        lost, gained, after = (flips + drop) / 2, (flips - drop) / 2, ACCURACY - drop
        shares = [ACCURACY - lost, lost, gained, 1 - ACCURACY - gained]
        counts = random.multinomial(items, shares, size=runs)  # both right, only the base, only the other, none
        means = (counts[:, 0] + counts[:, 1]) / items, (counts[:, 0] + counts[:, 2]) / items
        error = np.sqrt(sum(mean * (1 - mean) for mean in means) / (items - 1))
        covariance, variances = shares[0] - ACCURACY * after, ACCURACY * (1 - ACCURACY) * after * (1 - after)
        correlation = covariance / math.sqrt(variances)  # of the two models' answers to an item
        label = f"n {items:5}, correlation {correlation:4.2f}, true drop {drop:.2f}"
        gate = exact(counts[:, 1], counts[:, 2], items, MARGIN)
        yield row(label, drop - MARGIN, gate, two_means(means[0] - means[1], error, MARGIN), alpha)


def pooled(random: np.random.Generator, runs: int, alpha: float) -> Iterator[str]:
    """Tasks of several sizes, alike or with flips and drops of their own; the true drop is the mean over items."""
    tasks = {
        "boolq, openbookqa, rte": (0.01, np.array([3270, 500, 277])),
        "five of 200 items": (0.05, np.array([200] * 5)),
        "twenty of 20 to 180 items": (0.02, np.linspace(20, 180, 20).astype(int)),
    }
    for name, (margin, sizes) in tasks.items():
        yield heading(f"{name}, margin {margin}", "every task has to pass")
        spread = np.linspace(-1, 1, len(sizes))
        uneven = spread - (sizes * spread).sum() / sizes.sum()  # of no drop over all items
        kinds = {
            "alike": (np.full(len(sizes), 0.05 + margin), 0.0),
            "uneven flips": (0.25 + 0.1 * spread, 0.0),
            "uneven flips and drops": (0.25 + 0.1 * spread, margin),
        }
        for (kind, (flips, apart)), drop in product(kinds.items(), (0.0, margin, 2 * margin)):
            drops = drop + apart * uneven
            lost = random.binomial(sizes, (flips + drops) / 2, size=(runs, len(sizes)))
            gained = random.binomial(sizes - lost, (flips - drops) / 2 / (1 - (flips + drops) / 2))
            columns = zip(lost.T, gained.T, sizes, strict=True)
            alone = [exact(b, c, int(n), margin) for b, c, n in columns]
            p_pass, p_fail = [holm(np.stack(tests, axis=1)) for tests in zip(*alone, strict=True)]
            passing, failing = exact(lost.sum(axis=1), gained.sum(axis=1), int(sizes.sum()), margin)
            columns = zip(lost.T, gained.T, sizes, strict=True)
            tasks = np.stack([exact(b, c, int(n), TASK_DROPS * margin)[1] for b, c, n in columns], axis=1)
            refused = (holm(tasks) < alpha).any(axis=1)  # a task fails by itself
            gate = np.where(refused, 1.0, passing), np.where(refused, 0.0, failing)
            other = p_pass.max(axis=1), p_fail.min(axis=1)
            yield row(f"{kind}, true drop {drop:.2f}", drop - margin, gate, other, alpha)


def continuous(random: np.random.Generator, runs: int, alpha: float) -> Iterator[str]:
    """Scores between 0 and 1, and likelihoods of documents of uneven length."""

    def compared(label: str, base: Array, drops: Array, weights: Array, likelihood: bool) -> str:
        """Make the paired t-tests as the gate does of scores most of which differ, and two means: [runs, n], [n]."""
        margin = math.log1p(MARGIN) if likelihood else MARGIN
        estimate, error = ratio(drops, weights), ratio_error(drops, weights)
        tests = []
        for skew in (0.0, skewness(drops, weights)):
            tests.append(student(estimate, error, freedom_of(weights), margin, alpha, skew))
        found = most_careful(tests)
        unpaired = np.hypot(ratio_error(base, weights), ratio_error(base - drops, weights))
        gate, other = (found.p_pass, found.p_fail), two_means(estimate, unpaired, margin)
        return row(label, drop - MARGIN, gate, other, alpha)

    yield heading(f"Perplexity of documents, margin {MARGIN:.0%}", "two means, unpaired")
    for items, skewed in ((62, False), (62, True), (250, False), (250, True)):
        words = random.integers(100, 2000, size=items).astype(float)
        for drop in (0.0, MARGIN, 2 * MARGIN):
            base = words * (-2.5 + 0.3 * random.standard_normal((runs, items)))
            draw = random.standard_exponential if skewed else random.standard_normal
            drops = words * (math.log1p(drop) + 0.03 * (draw((runs, items)) - skewed))
            kind = "skewed" if skewed else "symmetric"
            label = f"{items:4} {kind} documents, true rise {drop:.0%}"
            yield compared(label, base, drops, words, True)
    yield heading(f"Scores between 0 and 1, of which half differ, margin {MARGIN}", "two means, unpaired")
    for items in (100, 400):
        for drop in (0.0, MARGIN, 2 * MARGIN):
            base = random.beta(2, 1, size=(runs, items))
            up = random.random((runs, items)) < 0.25 + drop / 2
            shift = np.where(random.random((runs, items)) < 0.5, np.where(up, 4 * drop, 0.0), 0.0)
            noise = 0.1 * random.standard_normal((runs, items))
            drops = noise + shift - 2 * drop * (0.25 + drop / 2) + drop
            label = f"{items:4} items, true drop {drop:.2f}"
            yield compared(label, base, drops, np.ones(items), False)


def main() -> None:
    """Print the tables."""
    chosen = frame.options(__doc__, runs=5000, confidence=0.95).parse_args()
    alpha, random = 1 - chosen.confidence, np.random.default_rng(0)
    error = math.sqrt(alpha * (1 - alpha) / chosen.runs)
    facts = f"{chosen.runs} runs a row, confidence {chosen.confidence}"
    print(f"{facts}; binomial error of {alpha:.2%} is {error:.2%}")
    for table in (right_or_wrong, pooled, continuous):
        for line in table(random, chosen.runs, alpha):
            print(line, flush=True)


if __name__ == "__main__":
    main()
