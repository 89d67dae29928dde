"""Statistics of the accuracy gate: the drop over all items and on each task, tested against the
drop allowed.

Both models answer the same items, so the items' differences are tested, not two means (Miller,
"Adding Error Bars to Evals", arXiv:2411.00640). Pass is a non-inferiority test: the one-sided upper
confidence bound of the drop is under the margin; fail the same on the other side; anything else is
inconclusive. Shapes: n items, m tasks; `...` stands for repetitions, as in a simulation.

One verdict over the items of all tasks. Items that both models answer right or wrong are pooled,
those of a group's subtasks too: the pooled drop is the mean over items of what the base got right
less what the compressed model did, and it has to be within `max_drop`. Each task's own drop is
reported, and refuses the model only by a clear loss: its lower bound, corrected for the number of
tasks (Holm), is above `max_task_drop`. Perplexities, and scores other than 0 and 1, have no unit in
common with other items, so such a task decides by itself: it has to be within `max_drop`, too.

Answers that are right or wrong: only items that flip count, of which the compressed model gets
`lost` wrong and the base right, and `gained` the other way round. Under a true drop d = P(lost) -
P(gained) one probability stays unknown; the constrained maximum of the likelihood takes its place
(Tango, Statistics in Medicine 17, 1998). Tango's normal score statistic is too liberal where flips
are few: 272 items without a flip would pass a margin of 0.01, though a true drop of 0.01 shows none
in 6.5 % of such samples. So the tail is summed from the trinomial distribution itself: an estimated
p-value in the sense of Lloyd (Australian & New Zealand Journal of Statistics 50, 2008). Enumerated
over 20 to 2,000 items, flips of 0.5 % to 40 %, margins of 0 to 0.1 and confidences of 0.9, 0.95 and
0.99, its rate of false verdicts never exceeds 1 - confidence; without a flip it is the binomial
test.

Tasks are fixed strata, not draws from a population of tasks, so the test holds for pooled items as
well. Let task s have n_s of N items, a share f_s that flips and a drop d_s. The net loss has mean N
d, with d the item-weighted mean of d_s, and variance sum n_s (f_s - d_s^2). That is at most N (f -
d^2), the variance of N items that all flip at the mean rate f, since the mean of squares is at
least the square of the mean: the trinomial of the pooled counts is as wide as the truth or wider.
`scripts/simulate_gate.py` measures the rates of false verdicts with strata that differ much.

Other scores and likelihoods: Student's t holds its level where items differ in many small ways.
Where few of the items differ the rule of three counts too, where a few differ very much `student`
with `skew`; of several tests of one drop the most careful one counts. With differences as skewed as
an exponential distribution and lengths as uneven as 1 to 20, 62 documents pass falsely in 6.4 % of
samples at confidence 0.95 (9.4 % by t alone), and 250 in 5.4 % (7.0 %).

Anomalies are scores that say more about how models were asked than about the models: a base is
tested against the score that it should have and against guessing, and a smaller model for being
better than its base. The p-values of all these tests are corrected together (Holm), so that where
nothing is wrong an anomaly is found in at most `FALSE_ALARMS` of samples."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
import scipy  # whose subpackages are loaded when they are first used
from numpy.typing import NDArray

from compressor.answers.scores import ItemScores, Kind
from compressor.errors import CompressionError
from compressor.formatting import joined
from compressor.quality_gate.options import Expectation, GateOptions
from compressor.quality_gate.verdict import (
    Anomaly,
    Asked,
    GateCondition,
    GateResult,
    Judgement,
    TaskGate,
    Verdict,
)

TAILS = 9.0  # standard deviations of the number of flips beyond which nothing is summed
SLACK = 20  # flips more at either end, for a number of flips too small to be taken for normal
POWER = 0.8  # the probability with which a sample shows the smallest detectable drop
POOLED = "all together"  # name of the pool beside those of tasks
FEW = 30  # scores that differ, under which what none of them showed counts as well
MOST_ITEMS = 10_000_000  # beyond which a number of items helps nobody
FAR = 1e6  # standard errors, beyond which a distance says no more
FALSE_ALARMS = 0.05
SURE = 2.0  # standard errors: the tolerance of a score that is given without one
ABOVE_CHANCE = 0.15  # share of items: a base that gets so many more right than guessing is in order
# share of answers that reach the token limit from which this is the likely cause of wrong ones
MANY_CUT = 0.1
NOTICEABLE = 0.1  # p of as many right answers by guessing, below which a base is better than that

Array = NDArray[np.float64]


class Evidence(NamedTuple):
    """One-sided bounds of a drop, and p-values of one as small or as large if the true one were the
    margin: [...]."""

    lower: Any
    upper: Any
    p_pass: Any
    p_fail: Any


def ratio(values: Array, weights: Array) -> Any:
    """Return the sum of values by the sum of weights, a mean if weights are 1: [..., n], [n] ->
    [...]."""
    return values.sum(axis=-1) / weights.sum()


def residuals_of(values: Array, weights: Array) -> Array:
    """Return the change of `ratio` without each unit, times the sum of weights: [..., n], [n] ->
    [..., n]; n > 1."""
    residuals = values - np.asarray(ratio(values, weights))[..., None] * weights
    return np.asarray(residuals / (1 - weights / weights.sum()))


def ratio_error(values: Array, weights: Array) -> Any:
    """Return the jackknife standard error of `ratio` over independent units: [..., n], [n] ->
    [...].

    Infinite for one unit. With weights of 1 it is the usual error of a mean.
    """
    units = weights.shape[-1]
    if units < 2:
        return np.full(values.shape[:-1], np.inf)
    squares = np.square(residuals_of(values, weights)).sum(axis=-1)
    return np.sqrt((units - 1) / units * squares) / weights.sum()


def skewness(values: Array, weights: Array) -> Any:
    """Return the skewness of the residuals of `ratio` by the root of n, in [-1, 1]: [..., n], [n],
    n > 1 -> [...]."""
    residuals = residuals_of(values, weights)
    squares = np.square(residuals).sum(axis=-1)
    return (residuals**3).sum(axis=-1) / np.where(squares > 0, squares, 1) ** 1.5


def freedom_of(weights: Array) -> float:
    """Return the degrees of freedom of `ratio_error`: n - 1 for even weights [n], else fewer
    (Kish's effective n).

    Never under 1, except that one unit has none.
    """
    if weights.shape[-1] < 2:
        return 0.0
    return max(float(weights.sum() ** 2 / np.square(weights).sum()) - 1, 1.0)


def student(
    estimate: Any, error: Any, freedom: float, margin: float, alpha: float, skew: Any = 0.0
) -> Evidence:
    """Test a drop by Student's t on `freedom` degrees of freedom; with none, nothing is known.

    With `skew` the statistic is first freed of skewness by the cubic of Hall ("On the removal of
    skewness by transformation", Journal of the Royal Statistical Society B 54, 1992): rare large
    losses are easily missed by a sample, which then shows too small a drop and too small an error.
    """
    if freedom < 1:
        nothing = np.zeros(np.shape(estimate))
        return Evidence(nothing - np.inf, nothing + np.inf, nothing + 1, nothing + 1)
    skew = np.asarray(skew)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        distance = np.clip(np.nan_to_num((estimate - margin) / error, nan=0.0), -FAR, FAR)
        distance = distance * (1 + skew * distance / 3 + np.square(skew * distance) / 27) + skew / 6
    quantile = scipy.special.stdtrit(freedom, alpha) * np.array([-1.0, 1.0]) - skew[..., None] / 6
    straight = (abs(skew) < 1e-6)[..., None]
    divisor = np.where(straight, 1.0, skew[..., None])
    bent = np.where(straight, quantile, 3 * (np.cbrt(1 + divisor * quantile) - 1) / divisor)
    lower, upper = (estimate - error * bent[..., side] for side in (0, 1))
    tail = scipy.special.stdtr
    return Evidence(lower, upper, tail(freedom, distance), tail(freedom, -distance))


def most_careful(parts: Sequence[Evidence]) -> Evidence:
    """Return the widest bounds and the largest p-values: a claim stands only if every test supports
    it."""
    lower, *others = zip(*parts, strict=True)
    return Evidence(np.minimum.reduce(lower), *map(np.maximum.reduce, others))


def holm(p_values: Array) -> Array:
    """Correct the p-values of m tests (Holm 1979): [..., m] -> [..., m].

    The i-th smallest of them, from 0, is multiplied by m - i, and is at least what smaller ones
    became."""
    order = np.argsort(p_values, axis=-1, kind="stable")
    factors = np.arange(p_values.shape[-1], 0, -1)
    grown = np.maximum.accumulate(np.take_along_axis(p_values, order, axis=-1) * factors, axis=-1)
    adjusted = np.empty_like(grown)
    np.put_along_axis(adjusted, order, np.minimum(grown, 1.0), axis=-1)
    return adjusted


def constrained_gain(lost: float, gained: float, items: int, drop: float) -> float:
    """Return the maximum-likelihood P(gained) in [max(0, -drop), (1 - drop) / 2], given P(lost) -
    P(gained) = drop."""
    linear = (2 * items - lost + gained) * drop - lost - gained
    constant = -gained * drop * (1 - drop)
    root = math.sqrt(max(linear * linear - 8 * items * constant, 0.0))
    return min(max((root - linear) / (4 * items), 0.0, -drop), (1 - drop) / 2)


def at_most(lost: float, gained: float, items: int, drop: float) -> float:
    """Return p of a net loss of `lost - gained` or less of `items` items, if the true drop were
    `drop`.

    Falls as `drop` rises, so that a small one shows a drop under `drop`. With `lost` and `gained`
    the other way round and `-drop` it is p of such a net loss or more.
    """
    if abs(drop) > 1:  # no such drop exists, so the true one lies on the near side of it
        return float(drop < 0)
    gain = constrained_gain(lost, gained, items, drop)
    flip = min(2 * gain + drop, 1.0)
    flip = 0.0 if flip < 1e-290 else flip  # with which SciPy would overflow
    # of flips that are losses
    share = min(max((gain + drop) / flip, 0.0), 1.0) if flip > 0 else 0.5
    width = TAILS * math.sqrt(items * flip * (1 - flip)) + SLACK
    fewest = max(0, math.floor(items * flip - width))
    most = min(items, math.ceil(items * flip + width))
    flips = np.arange(fewest, most + 1)
    tail = scipy.stats.binom.pmf(flips, items, flip) * scipy.stats.binom.cdf(
        (flips + lost - gained) // 2, flips, share
    )
    return min(float(tail.sum()), 1.0)


def upper_bound(lost: float, gained: float, items: int, alpha: float) -> float:
    """Return the drop at which `at_most` is `alpha`: the true one is above it in at most that share
    of samples. The lower bound is that of the mirrored counts, with a minus."""
    if lost == items:
        return 1.0
    return float(
        scipy.optimize.brentq(
            lambda drop: at_most(lost, gained, items, drop) - alpha, -1.0, 1.0, xtol=1e-13
        )
    )


@dataclass(frozen=True, slots=True, eq=False)
class PairedItems:
    """Two models' results on the same items of a task, or of several, in the order of the items'
    names."""

    base: Array  # [n]
    compressed: Array  # [n]
    weights: Array  # [n] 1 for each score; words or bytes of a likelihood
    kind: Kind = "score"
    task: str = ""
    metric: str = ""
    version: str = ""

    @property
    def drops(self) -> Array:
        """The base's results less the compressed model's: [n]."""
        return self.base - self.compressed

    @property
    def flips(self) -> tuple[int, int]:
        """Numbers of items with a worse and with a better result than the base's."""
        return int((self.drops > 0).sum()), int((self.drops < 0).sum())

    @property
    def binary(self) -> bool:
        """True if every answer is plainly right or wrong, so that the items may be pooled."""
        values = np.concatenate([self.base, self.compressed])
        return self.kind == "score" and bool(np.isin(values, (0, 1)).all())


def evidence(pairs: PairedItems, margin: float, alpha: float) -> Evidence:
    """Combine all tests of one drop: a difference of means, or the logarithm of a ratio of
    perplexities."""
    drops = pairs.drops
    items = len(drops)
    if pairs.binary:
        lost, gained = pairs.flips
        return Evidence(
            lower=-upper_bound(gained, lost, items, alpha),
            upper=upper_bound(lost, gained, items, alpha),
            p_pass=at_most(lost, gained, items, margin),
            p_fail=at_most(gained, lost, items, -margin),
        )
    estimate = ratio(drops, pairs.weights)
    error = ratio_error(drops, pairs.weights)
    freedom = freedom_of(pairs.weights)
    tests = [student(estimate, error, freedom, margin, alpha)]
    if items > 1:
        skew = skewness(drops, pairs.weights)
        tests.append(student(estimate, error, freedom, margin, alpha, skew))
    likelihood = pairs.kind == "likelihood"
    # Of a likelihood task every word is compared, and a model that changes changes all of them a
    # little, so there is something unseen only if nothing differs at all.
    if np.count_nonzero(drops) < (1 if likelihood else FEW):
        seen = np.concatenate([pairs.base, pairs.compressed])
        if likelihood:
            seen = seen / np.tile(pairs.weights, 2)
        reach = float(np.ptp(seen)) or 1.0  # the range of the scores seen, or 1
        count = float(pairs.weights.sum())
        # The rule of three: changes that none of `count` items showed, up to -log(alpha) / count
        # of all items have (3 / count at an alpha of 0.05), and each of these may move by `reach`.
        # This keeps the bounds apart where next to nothing differs.
        half = -math.log(alpha) * reach / count
        with np.errstate(over="ignore"):
            room = count * (margin - estimate) / reach
        p_pass = np.exp(-np.maximum(room, 0))
        p_fail = np.exp(-np.maximum(-room, 0))
        tests.append(Evidence(estimate - half, estimate + half, p_pass, p_fail))
    return most_careful(tests)


def detectable(half: float, freedom: float, alpha: float) -> float:
    """Return the drop that a one-sided bound `half` away from the estimate shows with probability
    `POWER`.

    It is also the smallest margin that a model which lost nothing passes that often.
    """
    freedom = max(freedom, 1)
    return half * float(
        1 + scipy.special.stdtrit(freedom, POWER) / -scipy.special.stdtrit(freedom, alpha)
    )


def shown_by(items: int, flips: float, alpha: float) -> float:
    """Return the smallest margin that `items` pass if a share `flips` of them flips, half of these
    each way.

    An identical model passes it for certain, one with flips with probability `POWER`.
    """
    half = upper_bound(items * flips / 2, items * flips / 2, items, alpha)
    return detectable(half, items - 1, alpha) if flips else half


def measure(pairs: PairedItems, max_drop: float, alpha: float, decides: bool) -> TaskGate:
    """Test one task, or the pool, as if it were the only one: p-values are not yet corrected."""
    likelihood = pairs.kind == "likelihood"
    drops = pairs.drops
    margin = math.log1p(max_drop) if likelihood else max_drop
    lower, upper, p_pass, p_fail = map(float, evidence(pairs, margin, alpha))
    base, compressed, drop = ratio(
        np.stack([pairs.base, pairs.compressed, drops]), pairs.weights
    ).tolist()
    error = float(ratio_error(drops, pairs.weights))
    shown = detectable(upper - drop, freedom_of(pairs.weights), alpha)
    perplexity_ratio = None
    if likelihood:
        with np.errstate(over="ignore"):
            base, compressed = np.exp([-base, -compressed]).tolist()
            drop, lower, upper, shown = np.expm1([drop, lower, upper, shown]).tolist()
        perplexity_ratio = (1 + drop, 1 + lower, 1 + upper)
        error *= 1 + drop
    lost, gained = pairs.flips
    mcnemar = None
    if pairs.binary:
        mcnemar = float(scipy.stats.binomtest(lost, lost + gained).pvalue) if lost + gained else 1.0
    return TaskGate(
        task=pairs.task,
        metric=pairs.metric,
        version=pairs.version,
        kind=pairs.kind,
        decides=decides,
        items=len(drops),
        base=base,
        compressed=compressed,
        max_drop=max_drop,
        drop=drop,
        standard_error=error,
        lower=lower,
        upper=upper,
        p_pass=p_pass,
        p_fail=p_fail,
        lost=lost,
        gained=gained,
        verdict=verdict(p_pass, p_fail, alpha),
        detectable=shown,
        mcnemar=mcnemar,
        perplexity_ratio=perplexity_ratio,
        equivalent=-max_drop < lower and upper < max_drop,
    )


def measure_change(pairs: PairedItems, limit: float, alpha: float) -> TaskGate:
    """Test a change that is limited up and down: a pass takes both one-sided tests, and a fail
    either.

    The p-value of a fail is that of a change as large either way, so it holds for limits near 0,
    too."""
    above = evidence(pairs, limit, alpha)
    below = evidence(pairs, -limit, alpha)
    p_pass = float(max(above.p_pass, below.p_fail))
    p_fail = float(min(above.p_fail + below.p_fail, above.p_pass + below.p_pass, 1.0))
    task = measure(pairs, limit, alpha, True)
    return replace(task, p_pass=p_pass, p_fail=p_fail, verdict=verdict(p_pass, p_fail, alpha))


def verdict(p_pass: float, p_fail: float, alpha: float) -> Verdict:
    """Return the verdict of two p-values, which add up to at least 1, so that both cannot be under
    an alpha of 0.5."""
    if p_pass < alpha:
        return "pass"
    return "fail" if p_fail < alpha else "inconclusive"


def corrected(tests: Sequence[TaskGate], alpha: float, *fields: str) -> list[TaskGate]:
    """Return tests with their p-values in these fields corrected for the number of tests (Holm
    1979), and the verdicts that follow."""
    for field in fields:
        p_values = holm(np.array([getattr(test, field) for test in tests])).tolist()
        tests = [replace(test, **{field: p}) for test, p in zip(tests, p_values, strict=True)]
    return [replace(test, verdict=verdict(test.p_pass, test.p_fail, alpha)) for test in tests]


def judge(
    base: Sequence[ItemScores], compressed: Sequence[ItemScores], gate: GateOptions
) -> Judgement:
    """Test two models' items of the same tasks, wherever they come from: each task, and the pool of
    all items that are answered right or wrong, if there are any.

    Bounds are each task's own, p-values and verdicts of tasks are corrected for their number (Holm
    1979). All that has to pass has to do so by itself, so the pool needs no correction. Raises
    `CompressionError` for results that were not scored alike."""
    alpha = 1 - gate.confidence
    pairs = []
    tasks = []
    for first, second in zip(base, compressed, strict=True):
        items, others = (sorted(side.items, key=attrgetter("id")) for side in (first, second))
        facts = ("metric", "version", "kind")
        differing = [name for name in facts if getattr(first, name) != getattr(second, name)]
        asked = [(item.id, item.weight) for item in items]
        if asked != [(item.id, item.weight) for item in others]:
            differing.append("items")
        if differing:
            raise CompressionError(
                f"{first.task}: the base and the compressed model were scored with different "
                f"{joined(differing)}: evaluate both anew, with another --cache-dir"
            )
        before = np.array([item.score for item in items])
        after = np.array([item.score for item in others])
        weights = np.array([item.weight for item in items])
        empty = int((weights <= 0).sum())
        if empty:
            raise CompressionError(
                f"{first.task}, {first.metric}: {empty} of {len(weights)} items have no words or "
                "bytes: leave them out of the task"
            )
        pair = PairedItems(
            before, after, weights, first.kind, first.task, first.metric, first.version
        )
        pairs.append(pair)
        margin = gate.task_drop if pair.binary else gate.max_drop
        test = measure(pair, margin, alpha, not pair.binary)
        if first.cut is not None and second.cut is not None:
            test = replace(test, cut=(first.cut, second.cut))
        tasks.append(test)
    tasks = corrected(tasks, alpha, "p_pass", "p_fail")
    keys = {(pair.task, pair.metric, pair.kind) for pair in pairs}
    binary = []
    for pair in pairs:
        # a problem of EvalPlus counts once, by all of its tests
        if pair.binary and (f"{pair.task}+", pair.metric, pair.kind) not in keys:
            binary.append(pair)
    if not binary:
        return Judgement(tuple(tasks), None)
    before = np.concatenate([pair.base for pair in binary])
    after = np.concatenate([pair.compressed for pair in binary])
    metric = " and ".join(dict.fromkeys(pair.metric for pair in binary))
    pool = PairedItems(before, after, np.ones(len(before)), task=POOLED, metric=metric)
    return Judgement(tuple(tasks), measure(pool, gate.max_drop, alpha, True))


def find_anomalies(
    rows: Sequence[TaskGate],
    base: Sequence[ItemScores],
    expectations: Mapping[str, Expectation],
    asked: Asked,
) -> tuple[Anomaly, ...]:
    """Return the anomalies of tasks with the base's scores on them; `asked` names the chat template
    of each task, as far as it is known."""
    binom = scipy.stats.binom
    suspects = []
    for row, scores in zip(rows, base, strict=True):
        values = np.array(scores.values)
        right = values.sum()
        expected = expectations.get(row.task)
        if expected is not None:
            tolerance = expected.tolerance
            # the two-sided p if the true score is within the tolerance: exact if right or wrong
            if row.mcnemar is None:
                error = ratio_error(values, np.array([item.weight for item in scores.items]))
                if row.kind == "likelihood":
                    error = error * row.base
                # a metric of which less is better is negated
                distance = abs(abs(row.base) - abs(expected.value))
                distance = distance - (SURE * error if tolerance is None else tolerance)
                with np.errstate(divide="ignore", invalid="ignore"):
                    far = np.nan_to_num(distance / error)
                tail = scipy.special.stdtr(max(row.items - 1, 1), -far)
            else:
                tolerance = SURE * 0.5 / row.items**0.5 if tolerance is None else tolerance
                low, high = np.clip([expected.value - tolerance, expected.value + tolerance], 0, 1)
                few = binom.cdf(right, row.items, low)
                tail = min(few, binom.sf(right - 1, row.items, high))
            p = min(2 * float(tail), 1.0)
            suspects.append((row, f"not {expected.score} as expected", p))
        if row.mcnemar is None:
            continue
        if scores.chance is not None:
            # of so few right answers if many more than by guessing are due
            p = float(binom.cdf(right, row.items, min(scores.chance + ABOVE_CHANCE, 1.0)))
            if binom.sf(right - 1, row.items, scores.chance) < NOTICEABLE:
                p = 1.0
            suspects.append((row, f"no better than guessing, {scores.chance:.4f}", p))
        if row.gained > row.lost:
            reason = f"clearly worse than the compressed model, {row.compressed:.4f}"
            suspects.append((row, reason, row.mcnemar))
    p_values = holm(np.array([p for *_, p in suspects])).tolist()
    anomalies = []
    for (row, reason, _), p in zip(suspects, p_values, strict=True):
        if p >= FALSE_ALARMS:
            continue
        cause = "most often a broken or missing chat template"
        if row.cut is not None and row.cut[0] >= MANY_CUT:
            reached = f"{row.cut[0]:.1%} of its answers reached the token limit"
            cause = f"likely since {reached}; else {cause}"
        if row.task in asked:
            cause += f"; used was {asked[row.task]['chat_template'] or 'none'}"
        sentence = f"ANOMALOUS: on {row.task} the base scores {row.base:.4f}, {reason} ({cause})"
        anomalies.append(Anomaly(row.task, sentence, p))
    return tuple(anomalies)


def overall(
    rows: Sequence[TaskGate],
    conditions: Sequence[GateCondition] = (),
    anomalies: Sequence[Anomaly] = (),
) -> Verdict:
    """Return fail if anything fails, pass if all that decides passes, else inconclusive (also
    without a row).

    Tasks outside the pool, the pool and conditions decide; with an anomaly nothing passes.
    """
    verdicts = {condition.verdict for condition in conditions}
    verdicts |= {row.verdict for row in rows if row.decides or row.verdict == "fail"}
    if "fail" in verdicts:
        return "fail"
    return "pass" if verdicts == {"pass"} and not anomalies else "inconclusive"


def conclude(
    judgement: Judgement,
    base_scores: Sequence[ItemScores],
    gate: GateOptions,
    conditions: tuple[GateCondition, ...],
    **facts: Any,
) -> GateResult:
    """Return the verdict on tasks with the base's scores on them and on conditions, with further
    facts of the result."""
    tasks, pooled = judgement
    anomalies = find_anomalies(tasks, base_scores, gate.expectations, facts.get("asked", {}))
    return GateResult(
        verdict=overall(judgement.rows, conditions, anomalies),
        max_drop=gate.max_drop,
        max_task_drop=gate.task_drop,
        confidence=gate.confidence,
        pooled=pooled,
        tasks=tasks,
        conditions=conditions,
        anomalies=anomalies,
        **facts,
    )


def advise(task: TaskGate, confidence: float, unit: str = "items", what: str = "drop") -> str:
    """Say how many items would decide an inconclusive task."""
    count = items_needed(task, confidence)
    if count is None:
        return f"the {what} is too near the margin for any number of {unit} to decide"
    return (
        f"about {float(f'{count:.2g}'):,.0f} {unit} would decide it instead of {task.items:,}, an "
        f"estimate for a {what} that stays what it is and a probability of {POWER:g}"
    )


def items_needed(task: TaskGate, confidence: float) -> int | None:
    """Estimate the items that would decide a task with probability `POWER`; None if they are too
    many.

    If the drop stays what it is, its bound has to come nearer than the margin, and it does so by
    the root of the number of items: n * (now / needed)^2. With perplexities this holds of
    logarithms."""
    scores = [task.drop, task.lower, task.upper, task.max_drop]
    if task.kind == "likelihood":
        scores = [math.log1p(rise) if rise > -1 else -math.inf for rise in scores]
    drop, lower, upper, allowed = scores
    wider = 1 + NormalDist().inv_cdf(POWER) / NormalDist().inv_cdf(confidence)
    half = upper - drop if drop < allowed else drop - lower
    needed = abs(allowed - drop)
    if not (needed > 0 and 0 < wider * half / needed < MOST_ITEMS):
        return None
    estimate = math.ceil(task.items * (wider * half / needed) ** 2)
    return estimate if estimate <= MOST_ITEMS else None
