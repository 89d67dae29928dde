"""The dots of a report: reconstruction errors by layer, and the gate's drops with their bounds."""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from compressor.gates.content import change, margin, verdict_line
from compressor.gates.verdict import GateResult, TaskGate
from compressor.report.data import ReportData
from compressor.report.drawing import FONT, Panel, Sheet, colour, readable
from compressor.report.layers import brief, brief_end, named, short

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH = 3.9  # inches
LEGEND, BELOW = 0.3, 0.42
MOST_ROW, LEAST_ROW, TALLEST = 0.26, 0.13, 7.0
TASK_ROW = 0.46
FARTHEST = 10.0  # drops beyond it are drawn there
HELDOUT = ("heldout_error_before", "heldout_error_after")
ERRORS = {  # by field: what it is, and marker, colour and whether the marker is filled
    "error": ("of the MoE block", "o", "after", True),
    HELDOUT[0]: ("held-out, before correction", "D", "before", False),
    HELDOUT[1]: ("held-out, after correction", "D", "merged", True),
}
MARKS = {"pass": ("o", "good", "✓"), "fail": ("X", "bad", "✗"), "inconclusive": ("D", "unsure", "?")}
Row = tuple[str, Mapping[str, float]]  # a layer's name, and its errors by field, those that are known and finite


def error_parts(data: ReportData) -> tuple[Panel, ...]:
    """Dots of each layer's errors; none where no error is known."""
    rows: list[Row] = []
    for layer, name in named(data.layers):
        found = {field: getattr(layer, field) for field in ERRORS}
        if known := {field: value for field, value in found.items() if value is not None and math.isfinite(value)}:
            rows.append((name, known))
    if not rows:
        return ()
    row = min(max(TALLEST / len(rows), LEAST_ROW), MOST_ROW)
    kinds = len({field for _, values in rows for field in values})
    size = (WIDTH, LEGEND * kinds + row * len(rows) + BELOW + 0.05)
    return (Panel("Reconstruction error by layer", error_alt(rows), size, partial(_draw_errors, rows=rows, row=row)),)


def error_alt(rows: Sequence[Row]) -> str:
    """The least and the greatest error of each kind."""
    said = []
    for field, (label, *_) in ERRORS.items():
        if known := [(values[field], name) for name, values in rows if field in values]:
            (least, first), (most, last) = (choose(known, key=lambda each: each[0]) for choose in (min, max))
            said.append(f"Error {label}: from {short(least)} ({first}) to {short(most)} ({last}).")
    return " ".join(said)


def is_logarithmic(values: Sequence[float]) -> bool:
    """Whether a linear scale would hide the small ones."""
    return min(values) > 0 and max(values) > 10 * min(values)


def _draw_errors(sheet: Sheet, rows: Sequence[Row], row: float) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter, NullLocator

    left = 0.2 + 0.072 * max(len(brief_end(name)) for name, _ in rows)
    axes = sheet.axes(left, BELOW, WIDTH - left - 0.15, row * len(rows))
    values = [value for _, known in rows for value in known.values()]
    if is_logarithmic(values):
        axes.set_xscale("log")
        axes.set_xlim(min(values) / 1.4, max(values) * 1.4)
        decades = math.log10(max(values) / min(values))
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if decades < 2.5 else (1.0,), numticks=7))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    else:
        axes.set_xlim(-0.03 * (max(values) or 1.0), 1.06 * (max(values) or 1.0))
        axes.locator_params(axis="x", nbins=5)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    step = 1 if row >= LEAST_ROW else 2
    axes.set_yticks(range(0, len(rows), step), labels=[readable(brief_end(name)) for name, _ in rows][::step])
    axes.grid(axis="x", color=colour("rule"), linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines["left"].set_visible(False)
    axes.set_xlabel("‖y' - y‖² / ‖y‖²" + (", logarithmic" if is_logarithmic(values) else ""), labelpad=2)
    _draw_dots(axes, rows)
    _draw_key(sheet, rows, left, BELOW + row * len(rows))


def _draw_dots(axes: "Axes", rows: Sequence[Row]) -> None:
    for place, (_, values) in enumerate(rows):
        if all(field in values for field in HELDOUT):
            both = [values[field] for field in HELDOUT]
            axes.plot(both, [place, place], color=colour("muted"), linewidth=0.8, zorder=1)
    for field, (_, marker, role, is_filled) in ERRORS.items():
        if known := [(values[field], place) for place, (_, values) in enumerate(rows) if field in values]:
            axes.plot(*zip(*known, strict=True), marker=marker, **_face(role, is_filled))


def _face(role: str, is_filled: bool) -> dict[str, Any]:
    colours = {"markerfacecolor": colour(role if is_filled else "paper"), "markeredgecolor": colour(role)}
    return {**colours, "linestyle": "none", "markersize": 4.6, "markeredgewidth": 1.1}


def _draw_key(sheet: Sheet, rows: Sequence[Row], x: float, y: float) -> None:
    for field, (label, marker, role, is_filled) in reversed(ERRORS.items()):
        if not any(field in values for _, values in rows):
            continue
        axes = sheet.axes(x, y + 0.08, 0.16, 0.16)
        axes.set_axis_off()
        axes.plot([0], [0], marker=marker, clip_on=False, **_face(role, is_filled))
        sheet.text(x + 0.22, y + 0.16, label, va="center_baseline")
        y += LEGEND * 0.75


def gate_parts(data: ReportData) -> tuple[Panel, ...]:
    """A line for each task from the drop's lower to its upper bound, over the drop allowed; none without a gate."""
    if data.gate is None or not data.gate.tasks:
        return ()
    size = (WIDTH, TASK_ROW * len(data.gate.tasks) + BELOW + 0.3)
    return (Panel("Drops and the drop allowed", gate_alt(data.gate), size, partial(_draw_gate, gate=data.gate)),)


def gate_alt(gate: GateResult) -> str:
    """Each task's drop, bounds and verdict."""
    said = [
        f"{task.task}: drop {change(task.drop, task.kind)}, at least {change(task.lower, task.kind)}, at most "
        f"{change(task.upper, task.kind)}, {task.verdict}"
        for task in gate.tasks
    ]
    return f"{verdict_line(gate)} {'; '.join(said)}."


def placed(value: float) -> float:
    """Where a drop is drawn; those out of all proportion, and no numbers, at the edge."""
    return FARTHEST if math.isnan(value) else min(max(value, -FARTHEST), FARTHEST)


def _draw_gate(sheet: Sheet, gate: GateResult) -> None:
    height = TASK_ROW * len(gate.tasks)
    axes = sheet.axes(0.1, BELOW, WIDTH - 0.2, height)
    limit = placed(gate.max_drop)
    ends = [0.0, limit, *(placed(value) for task in gate.tasks for value in (task.lower, task.upper, task.drop))]
    room = 0.06 * ((max(ends) - min(ends)) or 1.0)
    axes.set(xlim=(min(ends) - room, max(ends) + room), ylim=(len(gate.tasks) - 0.45, -0.55), yticks=[])
    axes.spines["left"].set_visible(False)
    axes.axvspan(limit, max(ends) + room, facecolor=colour("faint"), edgecolor="none", zorder=0)
    tops = [place - 0.1 for place in range(len(gate.tasks))]  # names of tasks stand between
    ends_below = [top + 0.55 for top in tops]
    axes.vlines([0.0] * len(tops), tops, ends_below, color=colour("muted"), linewidth=0.7)
    axes.vlines([limit] * len(tops), tops, ends_below, color=colour("ink"), linewidth=1.1, linestyles=(0, (3, 1.5)))
    for place, task in enumerate(gate.tasks):
        _draw_task(axes, task, place)
    rises = "; of a perplexity its rise" if any(task.kind == "likelihood" for task in gate.tasks) else ""
    axes.set_xlabel("drop, worse to the right" + rises, labelpad=2)
    allowed = f"dashed: the drop allowed, {margin(gate)}"
    axes.set_title(allowed, fontsize=FONT, loc="right", color=colour("muted"), pad=4)


def _draw_task(axes: "Axes", task: TaskGate, place: int) -> None:
    marker, role, sign = MARKS[task.verdict]
    axes.plot([placed(task.lower), placed(task.upper)], [place + 0.18] * 2, color=colour(role), linewidth=1.8,
              solid_capstyle="butt", marker="|", markersize=7, markeredgewidth=1.4)  # fmt: skip
    face = {**_face(role, task.verdict != "inconclusive"), "markersize": 8 if marker == "X" else 6}
    axes.plot([placed(task.drop)], [place + 0.18], marker=marker, **face)
    name = readable(f"{sign} {brief(task.task)}: {task.verdict}")
    axes.text(0.0, place - 0.14, name, transform=axes.get_yaxis_transform(), va="bottom", clip_on=False)
