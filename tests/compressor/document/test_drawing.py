import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas

from compressor.document.drawing import COLOURS, DECADES, ROLES, draw_heat, ink_on, scale_axis


def fresh() -> Axes:
    return Canvas().add_subplot()


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
