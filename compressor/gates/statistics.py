"""Statistics of the accuracy gate: what compression cost on each task, with bounds, and whether that is too much.

Both models answer the same items, so the items' differences are tested, not two means (Miller, "Adding Error Bars to
Evals", arXiv:2411.00640). Pass is a non-inferiority test: the one-sided upper confidence bound of the drop is under
the margin; fail the same on the other side; anything else is inconclusive. Of several tests of one drop the most
careful one counts. Shapes: n items, G clusters, m tasks; `...` stands for repetitions, as in a simulation.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy.stats import t as student_t

from compressor.errors import CompressionError
from compressor.evaluation.scores import ItemScores
from compressor.gates.paired_means import (
    Array,
    Evidence,
    freedom_of,
    holm,
    most_careful,
    ratio,
    ratio_error,
    rule_of_three,
    skewness,
    student,
)
from compressor.gates.paired_proportions import at_least, at_most, lower_bound, mcnemar, upper_bound
from compressor.gates.verdict import TaskGate, Verdict

POWER = 0.8  # the probability with which a sample shows the smallest detectable drop
FEW = 30  # scores that differ, under which what none of them showed counts as well


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
    if (len(scores.values), len(weights), len(clusters)) != (count, count, count):
        raise CompressionError(
            f"{where}: {count} items have {len(scores.values)} values, {len(weights)} sizes and {len(clusters)} group "
            "names: give one of each to every item"
        )
    if odd := count - int(np.isfinite(scores.values).sum()):
        raise CompressionError(
            f"{where}: {odd} of {count} values are not finite, so the model's output is broken and nothing can be "
            "compared: check its weights and the number type it was run in"
        )
    if odd := sum(not (math.isfinite(weight) and weight > 0) for weight in weights):
        raise CompressionError(f"{where}: {odd} of {count} items have no words or bytes: leave them out of the task")
    rows = dict(zip(scores.ids, zip(scores.values, weights, clusters, strict=True), strict=True))
    if len(rows) < count:
        raise CompressionError(f"{where}: {count - len(rows)} of {count} items share a name: name each item once")
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

    That is (t of the confidence + t of the power) standard errors; as well the smallest margin which a model that
    lost nothing passes that often.
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
        mcnemar=mcnemar(lost, gained) if pairs.binary else None,
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
    if not pairs:
        raise CompressionError("the gate has no task to judge: name at least one")
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
