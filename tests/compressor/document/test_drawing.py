import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas

from compressor.document.drawing import COLOURS, DECADES, ROLES, Dots, draw_dots, draw_heat, ink_on, scale_axis


def fresh() -> Axes:
    return Canvas().add_subplot()


NUMBERS = st.one_of(st.none(), st.floats(-1e6, 1e6))


@settings(max_examples=25)
@given(st.lists(st.tuples(NUMBERS, NUMBERS), min_size=1, max_size=8), st.sampled_from([None, 0.5]))
def test_dots_lie_at_their_values(rows: list[tuple[float | None, float | None]], limit: float | None) -> None:
    axes = fresh()
    bounds = [None if value is None else (value - 1, value + 1) for value, _ in rows]
    kinds = [Dots("a", [row[0] for row in rows], "after", bounds=bounds),
             Dots("b", [row[1] for row in rows], "bad", "X", False)]  # fmt: skip
    draw_dots(axes, [f"row {place}" for place in range(len(rows))], kinds, "drop", limit)
    for which, kind in enumerate(kinds):
        lines = [line for line in axes.lines if line.get_label() == kind.label]
        found = [(x, y) for line in lines for x, y in zip(*map(np.asarray, line.get_data()), strict=True)]
        assert found == [(row[which], place) for place, row in enumerate(rows) if row[which] is not None]
    ends = [tuple(np.asarray(line.get_xdata())) for line in axes.lines if line.get_marker() == "|"]
    assert ends == [bound for bound in bounds if bound is not None]
    low, high = axes.get_xlim()
    assert all(low <= value <= high for row in rows for value in row if value is not None) or limit is None
    assert axes.get_ylim() == (len(rows) - 0.5, -0.5)  # from above


@settings(max_examples=25)
@given(st.lists(st.lists(st.one_of(st.none(), st.floats()), min_size=3, max_size=3), min_size=1, max_size=5))
def test_heat_shows_every_finite_value(rows: list[list[float | None]]) -> None:
    shown = draw_heat(fresh(), rows, 0.0, 1.0).get_array()
    for line, drawn in zip(rows, shown, strict=True):
        for value, cell in zip(line, drawn, strict=True):
            is_blank = value is None or not math.isfinite(value)
            assert bool(np.ma.is_masked(cell)) == is_blank and (is_blank or float(cell) == value)


def test_ink_is_seen_on_every_colour() -> None:
    for code in (*COLOURS, *ROLES.values()):
        assert ink_on(code) in ("#000000", "#ffffff")
    assert (ink_on("#ffffff"), ink_on("#332288")) == ("#000000", "#ffffff")


SIZES = st.floats(1e-25, 1e25)
VALUES = st.lists(st.one_of(SIZES, SIZES.map(lambda size: -size), st.just(0.0)), min_size=1, max_size=12)


@given(VALUES, st.sampled_from(["x", "y"]))
def test_scale_fits_its_values(values: list[float], which: str) -> None:
    axes = fresh()
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
    assert scale_axis(fresh(), "x", [math.nan, math.inf]) == ""
