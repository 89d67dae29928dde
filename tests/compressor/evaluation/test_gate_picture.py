"""The gate's figure, read back from its axes: bounds, drops, what tells verdicts apart, and the drop allowed."""

import math

import pytest
from hypothesis import given, settings
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from compressor.document.drawing import ROLES
from compressor.document.picture import inline_svgs, png
from compressor.evaluation.gate_report import gate_figure
from compressor.evaluation.gate_verdict import GateResult
from tests.gates import gate, gates, mixed, task


def drawn(result: GateResult) -> Axes:
    made, canvas = gate_figure(result), Figure()
    assert made is not None
    (drawing,) = made.drawings
    drawing.draw(canvas)
    (axes,) = canvas.axes
    return axes


def dots(axes: Axes) -> dict[int, tuple[float, Line2D]]:
    """Drop and line of markers by row."""
    return {
        round(float(place)): (float(value), line)
        for line in axes.lines
        if line.get_linestyle() == "None"
        for value, place in zip(line.get_xdata(), line.get_ydata(), strict=True)
    }


def test_each_task_is_a_line_between_its_bounds_with_its_verdicts_marker() -> None:
    axes, result = drawn(mixed()), mixed()
    lines = {float(line.get_ydata()[0]): list(line.get_xdata()) for line in axes.lines if line.get_marker() == "|"}
    looks = {"pass": ("o", "good", "good"), "fail": ("X", "bad", "bad"), "inconclusive": ("D", "unsure", "paper")}
    for place, each in enumerate(result.tasks):
        assert lines[place] == [each.lower, each.upper]
        drop, line = dots(axes)[place]
        marker, edge, face = looks[each.verdict]
        assert drop == each.drop and line.get_marker() == marker
        assert (line.get_markeredgecolor(), line.get_markerfacecolor()) == (ROLES[edge], ROLES[face])
    names = [label.get_text().split("\n") for label in axes.get_yticklabels()]
    assert names == [["✓ boolq", "pass"], ["✗ rte", "fail"], ["? openbookqa", "inconclusive"], ["✓ wikitext", "pass"]]
    low, high = axes.get_ylim()
    assert low > high  # the first task is above
    assert "1% of perplexity" in axes.get_xlabel() and "a perplexity its rise" in axes.get_xlabel()
    (shade,) = axes.patches  # all beyond the drop allowed
    assert shade.get_extents().transformed(axes.transData.inverted()).x0 == pytest.approx(0.01)  # type: ignore[attr-defined]
    assert [list(line.get_xdata()) for line in axes.lines if line.get_linestyle() == "--"] == [[0.01, 0.01]]
    made = gate_figure(result)
    assert made is not None and made.alt.startswith("Fail: with confidence 95%")
    assert "rte: drop +0.0800, at least +0.0500, at most +0.1100, fail" in made.alt
    assert "wikitext: drop +0.50%, at least +0.33%, at most +0.67%, pass." in made.alt


def test_no_figure_without_tasks_or_with_too_many_and_what_is_no_number_stands_at_the_edge() -> None:
    assert gate_figure(gate()) is None and gate_figure(gate(*[task()] * 201)) is None
    axes = drawn(gate(task(drop=math.nan, lower=-math.inf, upper=math.inf)))
    assert dots(axes)[0][0] == 10 and axes.get_xlim()[0] < -10


@settings(max_examples=10, deadline=None)
@given(gates())
def test_any_result_can_be_drawn(result: GateResult) -> None:
    if (made := gate_figure(result)) is None:
        return
    assert png(made.title, made.drawings)[:4] == b"\x89PNG"
    (svg,) = inline_svgs(made.name, made.drawings)
    assert "<script" not in svg and len(drawn(result).get_yticklabels()) == len(result.tasks)
