"""Paired tests of means against scipy, a plain jackknife, formulas written another way, and simulation."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.stats import ttest_rel

from compressor.evaluation.gate_statistics import (
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

ALPHA = 0.05


def wrong(found: Evidence, alpha: float = ALPHA) -> tuple[float, float]:
    """Shares of repetitions that pass and that fail."""
    return float((found.p_pass < alpha).mean()), float((found.p_fail < alpha).mean())


def random_sample(seed: int, units: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Values and weights: [n], [n]."""
    random = np.random.default_rng(seed)
    return random.standard_normal(units), random.integers(1, 20, size=units).astype(float)


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


@given(st.integers(0, 1000), st.integers(2, 40))
def test_the_error_is_the_jackknife(seed: int, units: int) -> None:
    values, weights = random_sample(seed, units)
    without = [np.delete(values, i).sum() / np.delete(weights, i).sum() for i in range(units)]
    spread = sum((x - values.sum() / weights.sum()) ** 2 for x in without)
    assert ratio_error(values, weights) == pytest.approx(math.sqrt((units - 1) / units * spread))


def test_even_clusters_have_the_cluster_robust_error() -> None:
    differences = np.random.default_rng(2).standard_normal((7, 30))  # [G, items of each]
    centred = differences - differences.mean()
    covariances = sum(float(np.outer(group, group).sum()) for group in centred)  # Miller's sum within clusters
    expected = math.sqrt(7 / 6 * covariances) / 210
    assert ratio_error(differences.sum(axis=1), np.full(7, 30.0)) == pytest.approx(expected)


def test_one_unit_has_no_error_and_shows_nothing() -> None:
    one = np.ones(1)
    found = student(0.3, ratio_error(one, one), freedom_of(one), 0.5, ALPHA)
    assert (found.lower, found.upper, found.p_pass, found.p_fail) == (-math.inf, math.inf, 1, 1)


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


def test_skewness_is_the_third_moment_by_the_root_of_n() -> None:
    values = np.random.default_rng(5).standard_exponential(40)
    centred = values - values.mean()
    expected = (centred**3).mean() / (centred**2).mean() ** 1.5 / math.sqrt(40)
    assert skewness(values, np.ones(40)) == pytest.approx(expected)
    assert skewness(np.ones(5), np.ones(5)) == 0


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


@pytest.mark.parametrize(("groups", "uneven"), [(8, False), (8, True), (40, True)])
def test_level_with_clusters(groups: int, uneven: bool) -> None:
    """Clusters that differ more than their items do: their error holds its level, that of items is far too small."""
    random, runs = np.random.default_rng(7), 4000
    sizes = (np.linspace(10, 30, groups) if uneven else np.full(groups, 20)).astype(int)
    effects = np.repeat(0.05 * random.standard_normal((runs, groups)), sizes, axis=1)
    items = 0.02 + effects + 0.1 * random.standard_normal(effects.shape)
    starts = np.concatenate([[0], sizes.cumsum()[:-1]])
    totals, weights, ones = np.add.reduceat(items, starts, axis=1), sizes.astype(float), np.ones(sizes.sum())
    clustered = student(ratio(totals, weights), ratio_error(totals, weights), freedom_of(weights), 0.02, ALPHA)
    plain = student(ratio(items, ones), ratio_error(items, ones), freedom_of(ones), 0.02, ALPHA)
    limit = ALPHA + 3 * math.sqrt(ALPHA * (1 - ALPHA) / runs)
    assert min(wrong(clustered)) > 0.03 and max(wrong(clustered)) < limit
    assert min(wrong(plain)) > 2 * limit


def test_level_of_a_ratio_of_sums() -> None:
    """Documents of uneven length; the mean of their ratios would be another number."""
    random, runs, documents = np.random.default_rng(8), 4000, 60
    words = random.integers(50, 1000, size=documents).astype(float)
    losses = words * (0.01 + 0.02 * random.standard_normal((runs, documents)))
    found = student(ratio(losses, words), ratio_error(losses, words), freedom_of(words), 0.01, ALPHA)
    assert min(wrong(found)) > 0.03 and max(wrong(found)) < ALPHA + 3 * math.sqrt(ALPHA * (1 - ALPHA) / runs)


def test_rule_of_three() -> None:
    found = rule_of_three(0.0, 1.0, 300, 0.01, ALPHA)
    assert found.upper == -found.lower == pytest.approx(3 / 300, rel=2e-3)
    assert rule_of_three(0.0, 2.0, 300, 0.01, ALPHA).upper == pytest.approx(2 * found.upper)
    at_bound = rule_of_three(0.1, 2.0, 300, float(rule_of_three(0.1, 2.0, 300, 0.0, ALPHA).upper), ALPHA)
    assert (at_bound.p_pass, at_bound.p_fail) == (pytest.approx(ALPHA), 1)


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


@given(chances, st.data())
@settings(deadline=None)
def test_holm_is_monotone_and_never_lowers(p_values: list[float], data: st.DataObject) -> None:
    before = holm(np.array(p_values))
    assert np.all(before >= p_values) and np.all(before <= 1)
    raised = np.array(p_values)
    which = data.draw(st.integers(0, len(p_values) - 1))
    raised[which] = data.draw(st.floats(p_values[which], 1))
    assert np.all(holm(raised) >= before - 1e-15)
    assert np.array_equal(holm(np.stack([raised, np.array(p_values)]))[1], before)
