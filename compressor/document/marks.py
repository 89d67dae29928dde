"""Marks on axes: bars, grids of coloured cells, dots with intervals, and lines with a colour, marker and style each."""

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from compressor.document.palette import COLOURS, FONT, MARKERS, ROLES, ink_on, scale_axis
from compressor.formatting import readable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import FigureBase

LEAST_LABELLED = 0.06  # share of the whole that has room for its number
MARKS = "osD^vP<>"  # one fewer than colours, so that a row's first 72 groups differ in one or the other
GAP = 0.04  # between cells, in parts of one
MOST_LABELS = 60  # of rows, that do not touch
LABEL_LENGTH = 44  # letters of a legend line before it is broken
LEAST_GAP = 0.045  # of an axis between two numbers on it


def draw_bars(axes: "Axes", values: Sequence[float], roles: Sequence[str], even: float | None = None) -> None:
    """A bar for each value in its role's colour; dropped ones are hollow, and `even` is a dashed line.

    One path for all bars of a role keeps a page small.
    """
    edges = [place + side for place in range(len(values)) for side in (-0.4, 0.4)]
    for role in dict.fromkeys(roles):
        own = [value if each == role else math.nan for value, each in zip(values, roles, strict=True)]
        heights = [height for value in own for height in (value, math.nan)][:-1]
        hollow = role == "dropped"
        axes.stairs(heights, edges, color=ROLES[role], fill=not hollow, linewidth=0.7 if hollow else 0, label=role)
    if even is not None:
        style = (0, (3, 2))
        axes.hlines(even, -0.5, len(values) - 0.5, color=ROLES["muted"], linewidth=0.7, linestyles=style)
    axes.set_xticks(sorted({0, len(values) - 1}))
    axes.spines["left"].set_visible(False)


def draw_left(axes: "Axes", rows: Sequence[tuple[str, float, str]]) -> None:
    """For each row its name, the share of the whole that is left, 0 to 1, and that share in words."""
    axes.set(xlim=(0, 1.0), ylim=(len(rows) - 0.35, -0.6))
    axes.set_axis_off()
    for place, (name, part, words) in enumerate(rows):
        axes.barh(place + 0.12, 1.0, 0.34, facecolor=ROLES["faint"], edgecolor="none")
        axes.barh(place + 0.12, min(part, 1.0), 0.34, facecolor=ROLES["after"], edgecolor="none")
        axes.text(0, place - 0.16, name, fontweight="bold", va="bottom")
        axes.text(1, place - 0.16, words, ha="right", va="bottom")


def draw_parts(axes: "Axes", parts: Sequence[float], unit: str) -> None:
    """One lying bar of parts that add up to a whole, numbered from 1 where there is room."""
    total = math.fsum(parts)
    axes.set(xlim=(0, total), ylim=(0, 1), xticks=[0, total], yticks=[])
    axes.set_xticklabels(["0", f"{total:.1f} {unit}"])
    axes.spines[:].set_visible(False)
    first, last = axes.get_xticklabels()
    first.set_horizontalalignment("left")
    last.set_horizontalalignment("right")
    start = 0.0
    for number, part in enumerate(parts, 1):
        colour = ROLES["after" if number % 2 else "before"]
        axes.barh(0.5, part, 1.0, left=start, facecolor=colour, edgecolor="none")
        if part / total >= LEAST_LABELLED:
            place = start + part / 2
            axes.text(place, 0.5, str(number), color=ink_on(colour), ha="center", va="center", fontweight="bold")
        start += part


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell: what it is filled with, a marker of matplotlib's or a number in it, and whether it is framed."""

    colour: str
    mark: str = ""
    number: int | None = None
    is_framed: bool = False


def group_look(number: int) -> tuple[str, str]:
    """Colour and mark of the n-th group in a row."""
    return COLOURS[number % len(COLOURS)], MARKS[number % len(MARKS)]


def draw_cells(axes: "Axes", grid: Sequence[Sequence[Cell]], size: float, is_numbered: bool) -> None:
    """Rows of cells of `size` inches, the first above; numbers stand in the place of marks if `is_numbered`."""
    fills: dict[str, list[tuple[int, int]]] = {}
    marks: dict[tuple[str, str], list[tuple[int, int]]] = {}
    for row, line in enumerate(grid):
        for column, cell in enumerate(line):
            fills.setdefault(cell.colour, []).append((column, row))
            if is_numbered and cell.number is not None:
                style: dict[str, Any] = {"fontsize": min(FONT, 30 * size), "color": ink_on(cell.colour)}
                axes.text(column, row, str(cell.number), ha="center", va="center_baseline", **style)
            elif cell.mark:
                marks.setdefault((cell.mark, ink_on(cell.colour)), []).append((column, row))
    for colour, places in fills.items():
        _squares(axes, places, 0.5 - GAP, facecolor=colour, edgecolor="none")
    for (mark, colour), places in marks.items():
        xs, ys = zip(*places, strict=True)
        axes.scatter(xs, ys, s=(0.5 * size * 72) ** 2, marker=mark, color=colour, linewidths=max(0.4, 3 * size))
    framed = [(column, row) for row, line in enumerate(grid) for column, cell in enumerate(line) if cell.is_framed]
    width = max(0.6, 5 * size)
    _squares(axes, framed, 0.5 - width / 144 / size, fill=False, edgecolor=ROLES["ink"], linewidth=width)
    axes.set(xlim=(-0.5, max(map(len, grid)) - 0.5), ylim=(len(grid) - 0.5, -0.5))


def _squares(axes: "Axes", centres: Sequence[tuple[int, int]], half: float, **style: Any) -> None:
    """Squares round these places as one path, which keeps a page small."""
    import numpy as np
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    if centres:
        corners = half * np.array([(-1, -1), (1, -1), (1, 1), (-1, 1), (-1, -1)])
        points = (np.array(centres)[:, None] + corners).reshape(-1, 2)
        codes = [Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY] * len(centres)
        axes.add_artist(PathPatch(Path(points, codes), joinstyle="miter", **style))  # add_patch looks at every point


@dataclass(frozen=True, slots=True)
class Dots:
    """One figure of every row; None where a row has none. Bounds, where given, are ends of a line through the dot."""

    label: str
    values: Sequence[float | None]
    role: str
    marker: str = "o"
    is_filled: bool = True
    bounds: Sequence[tuple[float, float] | None] = ()


def draw_dots(
    axes: "Axes",
    rows: Sequence[str],
    kinds: Sequence[Dots],
    label: str,
    limit: float | None = None,
    scaled: bool = True,
) -> None:
    """Rows from above; `limit` is a dashed line with everything beyond it shaded; `scaled` may make logarithms.

    What is not finite is left out, and `label` names the axis.
    """
    values = [value for kind in kinds for value in kind.values if value is not None]
    values += [end for kind in kinds for bound in kind.bounds if bound for end in bound]
    finite = [value for value in values if math.isfinite(value)] or [0.0]
    scale = scale_axis(axes, "x", finite) if scaled else ""
    if not scaled:
        low, high = min(0.0, limit or 0.0, *finite), max(0.0, limit or 0.0, *finite)
        room = 0.06 * ((high - low) or 1.0)
        axes.set_xlim(low - room, high + room)
    if limit is not None:
        axes.axvspan(limit, axes.get_xlim()[1], facecolor=ROLES["faint"], edgecolor="none", zorder=0)
        axes.axvline(limit, color=ROLES["ink"], linewidth=1.1, linestyle=(0, (3, 1.5)))
        axes.axvline(0.0, color=ROLES["muted"], linewidth=0.7)
    for kind in kinds:
        colour = ROLES[kind.role]
        for place, bound in enumerate(kind.bounds):
            if bound is not None:
                ends: dict[str, Any] = {"marker": "|", "markersize": 7, "solid_capstyle": "butt"}
                axes.plot(bound, [place, place], color=colour, linewidth=1.6, zorder=1.5, **ends)
        if dots := [(value, place) for place, value in enumerate(kind.values) if value is not None]:
            axes.plot(
                *zip(*dots, strict=True),
                label=kind.label,
                linestyle="none",
                marker=kind.marker,
                markersize=7.0 if kind.marker == "X" else 5.0,
                markerfacecolor=colour if kind.is_filled else ROLES["paper"],
                markeredgecolor=colour,
                markeredgewidth=1.1,
            )
    axes.set_ylim(len(rows) - 0.5, -0.5)
    step = math.ceil(len(rows) / MOST_LABELS)
    axes.set_yticks(range(0, len(rows), step), labels=[readable(row) for row in rows][::step])
    axes.grid(axis="x")
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel(f"{label}, {scale}" if scale else label)


@dataclass(frozen=True, slots=True)
class Line:
    """Points of one line; `low` and `high`, where given, shade a band around it."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    colour: str
    style: Any = "solid"
    marker: str = ""
    is_hollow: bool = False
    low: Sequence[float] = ()
    high: Sequence[float] = ()


def mark(number: int) -> dict[str, Any]:
    """Marker of the n-th thing: one of nine, hollow in every second round."""
    return {"marker": MARKERS[number % len(MARKERS)], "is_hollow": number // len(MARKERS) % 2 == 1}


def colour(number: int) -> str:
    """Colour of the n-th thing."""
    return COLOURS[number % len(COLOURS)]


def draw_lines(axes: "Axes", lines: Sequence[Line], first_is_start: bool = True) -> list[Any]:
    """Draw them and return their handles for a legend; a start that all share gets no marker."""
    handles = []
    for line in lines:
        if line.low:
            axes.fill_between(line.x, line.low, line.high, color=line.colour, alpha=0.2, linewidth=0)
        (drawn,) = axes.plot(
            line.x,
            line.y,
            color=line.colour,
            linewidth=1.4,
            linestyle=line.style,
            marker=line.marker,
            markersize=6,
            markerfacecolor="white" if line.is_hollow else line.colour,
            markeredgecolor=line.colour if line.is_hollow else "white",
            markeredgewidth=1.2 if line.is_hollow else 0.5,
            markevery=slice(1 if first_is_start else 0, None),
        )
        handles.append(drawn)
    return handles


def legend_beside(figure: "FigureBase", handles: Sequence[Any], labels: Sequence[str]) -> None:
    """A legend right of the axes, in this order."""
    wrapped = [textwrap.fill(label, LABEL_LENGTH) for label in labels]
    legend = figure.legend(list(handles), wrapped, loc="outside right upper", handlelength=3.2)
    for text in legend.get_texts():
        text.set_parse_math(False)


def spaced(places: Sequence[float]) -> list[float]:
    """Places whose numbers do not touch on an axis: the smallest, the greatest and what fits between."""
    ordered = sorted(set(places))
    gap = LEAST_GAP * (ordered[-1] - ordered[0])
    kept = ordered[:1]
    for place in ordered[1:-1]:
        if place - kept[-1] >= gap and ordered[-1] - place >= gap:
            kept.append(place)
    return kept if len(ordered) == 1 else [*kept, ordered[-1]]
