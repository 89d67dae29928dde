import math
import warnings
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar
from scipy.signal import convolve2d
from scipy.stats import multinomial, ttest_rel

from compressor.answers.scores import AnsweredItem, ItemScores
from compressor.errors import CompressionError
from compressor.quality_gate.options import GateOptions
from compressor.quality_gate.statistics import (
    Evidence,
    at_most,
    constrained_gain,
    freedom_of,
    holm,
    judge,
    most_careful,
    overall,
    ratio,
    ratio_error,
    shown_by,
    skewness,
    student,
    upper_bound,
)
from compressor.quality_gate.verdict import TaskGate
from scripts import simulate_gate

ALPHA = 0.05


def at_least(lost: float, gained: float, items: int, drop: float) -> float:
    return at_most(gained, lost, items, -drop)


def lower_bound(lost: float, gained: float, items: int, alpha: float) -> float:
    return -upper_bound(gained, lost, items, alpha)


def scores(values: Any, **given: Any) -> ItemScores:
    fields: dict[str, Any] = {"task": "t", "metric": "acc", "version": "1.0", "kind": "score"} | given
    weights = fields.pop("weights", [1.0] * len(values))
    rows = enumerate(zip(values, weights, strict=True))
    items = (AnsweredItem(f"item {i:05}", float(value), float(weight)) for i, (value, weight) in rows)
    return ItemScores(items=tuple(items), **fields)


def likelihoods(values: Any, weights: Any, **given: Any) -> ItemScores:
    return scores(values, kind="likelihood", weights=weights, **given)


def judged(
    base: Any, compressed: Any, max_drop: float = 0.01, max_task_drop: float = 0.03, confidence: float = 0.95
) -> Any:
    settings = {"max_drop": max_drop, "max_task_drop": max_task_drop, "confidence": confidence}
    return judge(base, compressed, GateOptions(tasks=("t",), **settings))


def gate(base: ItemScores, compressed: ItemScores, max_drop: float = 0.01, confidence: float = 0.95) -> TaskGate:
    (task,), _ = judged([base], [compressed], max_drop, max_drop, confidence)
    return task


def flipped(lost: int, gained: int, items: int, right: int | None = None) -> tuple[ItemScores, ItemScores]:
    """Base and compressed with so many flips, and `right` (half of the others) right before and after."""
    same = items - lost - gained
    right = same // 2 if right is None else right
    base = [1] * lost + [0] * gained + [1] * right + [0] * (same - right)
    after = [0] * lost + [1] * gained + base[lost + gained :]
    return scores(base), scores(after)


KINDS = ("right or wrong", "continuous", "likelihood", "few differ")
kinds = st.sampled_from(KINDS)


def sample(kind: str, seed: int, items: int = 40) -> tuple[ItemScores, ItemScores]:
    random = np.random.default_rng(seed)
    right, coin = random.random(items) < 0.6, random.random(items)
    if kind == "right or wrong":
        return scores(right), scores(right ^ (coin < 0.2))
    if kind == "likelihood":
        words = random.integers(5, 50, size=items)
        return likelihoods(-2 * words * coin, words), likelihoods(-2.1 * words * coin - random.random(items), words)
    changed = random.random(items) < (0.1 if kind == "few differ" else 1)
    return scores(coin), scores(np.where(changed, random.random(items), coin))


def test_by_hand() -> None:
    base, compressed = flipped(9, 4, 100, right=60)
    found = gate(base, compressed, max_drop=0.02)
    difference = np.array(base.values) - np.array(compressed.values)
    assert (found.items, found.lost, found.gained) == (100, 9, 4)
    assert (found.base, found.compressed, found.drop) == pytest.approx((0.69, 0.64, 0.05))
    assert found.standard_error == pytest.approx(difference.std(ddof=1) / 10)
    assert found.mcnemar == pytest.approx(2 * sum(math.comb(13, k) for k in range(5)) / 2**13)
    assert found.lower < 0.02 < 0.05 < found.upper and found.verdict == "inconclusive"
    assert found.perplexity_ratio is None


def test_other_scores_that_do_not_differ() -> None:
    values = np.linspace(0, 0.5, 200)
    found = gate(scores(values), scores(values))
    assert found.upper == -found.lower == pytest.approx(-math.log(0.05) * 0.5 / 200)
    assert found.mcnemar is None and found.verdict == "pass"
    assert gate(scores([0.3] * 9), scores([0.3] * 9)).upper == pytest.approx(-math.log(0.05) / 9)  # no range: 1


def test_one_score_that_differs_a_little_is_no_certainty() -> None:
    values = np.linspace(0, 1, 50)
    after = np.where(np.arange(50) == 3, values - 0.001, values)
    assert gate(scores(values), scores(after)).upper > 0.05


def test_perplexities_by_hand() -> None:
    words, base, after = [10, 30, 60], [-20.0, -66.0, -114.0], [-21.0, -68.0, -119.0]
    found = gate(likelihoods(base, words), likelihoods(after, words), max_drop=0.5)
    assert (found.base, found.compressed) == pytest.approx((math.exp(2), math.exp(2.08)))
    assert found.drop == pytest.approx(math.exp(0.08) - 1)
    without = [(2 + 5) / 90, (1 + 5) / 70, (1 + 2) / 40]  # log ratios with one document left out
    error = math.sqrt(2 / 3 * sum((x - 0.08) ** 2 for x in without))
    assert found.standard_error == pytest.approx(math.exp(0.08) * error)
    assert found.perplexity_ratio == pytest.approx((1 + found.drop, 1 + found.lower, 1 + found.upper))
    assert 0 < 1 + found.lower < math.exp(0.08) < 1 + found.upper
    assert (found.lost, found.gained, found.mcnemar) == (3, 0, None)


def test_the_same_likelihoods_are_the_same_model_but_for_what_was_read() -> None:
    words = [400, 500, 600]
    same = likelihoods([-900, -1000, -1300], words)
    assert gate(same, same).verdict == "pass"
    short = likelihoods([-9, -10, -13], [4, 5, 6])
    assert gate(short, short).verdict == "inconclusive"
    one = gate(likelihoods([-9], [4]), likelihoods([-9.1], [4]))
    assert one.verdict == "inconclusive" and one.perplexity_ratio is not None


@given(kinds, st.integers(0, 500), st.sampled_from([0.0, 0.02, 0.1, 0.3]), st.sampled_from([0.8, 0.95]))
def test_verdict_and_bounds_agree(kind: str, seed: int, max_drop: float, confidence: float) -> None:
    found = gate(*sample(kind, seed), max_drop, confidence)
    assert found.lower <= found.drop <= found.upper and found.p_pass + found.p_fail >= 1 - 1e-9
    assert (found.verdict == "pass") == (found.upper < max_drop)
    assert (found.verdict == "fail") == (found.lower > max_drop)
    assert found.detectable > 0


@given(kinds, st.integers(0, 500))
def test_swapped_models_mirror_the_bounds(kind: str, seed: int) -> None:
    base, after = sample(kind, seed)
    found, swapped = gate(base, after), gate(after, base)
    if kind == "likelihood":
        assert (1 + swapped.upper) * (1 + found.lower) == pytest.approx(1)
        assert (1 + swapped.lower) * (1 + found.upper) == pytest.approx(1)
    else:
        assert (swapped.lower, swapped.upper) == pytest.approx((-found.upper, -found.lower), abs=1e-9)
    assert (swapped.lost, swapped.gained, swapped.mcnemar) == (found.gained, found.lost, found.mcnemar)


@given(kinds, st.integers(0, 500), st.randoms(use_true_random=False))
def test_the_order_of_the_items_does_not_matter(kind: str, seed: int, random: Any) -> None:
    def shuffled(given: ItemScores) -> ItemScores:
        return replace(given, items=tuple(random.sample(given.items, 40)))

    base, after = sample(kind, seed)
    assert gate(shuffled(base), shuffled(after)) == gate(base, after)


def tasks_of(*counts: Any, **settings: float) -> Any:
    base, compressed = zip(*(flipped(*each) for each in counts), strict=True)
    return judged(base, compressed, **settings)


def verdict_of(*counts: tuple[int, int, int], **settings: float) -> str:
    tasks, pooled = tasks_of(*counts, **settings)
    return overall([*tasks, pooled])


def test_the_pool_is_the_test_of_all_items_together() -> None:
    tasks, pooled = tasks_of((9, 2, 3270), (5, 1, 277), (1, 6, 500))
    alone = gate(*flipped(15, 9, 4047))
    for name in ("items", "lost", "gained", "drop", "lower", "upper", "p_pass", "p_fail", "standard_error", "verdict"):
        assert getattr(pooled, name) == pytest.approx(getattr(alone, name)), name
    assert pooled.max_drop == 0.01 and [task.max_drop for task in tasks] == [0.03] * 3
    assert pooled.decides and not any(task.decides for task in tasks)


def test_what_is_not_right_or_wrong_decides_by_itself() -> None:
    words = np.full(100, 500.0)
    before = likelihoods(-words * 2, words)
    noise = 0.001 * np.random.default_rng(0).standard_normal(100)
    graded = sample("continuous", 0)
    for rise, expected in ((0.0, "pass"), (0.011, "fail"), (0.0099, "inconclusive")):
        after = likelihoods(-words * (2 + math.log1p(rise) + noise), words)
        same, copied = flipped(0, 0, 400)
        tasks, pooled = judged([same, before], [copied, after])
        assert pooled is not None and (pooled.items, pooled.verdict) == (400, "pass")
        assert [task.max_drop for task in tasks] == [0.03, 0.01] and [task.decides for task in tasks] == [False, True]
        assert overall([*tasks, pooled]) == tasks[1].verdict == expected
    tasks, pooled = judged([graded[0]], [graded[1]])
    assert pooled is None and tasks[0].decides and overall(tasks) == tasks[0].verdict
    assert overall([]) == "inconclusive"


def test_a_task_refuses_by_a_clear_loss_alone() -> None:
    """RTE loses 10 of 100 answers while 14,000 other items hide it; then 4 of 100, which may be chance."""
    assert verdict_of((0, 0, 14042), (28, 0, 277)) == "fail"
    assert verdict_of((0, 0, 14042), (11, 0, 277)) == "pass"
    assert verdict_of((0, 0, 14042), (11, 0, 277), max_task_drop=0.005) == "fail"
    assert verdict_of((0, 0, 14042), (28, 0, 277), max_task_drop=0.2) == "pass"


def test_tasks_are_corrected_for_their_number_and_bounds_are_not() -> None:
    counts = [(4, 0, 1000), (7, 2, 1000), (9, 9, 1000)]
    alone = [tasks_of(each, max_task_drop=0.02)[0][0] for each in counts]
    together, _ = tasks_of(*counts, max_task_drop=0.02)
    assert [task.lower for task in together] == [task.lower for task in alone]
    assert min(task.p_pass for task in together) == pytest.approx(3 * min(task.p_pass for task in alone))
    assert all(task.p_fail == 1 for task in together)
    just, fine = (33, 2, 1000), (1, 1, 1000)  # the first alone just fails
    assert tasks_of(just, max_task_drop=0.02)[0][0].verdict == "fail"
    assert [x.verdict for x in tasks_of(just, *[fine] * 4, max_task_drop=0.02)[0]] == ["inconclusive", *["pass"] * 4]


@pytest.mark.parametrize("alpha", [0.1, 0.05])
@pytest.mark.parametrize(
    ("sizes", "flips", "drops"),
    [
        ((20, 20), (0.2, 0.2), (0.05, 0.05)),
        ((30, 10), (0.1, 0.9), (0.05, 0.05)),
        ((30, 10), (0.1, 0.9), (-0.02, 0.26)),
        ((10, 10, 20), (0.5, 0.1, 0.3), (0.4, 0.1, -0.15)),
    ],
)
def test_pooled_strata_hold_the_level(sizes: tuple[int, ...], flips: Any, drops: Any, alpha: float) -> None:
    """All tables enumerated: the strata's own distributions of (lost, gained), convolved."""
    items, chances = sum(sizes), np.ones((1, 1))
    for n, flip, drop in zip(sizes, flips, drops, strict=True):
        own = np.zeros((n + 1, n + 1))
        for b, c in ((b, c) for b, c in product(range(n + 1), repeat=2) if b + c <= n):
            own[b, c] = multinomial.pmf([b, c, n - b - c], n, [(flip + drop) / 2, (flip - drop) / 2, 1 - flip])
        chances = convolve2d(chances, own)
    margin = sum(n * drop for n, drop in zip(sizes, drops, strict=True)) / items
    assert chances.sum() == pytest.approx(1) and margin == pytest.approx(0.05)
    cells = [(b, c) for b, c in product(range(items + 1), repeat=2) if chances[b, c] > 1e-9]
    for test in (at_most, at_least):
        assert sum(chances[b, c] for b, c in cells if test(b, c, items, margin) < alpha) <= alpha


EXTREMES = [0.0, 5e-324, 1e-308, 1e-290, 1 - 2**-53, 1.0, 1e308]


@pytest.mark.parametrize("confidence", [0.5 + 2**-52, 0.95, 1 - 2**-53])
@pytest.mark.parametrize("max_drop", EXTREMES)
def test_no_margin_and_no_confidence_overflows(max_drop: float, confidence: float) -> None:
    results = [flipped(0, 0, 300), flipped(9, 4, 300), flipped(300, 0, 300), *(sample(k, 1) for k in KINDS)]
    with warnings.catch_warnings(), np.errstate(over="raise", invalid="raise", divide="raise"):
        warnings.simplefilter("error")
        for results_of in (*results, *((after, base) for base, after in results)):
            found = gate(*results_of, max_drop, confidence)
            assert found.lower <= found.drop <= found.upper
            assert 0 <= found.p_pass <= 1 and 0 <= found.p_fail <= 1
        assert shown_by(300, 0.05, 1 - confidence) > 0


ONE = scores([1, 0, 1])


def test_unlike_results_and_items_without_words_are_refused() -> None:
    renamed = tuple(replace(item, id=f"other {item.id}") for item in ONE.items)
    empty = likelihoods([-1, -2], [3, 0])
    for one, other, message in (
        (ONE, replace(ONE, metric="f1"), "different metric"),
        (ONE, replace(ONE, kind="likelihood"), "different kind"),
        (ONE, replace(ONE, items=renamed), "different items"),
        (ONE, scores([1, 0]), "different items"),
        (empty, empty, "1 of 2 items have no words or bytes"),
    ):
        with pytest.raises(CompressionError, match=message):
            gate(one, other)


def test_the_simulation_judges_as_the_gate_does() -> None:
    random, margin = np.random.default_rng(4), 0.02
    # both right, only the base, only the other, none: a fifth flips, with a drop of 0.03
    both, lost, gained, _ = random.multinomial(200, [0.585, 0.115, 0.085, 0.215], size=20).T
    passing, failing = simulate_gate.exact(lost, gained, 200, margin)
    for i in range(20):
        found = gate(*flipped(int(lost[i]), int(gained[i]), 200, right=int(both[i])), max_drop=margin)
        assert (found.p_pass, found.p_fail) == pytest.approx((passing[i], failing[i]))
    for table in (simulate_gate.right_or_wrong, simulate_gate.pooled, simulate_gate.continuous):
        assert sum("true" in line for line in table(random, 5, 0.05)) >= 12


def wrong(found: Evidence, alpha: float = ALPHA) -> tuple[float, float]:
    """Shares of repetitions that pass and that fail."""
    return float((found.p_pass < alpha).mean()), float((found.p_fail < alpha).mean())


@given(st.integers(0, 1000), st.integers(2, 60), st.floats(-0.5, 0.5))
def test_student_is_the_paired_t_test(seed: int, items: int, margin: float) -> None:
    random = np.random.default_rng(seed)
    base, after = random.random(items), random.random(items)
    ones = np.ones(items)
    found = student(ratio(base - after, ones), ratio_error(base - after, ones), freedom_of(ones), margin, ALPHA)
    less, more = (ttest_rel(base - margin, after, alternative=side) for side in ("less", "greater"))
    assert found.p_pass == pytest.approx(less.pvalue)
    assert found.p_fail == pytest.approx(more.pvalue)
    assert found.upper == pytest.approx(less.confidence_interval(1 - ALPHA).high + margin)
    assert found.lower == pytest.approx(more.confidence_interval(1 - ALPHA).low + margin)


def test_degrees_of_freedom() -> None:
    assert freedom_of(np.full(9, 3.0)) == pytest.approx(8)
    assert 1 < freedom_of(np.array([1.0, 1.0, 2.0])) < 2
    assert freedom_of(np.array([1.0, 99.0])) == 1


@given(st.integers(0, 1000), st.integers(3, 50), st.sampled_from([0.01, 0.05, 0.3]))
def test_the_bounds_of_a_skewed_sample_are_where_its_p_is_alpha(seed: int, items: int, alpha: float) -> None:
    values = np.random.default_rng(seed).standard_exponential(items) ** 2
    ones, error = np.ones(items), ratio_error(values, np.ones(items))
    mean, skew = values.mean(), skewness(values, ones)
    found = student(mean, error, items - 1, 0.0, alpha, skew)
    at_upper = student(mean, error, items - 1, float(found.upper), alpha, skew)
    at_lower = student(mean, error, items - 1, float(found.lower), alpha, skew)
    assert at_upper.p_pass == pytest.approx(alpha, rel=1e-4)
    assert at_lower.p_fail == pytest.approx(alpha, rel=1e-4)
    mirrored = student(-mean, error, items - 1, 0.0, alpha, skewness(-values, ones))
    assert mirrored.upper == pytest.approx(-found.lower)


def test_rare_large_losses_pass_falsely_without_the_correction_for_skewness() -> None:
    """One item in ten loses something, 400 items, 4,000 runs: the plain t passes 7 % of models at the margin."""
    random, runs, items = np.random.default_rng(6), 4000, 400
    losses = random.random((runs, items)) * (random.random((runs, items)) < 0.1)
    ones = np.ones(items)
    estimate, error = ratio(losses, ones), ratio_error(losses, ones)
    plain = student(estimate, error, items - 1, 0.05, ALPHA)
    bent = student(estimate, error, items - 1, 0.05, ALPHA, skewness(losses, ones))
    limit = ALPHA + 3 * math.sqrt(ALPHA * (1 - ALPHA) / runs)
    assert wrong(plain)[0] > limit
    assert 0.02 < wrong(bent)[0] < limit
    assert wrong(most_careful([plain, bent]))[1] < limit


chances = st.lists(st.floats(0, 1), min_size=1, max_size=8)


@given(chances, st.floats(0.001, 0.999))
def test_holm_rejects_what_the_stepwise_procedure_rejects(p_values: list[float], alpha: float) -> None:
    """Compare the smallest with alpha / m, the next with alpha / (m - 1) and so on, until one is not rejected."""
    rejected, left = set(), dict(enumerate(p_values))
    while left:
        smallest = min(left, key=left.__getitem__)
        if left.pop(smallest) * (len(left) + 1) > alpha:
            break
        rejected.add(smallest)
    adjusted = holm(np.array(p_values))
    assert {i for i, p in enumerate(adjusted) if p <= alpha} == rejected


tables = st.integers(1, 300).flatmap(
    lambda n: st.tuples(st.integers(0, n), st.integers(0, n), st.just(n)).filter(lambda x: x[0] + x[1] <= x[2])
)


@given(tables, st.floats(-0.95, 0.95))
def test_the_constrained_gain_is_the_likeliest_one(table: tuple[int, int, int], drop: float) -> None:
    lost, gained, items = table
    low, high = max(0.0, -drop), (1 - drop) / 2

    def surprise(gain: float) -> float:
        shares = (gain + drop, gain, 1 - 2 * gain - drop)
        counts = (lost, gained, items - lost - gained)
        return -sum(n * math.log(max(p, 1e-300)) for n, p in zip(counts, shares, strict=True) if n)

    found = constrained_gain(lost, gained, items, drop)
    assert low - 1e-12 <= found <= high + 1e-12
    best = minimize_scalar(surprise, bounds=(low, high), method="bounded", options={"xatol": 1e-12})
    assert surprise(found) <= best.fun + 1e-6 * (1 + abs(best.fun))


@pytest.mark.parametrize("drop", [-0.2, -0.01, 0.0, 0.03, 0.3])
def test_p_is_the_probability_of_all_tables_with_as_small_a_net_loss(drop: float) -> None:
    items = 9
    every = [(b, c) for b, c in product(range(items + 1), repeat=2) if b + c <= items]
    for lost, gained in every:
        gain = constrained_gain(lost, gained, items, drop)
        shares = np.array([gain + drop, gain, 1 - 2 * gain - drop]).clip(0)
        chances = multinomial(items, shares / shares.sum())
        below = sum(chances.pmf([b, c, items - b - c]) for b, c in every if b - c <= lost - gained)
        above = sum(chances.pmf([b, c, items - b - c]) for b, c in every if b - c >= lost - gained)
        assert at_most(lost, gained, items, drop) == pytest.approx(below, abs=1e-9)
        assert at_least(lost, gained, items, drop) == pytest.approx(above, abs=1e-9)


def test_ends_of_the_scale() -> None:
    assert upper_bound(7, 0, 7, 0.05) == 1.0
    assert lower_bound(0, 7, 7, 0.05) == -1.0
    assert (at_most(7, 0, 7, 1.0), at_most(6, 0, 7, 1.0), at_most(7, 0, 7, 1.5)) == (1.0, 0.0, 0.0)
    assert (at_least(7, 0, 7, 1.5), at_most(0, 7, 7, -1.5)) == (1.0, 1.0)


@given(tables, st.sampled_from([0.01, 0.05, 0.2]))
def test_bounds_are_where_p_is_alpha_and_mirror(table: tuple[int, int, int], alpha: float) -> None:
    lost, gained, items = table
    assume(max(lost, gained) < items)
    upper, lower = upper_bound(*table, alpha), lower_bound(*table, alpha)
    assert lower < (lost - gained) / items < upper
    assert at_most(*table, upper) == pytest.approx(alpha, abs=1e-6)
    assert at_least(*table, lower) == pytest.approx(alpha, abs=1e-6)
    assert upper_bound(lost, gained, items + 50, alpha) < upper or lost < gained


@pytest.mark.parametrize("alpha", [0.1, 0.05, 0.01])
@pytest.mark.parametrize("items", [12, 30])
def test_no_true_drop_at_the_margin_is_judged_wrongly_too_often(items: int, alpha: float) -> None:
    every = np.array([(b, c, items - b - c) for b, c in product(range(items + 1), repeat=2) if b + c <= items])
    for margin in (0.0, 0.01, 0.05, 0.1):
        passes = np.array([at_most(b, c, items, margin) < alpha for b, c, _ in every.tolist()])
        fails = np.array([at_least(b, c, items, margin) < alpha for b, c, _ in every.tolist()])
        for flips in (0.005, 0.02, 0.05, 0.1, 0.2, 0.4, 0.8):
            if flips >= margin:
                chances = multinomial.pmf(every, items, [(flips + margin) / 2, (flips - margin) / 2, 1 - flips])
                assert chances[passes].sum() <= alpha
                assert chances[fails].sum() <= alpha
