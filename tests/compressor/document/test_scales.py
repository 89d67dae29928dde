"""Scales: ticks lie within their limits, everything finite lies on the axis, and small values are not hidden."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.figure import Figure as Canvas

from compressor.document.drawing import DECADES, TINIEST, log_limits, scale_axis, ticks

SIZES = st.floats(1e-25, 1e25)
VALUES = st.lists(st.one_of(SIZES, SIZES.map(lambda size: -size), st.just(0.0)), min_size=1, max_size=12)


@given(SIZES, st.floats(1.0, 1e12), st.integers(2, 12))
def test_ticks_are_few_round_numbers_within_the_limits(low: float, factor: float, most: int) -> None:
    high = low * factor
    found = ticks(low, high, most)
    assert found == sorted(found) and 2 <= len(found) <= most and (len(set(found)) == len(found) or low == high)
    assert all(low * (1 - 1e-8) <= value <= high * (1 + 1e-8) for value in found)
    if found != [low, high]:
        assert {f"{value:.6e}"[0] for value in found} <= set("125")
        assert all(float(f"{value:.0e}") == pytest.approx(value, rel=1e-12) for value in found)


def test_ticks_by_hand() -> None:
    assert ticks(0.004, 0.13) == [0.005, 0.01, 0.02, 0.05, 0.1]
    assert ticks(1e-4, 10.0) == [1e-4, 1e-3, 0.01, 0.1, 1.0, 10.0]
    assert ticks(0.21, 0.4) == [0.21, 0.4]


@given(st.lists(st.one_of(st.none(), st.floats(), st.just(0.0)), max_size=12))
def test_limits_hold_the_greatest_and_span_few_decades(values: list[float | None]) -> None:
    sizes = [abs(value) for value in values if value is not None and math.isfinite(value) and abs(value) >= TINIEST]
    found = log_limits(values)
    if found is None:
        assert not sizes
        return
    low, high = found
    assert high == max(sizes) and 0 < low <= high and high / low <= 10.0**DECADES * (1 + 1e-9)
    assert low == pytest.approx(min(sizes)) or min(sizes) < low


@settings(deadline=None, max_examples=60)
@given(VALUES, st.sampled_from(["x", "y"]))
def test_scale_fits_its_values(values: list[float], which: str) -> None:
    axes = Canvas().add_subplot()
    said = scale_axis(axes, which, values)  # type: ignore[arg-type]
    scale, (low, high) = getattr(axes, f"get_{which}scale")(), getattr(axes, f"get_{which}lim")()
    sizes = [abs(value) for value in values if value]
    if not sizes or (min(values) > 0 and max(values) <= 10 * min(values)):
        assert scale == "linear" and said == ""
    elif min(values) > 0 and max(sizes) / min(sizes) <= 10**DECADES:
        assert scale == "log" and said == "logarithmic"
    assert said == "" or "logarithmic" in said
    assert max(values) <= high and (scale == "log" or min(values) >= low or min(values) > -max(sizes) / 10**DECADES)
    marks = [mark for mark in getattr(axes, f"get_{which}ticks")() if low <= mark <= high]
    assert len(marks) >= 2
    if scale == "symlog":
        assert min(values) <= 0 or max(sizes) / min(sizes) > 10**DECADES
        assert 0.0 in marks


def test_scale_is_linear_without_numbers() -> None:
    axes = Canvas().add_subplot()
    assert scale_axis(axes, "x", [math.nan, math.inf]) == "" and axes.get_xscale() == "linear"
