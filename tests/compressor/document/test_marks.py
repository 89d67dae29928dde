"""Dots, bars and heat maps: what matplotlib gets is what was given."""

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.patches import StepPatch

from compressor.document.drawing import (
    COLOURS,
    ROLES,
    Dots,
    Panel,
    draw_bars,
    draw_dots,
    draw_heat,
    draw_panels,
    ink_on,
    log_scale,
    spaced,
)

SHARES = st.floats(0.0, 1.0)


def fresh() -> Axes:
    return Canvas().add_subplot()


@settings(deadline=None, max_examples=25)
@given(st.lists(st.tuples(SHARES, st.sampled_from(["kept", "merged", "dropped"])), min_size=1, max_size=20))
def test_bars_have_their_values_and_roles(bars: list[tuple[float, str]]) -> None:
    axes = fresh()
    draw_bars(axes, [value for value, _ in bars], [role for _, role in bars], 0.25)
    found: dict[int, tuple[float, str]] = {}
    for patch in axes.patches:
        assert isinstance(patch, StepPatch) and patch.get_fill() == (patch.get_label() != "dropped")
        values, edges, _ = patch.get_data()
        for place in range(len(bars)):
            assert (edges[2 * place], edges[2 * place + 1]) == pytest.approx((place - 0.4, place + 0.4))
            if not math.isnan(values[2 * place]):
                assert place not in found
                found[place] = (float(values[2 * place]), str(patch.get_label()))
    assert [found[place] for place in range(len(bars))] == bars


NUMBERS = st.one_of(st.none(), st.floats(-1e6, 1e6))


@settings(deadline=None, max_examples=25)
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


@given(st.lists(st.integers(1, 256), min_size=1, max_size=20))
def test_spaced_places_keep_both_ends(places: list[int]) -> None:
    found = spaced(places)
    assert found == sorted(found) and {found[0], found[-1]} == {min(places), max(places)} and set(found) <= set(places)
    gaps = [after - before for before, after in pairwise(found)]
    assert all(gap >= 0.045 * (max(places) - min(places)) for gap in gaps)


@settings(deadline=None, max_examples=25)
@given(st.lists(st.lists(st.one_of(st.none(), st.floats()), min_size=3, max_size=3), min_size=1, max_size=5))
def test_heat_shows_every_finite_value(rows: list[list[float | None]]) -> None:
    shown = draw_heat(fresh(), rows, 0.0, 1.0).get_array()
    for line, drawn in zip(rows, shown, strict=True):
        for value, cell in zip(line, drawn, strict=True):
            is_blank = value is None or not math.isfinite(value)
            assert bool(np.ma.is_masked(cell)) == is_blank and (is_blank or float(cell) == value)


def test_panels_share_their_scale_and_have_room() -> None:
    panel = Panel("title", ("first", "second"), ((1.0, None), (1e-3, 1e-9)))
    scale = log_scale("variance", [1.0, None, 1e-3, 1e-9])
    assert (scale.low, scale.high, scale.has_smaller) == (1e-6, 1.0, True)
    drawing = draw_panels("title", "", [[panel], [panel]], ["0", "1"], [scale], "layer")
    canvas = Canvas(figsize=drawing.size, layout="constrained")
    drawing.draw(canvas)
    images = [image for axes in canvas.axes for image in axes.images]
    assert len(images) == 2 and images[0].norm.vmin == images[1].norm.vmin == 1e-6
    assert np.asarray(images[0].get_array())[1, 1] == 1e-6  # what is smaller has the first colour


def test_ink_is_seen_on_every_colour() -> None:
    for code in (*COLOURS, *ROLES.values()):
        assert ink_on(code) in ("#000000", "#ffffff")
    assert (ink_on("#ffffff"), ink_on("#332288")) == ("#000000", "#ffffff")
