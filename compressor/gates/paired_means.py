"""Tests of the mean difference of paired scores, or of a ratio of sums, and the correction for testing several.

n items or other independent units, m tests; `...` stands for repetitions, as in a simulation. Student's t holds its
level where items differ in many small ways. Two things break it, and each has its own remedy here, of which the more
careful counts: few of the items differ (`rule_of_three`), or a few of them very much (`student` with `skew`). What is
left: with differences as skewed as an exponential distribution and lengths as uneven as 1 to 20, 62 documents pass
falsely in 6.4 % of samples at confidence 0.95 (9.4 % by t alone), and 250 in 5.4 % (7.0 %).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import t as student_t

FAR = 1e6  # standard errors, beyond which a distance says no more

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Evidence:
    """One-sided bounds of a drop, and p-values of one as small or as large if the true one were the margin: [...]."""

    lower: Any
    upper: Any
    p_pass: Any
    p_fail: Any


def ratio(values: Array, weights: Array) -> Any:
    """Sum of values by sum of weights, a mean where weights are 1: [..., n], [n] -> [...]."""
    return values.sum(axis=-1) / weights.sum()


def residuals_of(values: Array, weights: Array) -> Array:
    """How far `ratio` moves, times the sum of weights, as each unit is left out: [..., n], [n], n > 1 -> [..., n]."""
    residuals: Array = values - np.asarray(ratio(values, weights))[..., None] * weights
    left_out: Array = residuals / (1 - weights / weights.sum())
    return left_out


def ratio_error(values: Array, weights: Array) -> Any:
    """Jackknife standard error of `ratio` over independent units: [..., n], [n] -> [...]; infinite for one unit.

    With weights of 1 it is the usual error of a mean. With the totals of clusters as values and their sizes as
    weights it is the cluster-robust error of the mean over items, where even clusters have the factor G / (G - 1) and
    uneven ones a greater (Bell and McCaffrey, Survey Methodology 28, 2002).
    """
    units = weights.shape[-1]
    if units < 2:
        return np.full(values.shape[:-1], np.inf)
    return np.sqrt((units - 1) / units * np.square(residuals_of(values, weights)).sum(axis=-1)) / weights.sum()


def skewness(values: Array, weights: Array) -> Any:
    """Skewness of the residuals of `ratio` by the root of their number, in [-1, 1]: [..., n], [n], n > 1 -> [...]."""
    residuals = residuals_of(values, weights)
    squares = np.square(residuals).sum(axis=-1)
    return (residuals**3).sum(axis=-1) / np.where(squares > 0, squares, 1) ** 1.5


def freedom_of(weights: Array) -> float:
    """Degrees of freedom of `ratio_error`: n - 1 for even weights [n], fewer for uneven ones (Kish's effective n).

    Never under 1, except that one unit has none.
    """
    if weights.shape[-1] < 2:
        return 0.0
    return max(float(weights.sum() ** 2 / np.square(weights).sum()) - 1, 1.0)


def student(estimate: Any, error: Any, freedom: float, margin: float, alpha: float, skew: Any = 0.0) -> Evidence:
    """Student's t on `freedom` degrees of freedom; with none, nothing is known.

    With `skew` the statistic is first freed of skewness by the cubic of Hall ("On the removal of skewness by
    transformation", Journal of the Royal Statistical Society B 54, 1992): rare large losses are easily missed by a
    sample, which then shows too small a drop and too small an error.
    """
    if freedom < 1:
        nothing = np.zeros(np.shape(estimate))
        return Evidence(nothing - np.inf, nothing + np.inf, nothing + 1, nothing + 1)
    skew = np.asarray(skew)
    with np.errstate(divide="ignore", invalid="ignore"):
        distance = np.clip(np.nan_to_num((estimate - margin) / error, nan=0.0), -FAR, FAR)
        distance = distance * (1 + skew * distance / 3 + np.square(skew * distance) / 27) + skew / 6
    quantile = student_t.isf(alpha, freedom) * np.array([1.0, -1.0]) - skew[..., None] / 6
    straight = (abs(skew) < 1e-6)[..., None]
    divisor = np.where(straight, 1.0, skew[..., None])
    bent = np.where(straight, quantile, 3 * (np.cbrt(1 + divisor * quantile) - 1) / divisor)
    lower, upper = (estimate - error * bent[..., side] for side in (0, 1))
    return Evidence(lower, upper, student_t.cdf(distance, freedom), student_t.sf(distance, freedom))


def rule_of_three(estimate: Any, reach: Any, count: float, margin: float, alpha: float) -> Evidence:
    """A kind of change that none of `count` items showed befalls up to -log(alpha) / count of all (3 / count at 0.05).

    Each such item may move by `reach`. This keeps the bounds apart where next to nothing differs.
    """
    half = -math.log(alpha) * reach / count
    room = count * (margin - estimate) / reach
    p_pass, p_fail = np.exp(-np.maximum(room, 0)), np.exp(-np.maximum(-room, 0))
    return Evidence(estimate - half, estimate + half, p_pass, p_fail)


def most_careful(parts: Sequence[Evidence]) -> Evidence:
    """The widest bounds and the largest p-values: a claim stands only if every test supports it."""
    return Evidence(
        np.minimum.reduce([part.lower for part in parts]),
        np.maximum.reduce([part.upper for part in parts]),
        np.maximum.reduce([part.p_pass for part in parts]),
        np.maximum.reduce([part.p_fail for part in parts]),
    )


def holm(p_values: Array) -> Array:
    """p-values corrected for being m tests (Holm 1979): [..., m] -> [..., m].

    The i-th smallest of them, from 0, is multiplied by m - i, and is at least what smaller ones became.
    """
    order = np.argsort(p_values, axis=-1, kind="stable")
    factors = np.arange(p_values.shape[-1], 0, -1)
    grown = np.maximum.accumulate(np.take_along_axis(p_values, order, axis=-1) * factors, axis=-1)
    adjusted = np.empty_like(grown)
    np.put_along_axis(adjusted, order, np.minimum(grown, 1.0), axis=-1)
    return adjusted
