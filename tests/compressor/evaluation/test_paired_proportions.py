"""Exact paired tests against enumeration of all tables, numeric maximum likelihood, scipy's binomial and simulation."""

import math
from itertools import product

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar
from scipy.stats import multinomial

from compressor.evaluation.gate_statistics import at_least, at_most, constrained_gain, lower_bound, upper_bound

tables = st.integers(1, 300).flatmap(
    lambda n: st.tuples(st.integers(0, n), st.integers(0, n), st.just(n)).filter(lambda x: x[0] + x[1] <= x[2])
)


@given(tables, st.floats(-0.95, 0.95))
@settings(deadline=None)
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


@pytest.mark.parametrize(("items", "margin"), [(10, 0.01), (298, 0.01), (299, 0.01), (400, 0.01), (50, 0.1)])
def test_without_a_flip_it_is_the_binomial_test(items: int, margin: float) -> None:
    assert at_most(0, 0, items, margin) == pytest.approx((1 - margin) ** items)
    assert upper_bound(0, 0, items, 0.05) == pytest.approx(1 - 0.05 ** (1 / items))


def test_ends_of_the_scale() -> None:
    assert upper_bound(7, 0, 7, 0.05) == 1.0
    assert lower_bound(0, 7, 7, 0.05) == -1.0
    assert (at_most(7, 0, 7, 1.0), at_most(6, 0, 7, 1.0), at_most(7, 0, 7, 1.5)) == (1.0, 0.0, 0.0)
    assert (at_least(7, 0, 7, 1.5), at_most(0, 7, 7, -1.5)) == (1.0, 1.0)


@given(tables, st.floats(-0.9, 0.9), st.floats(1e-3, 0.1))
@settings(deadline=None)
def test_p_falls_as_the_drop_rises(table: tuple[int, int, int], drop: float, step: float) -> None:
    assert at_most(*table, drop + step) <= at_most(*table, drop) + 1e-9
    assert at_most(*table, drop) + at_least(*table, drop) >= 1 - 1e-9


@given(tables, st.sampled_from([0.01, 0.05, 0.2]))
@settings(deadline=None, max_examples=50)
def test_bounds_are_where_p_is_alpha_and_mirror(table: tuple[int, int, int], alpha: float) -> None:
    lost, gained, items = table
    assume(max(lost, gained) < items)
    upper, lower = upper_bound(*table, alpha), lower_bound(*table, alpha)
    assert lower < (lost - gained) / items < upper
    assert at_most(*table, upper) == pytest.approx(alpha, abs=1e-6)
    assert at_least(*table, lower) == pytest.approx(alpha, abs=1e-6)
    assert upper == pytest.approx(-lower_bound(gained, lost, items, alpha), abs=1e-12)
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


@pytest.mark.parametrize(("items", "flips", "margin"), [(50, 0.4, 0.1), (400, 0.05, 0.02), (2000, 0.1, 0.005)])
def test_level_by_simulation(items: int, flips: float, margin: float) -> None:
    """Both ways within three binomial errors of alpha, and not far under it: a test that never rejects fails this."""
    runs, alpha = 4000, 0.05
    shares = [(flips + margin) / 2, (flips - margin) / 2, 1 - flips]
    drawn = np.random.default_rng(1).multinomial(items, shares, size=runs)[:, :2]
    found, counts = np.unique(drawn, axis=0, return_counts=True)
    for test in (at_most, at_least):
        wrong = sum(n for (b, c), n in zip(found.tolist(), counts, strict=True) if test(b, c, items, margin) < alpha)
        assert 0.6 * alpha < wrong / runs < alpha + 3 * math.sqrt(alpha * (1 - alpha) / runs)
