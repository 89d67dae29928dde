"""Statistics of the accuracy gate: what compression cost on each task, with bounds, and whether that is too much.

Both models answer the same items, so the items' differences are tested, not two means (Miller, "Adding Error Bars to
Evals", arXiv:2411.00640). Pass is a non-inferiority test: the one-sided upper confidence bound of the drop is under
the margin; fail the same on the other side; anything else is inconclusive. Of several tests of one drop the most
careful one counts, and p-values are corrected for the number of tasks. Shapes: n items or other independent units, G
clusters, m tasks; `...` stands for repetitions, as in a simulation.

Scores and likelihoods: Student's t holds its level where items differ in many small ways. Where few of the items differ
`rule_of_three` counts too, where a few differ very much `student` with `skew`. With differences as skewed as an
exponential distribution and lengths as uneven as 1 to 20, 62 documents pass falsely in 6.4 % of samples at confidence
0.95 (9.4 % by t alone), and 250 in 5.4 % (7.0 %).

Answers that are right or wrong: only items that flip count, of which the compressed model gets `lost` wrong and the
base right, and `gained` the other way round. Under a true drop d = P(lost) - P(gained) one probability stays unknown;
the constrained maximum of the likelihood takes its place (Tango, Statistics in Medicine 17, 1998). Tango's normal score
statistic is too liberal where flips are few: 272 items without a flip would pass a margin of 0.01, though a true drop
of 0.01 shows none in 6.5 % of such samples. So the tail is summed from the trinomial distribution itself: an estimated
p-value in the sense of Lloyd (Australian & New Zealand Journal of Statistics 50, 2008). Enumerated over 20 to 2,000
items, flips of 0.5 % to 40 %, margins of 0 to 0.1 and confidences of 0.9, 0.95 and 0.99, its rate of false verdicts
never exceeds 1 - confidence; without a flip it is the binomial test.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.stats import binom, binomtest
from scipy.stats import t as student_t

from compressor.errors import CompressionError
from compressor.evaluation.evaluate import ItemScores
from compressor.evaluation.gate_verdict import TaskGate, Verdict

TAILS = 9.0  # standard deviations of the number of flips beyond which nothing is summed
SLACK = 20  # flips more at either end, for a number of flips too small to be taken for normal
POWER = 0.8  # the probability with which a sample shows the smallest detectable drop
FEW = 30  # scores that differ, under which what none of them showed counts as well
FAR = 1e6  # standard errors, beyond which a distance says no more

Array = NDArray[np.float64]


class Evidence(NamedTuple):
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
    residuals = values - np.asarray(ratio(values, weights))[..., None] * weights
    return np.asarray(residuals / (1 - weights / weights.sum()))


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
    lower, *others = zip(*parts, strict=True)
    return Evidence(np.minimum.reduce(lower), *map(np.maximum.reduce, others))


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


def constrained_gain(lost: int, gained: int, items: int, drop: float) -> float:
    """The likeliest P(gained) if P(lost) - P(gained) were `drop`, in [max(0, -drop), (1 - drop) / 2] (Tango 1998)."""
    linear = (2 * items - lost + gained) * drop - lost - gained
    constant = -gained * drop * (1 - drop)
    root = math.sqrt(max(linear * linear - 8 * items * constant, 0.0))
    return min(max((root - linear) / (4 * items), 0.0, -drop), (1 - drop) / 2)


def at_most(lost: int, gained: int, items: int, drop: float) -> float:
    """p of a net loss of `lost - gained` or less of `items` items, if the true drop were `drop`.

    Falls as `drop` rises, so that a small one shows a drop under `drop`.
    """
    if abs(drop) > 1:  # no such drop exists, so the true one lies on the near side of it
        return float(drop < 0)
    gain = constrained_gain(lost, gained, items, drop)
    flip = min(2 * gain + drop, 1.0)
    flip = 0.0 if flip < 1e-290 else flip  # with which SciPy would overflow
    share = min(max((gain + drop) / flip, 0.0), 1.0) if flip > 0 else 0.5  # of flips that are losses
    width = TAILS * math.sqrt(items * flip * (1 - flip)) + SLACK
    flips = np.arange(max(0, math.floor(items * flip - width)), min(items, math.ceil(items * flip + width)) + 1)
    tail = binom.pmf(flips, items, flip) * binom.cdf((flips + lost - gained) // 2, flips, share)
    return min(float(tail.sum()), 1.0)


def at_least(lost: int, gained: int, items: int, drop: float) -> float:
    """p of a net loss of `lost - gained` or more of `items` items, if the true drop were `drop`."""
    return at_most(gained, lost, items, -drop)


def upper_bound(lost: int, gained: int, items: int, alpha: float) -> float:
    """The drop at which `at_most` is `alpha`: the true one is above it in at most that share of samples."""
    if lost == items:
        return 1.0
    return float(brentq(lambda drop: at_most(lost, gained, items, drop) - alpha, -1.0, 1.0, xtol=1e-13))


def lower_bound(lost: int, gained: int, items: int, alpha: float) -> float:
    """The drop at which `at_least` is `alpha`."""
    return -upper_bound(gained, lost, items, alpha)


@dataclass(frozen=True, slots=True, eq=False)
class PairedItems:
    """Two models' results on the same items of a task, in the order of the items' names."""

    task: str
    metric: str
    version: str
    kind: Literal["score", "likelihood"]
    base: Array  # [n]
    compressed: Array  # [n]
    weights: Array  # [n] 1 for each score; words or bytes of a likelihood
    clusters: NDArray[np.intp]  # [n] numbers 0 .. G - 1
    groups: int  # G, or 0 where items are independent

    @property
    def binary(self) -> bool:
        """Whether every answer is plainly right or wrong."""
        return self.kind == "score" and bool(np.isin([self.base, self.compressed], (0, 1)).all())


def compare_items(base: ItemScores, compressed: ItemScores) -> PairedItems:
    """Pair two models' results by item; anything that differs but the values is refused."""
    for name in ("task", "metric", "version", "kind"):
        one, other = getattr(base, name), getattr(compressed, name)
        if one != other:
            raise CompressionError(
                f"{base.task}: the base model was scored with {name} {one!r} and the compressed one with {other!r}: "
                "evaluate both anew with the same version of the tasks"
            )
    rows = [_rows(base, "base"), _rows(compressed, "compressed")]
    shared = sorted(rows[0].keys() & rows[1].keys())
    if not shared or len(shared) < max(map(len, rows)):
        raise CompressionError(
            f"{base.task}: the base model answered {len(rows[0])} items and the compressed one {len(rows[1])}, of "
            f"which {len(shared)} are the same: evaluate both anew with the same limit and the same data"
        )
    values, weights, clusters = zip(
        *(zip(*(found[name] for name in shared), strict=True) for found in rows), strict=True
    )
    if weights[0] != weights[1] or clusters[0] != clusters[1]:
        raise CompressionError(
            f"{base.task}: the same items have other sizes or groups for the compressed model than for the base: "
            "evaluate both anew with the same data"
        )
    names, codes = np.unique(clusters[0], return_inverse=True)
    first, second, sizes = (np.array(x, dtype=np.float64) for x in (*values, weights[0]))
    groups = len(names) if len(names) > 1 else 0
    return PairedItems(base.task, base.metric, base.version, base.kind, first, second, sizes, codes, groups)


def _rows(scores: ItemScores, model: str) -> dict[str, tuple[float, float, str]]:
    """By item: value, weight (1 of a score) and cluster ("" without any)."""
    where, count = f"{scores.task}, {scores.metric}, {model} model", len(scores.ids)
    weights = scores.weights if scores.kind == "likelihood" else (1.0,) * count
    clusters = scores.clusters or ("",) * count
    if odd := count - int(np.isfinite(scores.values).sum()):
        raise CompressionError(
            f"{where}: {odd} of {count} values are not finite, so the model's output is broken and nothing can be "
            "compared: check its weights and the number type it was run in"
        )
    if odd := sum(not (math.isfinite(weight) and weight > 0) for weight in weights):
        raise CompressionError(f"{where}: {odd} of {count} items have no words or bytes: leave them out of the task")
    rows = dict(zip(scores.ids, zip(scores.values, weights, clusters, strict=True), strict=True))
    assert len(rows) == count, f"{where}: items share a name"
    return rows


def unseen(pairs: PairedItems) -> tuple[float, float] | None:
    """How far an item may move, and of how many, by changes too rare for t; None if enough items differ to trust it.

    Scores span the range of those seen, or 1. Of a likelihood task every word is compared, and a model that changes
    changes all of them a little, so there is something to add only if nothing differs at all.
    """
    differing = int((pairs.base != pairs.compressed).sum())
    if differing >= (1 if pairs.kind == "likelihood" else FEW):
        return None
    seen = np.concatenate([pairs.base, pairs.compressed]) / np.tile(pairs.weights, 2)
    return float(np.ptp(seen)) or 1.0, float(pairs.weights.sum())


def units_of(values: Array, pairs: PairedItems) -> tuple[Array, Array]:
    """What is independent: totals and sizes of clusters if there are any, else of items: [n] -> [G] or [n], twice."""
    if not pairs.groups:
        return values, pairs.weights
    totals, sizes = (np.bincount(pairs.clusters, weights=x).astype(np.float64) for x in (values, pairs.weights))
    return totals, sizes


def evidence(pairs: PairedItems, margin: float, alpha: float) -> Evidence:
    """All tests of one task's drop: a difference of means, or the logarithm of a ratio of perplexities.

    Clusters never narrow what independent items give: a few that happen to agree are no certainty.
    """
    drops, items = pairs.base - pairs.compressed, len(pairs.base)
    estimate, parts = ratio(drops, pairs.weights), []
    if pairs.binary:
        counts = int((drops > 0).sum()), int((drops < 0).sum()), items
        bounds = lower_bound(*counts, alpha), upper_bound(*counts, alpha)
        parts.append(Evidence(*bounds, at_most(*counts, margin), at_least(*counts, margin)))
    else:
        error, freedom = ratio_error(drops, pairs.weights), freedom_of(pairs.weights)
        for skew in (0.0, skewness(drops, pairs.weights)) if items > 1 else (0.0,):
            parts.append(student(estimate, error, freedom, margin, alpha, skew))
        if (rare := unseen(pairs)) is not None:
            parts.append(rule_of_three(estimate, *rare, margin, alpha))
    if pairs.groups:
        totals, sizes = units_of(drops, pairs)
        parts.append(student(estimate, ratio_error(totals, sizes), freedom_of(sizes), margin, alpha))
    return most_careful(parts)


def detectable(half: float, freedom: float, alpha: float) -> float:
    """The drop that a one-sided bound `half` away from the estimate shows with probability `POWER`.

    It is also the smallest margin that a model which lost nothing passes that often.
    """
    freedom = max(freedom, 1)
    return half * float(1 + student_t.ppf(POWER, freedom) / student_t.isf(alpha, freedom))


def measure(pairs: PairedItems, max_drop: float, alpha: float) -> TaskGate:
    """One task as if it were the only one: p-values not yet corrected, and the verdict they give."""
    drops, likelihood = pairs.base - pairs.compressed, pairs.kind == "likelihood"
    found = evidence(pairs, math.log1p(max_drop) if likelihood else max_drop, alpha)
    estimate, base, compressed = (float(ratio(x, pairs.weights)) for x in (drops, pairs.base, pairs.compressed))
    error = max(float(ratio_error(*units_of(drops, pairs))), float(ratio_error(drops, pairs.weights)))
    unpaired = math.hypot(*(float(ratio_error(*units_of(x, pairs))) for x in (pairs.base, pairs.compressed)))
    shown = detectable(float(found.upper) - estimate, freedom_of(units_of(drops, pairs)[1]), alpha)
    drop, lower, upper, perplexity_ratio = estimate, float(found.lower), float(found.upper), None
    if likelihood:
        with np.errstate(over="ignore"):
            base, compressed = float(np.exp(-base)), float(np.exp(-compressed))
            drop, lower, upper, shown = (float(np.expm1(x)) for x in (drop, lower, upper, shown))
        perplexity_ratio = (1 + drop, 1 + lower, 1 + upper)
        error, unpaired = (1 + drop) * error, (1 + drop) * unpaired
    lost, gained = int((drops > 0).sum()), int((drops < 0).sum())
    return TaskGate(
        task=pairs.task,
        metric=pairs.metric,
        version=pairs.version,
        kind=pairs.kind,
        items=len(drops),
        clusters=pairs.groups,
        base=base,
        compressed=compressed,
        drop=drop,
        standard_error=error,
        lower=lower,
        upper=upper,
        p_pass=float(found.p_pass),
        p_fail=float(found.p_fail),
        lost=lost,
        gained=gained,
        verdict=verdict(float(found.p_pass), float(found.p_fail), alpha),
        detectable=shown,
        mcnemar=(float(binomtest(lost, lost + gained).pvalue) if lost + gained else 1.0) if pairs.binary else None,
        unpaired_error=unpaired if math.isfinite(unpaired) else None,
        perplexity_ratio=perplexity_ratio,
    )


def verdict(p_pass: float, p_fail: float, alpha: float) -> Verdict:
    """What two p-values say; they never add up to less than 1, so both cannot be under an alpha below 0.5."""
    if p_pass < alpha:
        return "pass"
    return "fail" if p_fail < alpha else "inconclusive"


def judge(pairs: Sequence[PairedItems], max_drop: float, confidence: float) -> tuple[TaskGate, ...]:
    """All tasks: bounds are each task's own, p-values and verdicts are corrected for their number (Holm 1979)."""
    alpha = 1 - confidence
    tasks = [measure(one, max_drop, alpha) for one in pairs]
    passing, failing = (holm(np.array(p)) for p in ([x.p_pass for x in tasks], [x.p_fail for x in tasks]))
    return tuple(
        replace(task, p_pass=float(yes), p_fail=float(no), verdict=verdict(yes, no, alpha))
        for task, yes, no in zip(tasks, passing, failing, strict=True)
    )


def overall(tasks: Sequence[TaskGate]) -> Verdict:
    """Fail if any task fails, pass if all pass, else inconclusive (also without a task)."""
    verdicts = {task.verdict for task in tasks}
    if "fail" in verdicts:
        return "fail"
    return "pass" if verdicts == {"pass"} else "inconclusive"
