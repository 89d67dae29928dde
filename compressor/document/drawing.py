"""What all drawings share: colours, type, scales of axes, keys, and marks: bars, dots with intervals and heat maps."""

import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from compressor.document.picture import FONT, Drawing
from compressor.formatting import readable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import FigureBase

HEAT = "viridis"  # grows lighter for colour-blind readers and in grey, too
COLOURS = (  # "muted", Paul Tol's qualitative scheme that stays apart for colour-blind readers
    "#332288",
    "#CC6677",
    "#117733",
    "#88CCEE",
    "#DDCC77",
    "#882255",
    "#44AA99",
    "#AA4499",
    "#999933",
)
MARKERS = "osD^vPX<>"  # filled in the first round, hollow in the second
ROLES: Mapping[str, str] = {  # on white; in dark mode the page turns whole pictures
    "ink": "#000000",
    "paper": "#ffffff",
    "muted": "#57606b",
    "rule": "#d3d9df",
    "faint": "#e3e8ee",
    "before": "#5f6b78",
    "after": "#0b66b0",
    "kept": "#7b8b9c",
    "merged": "#6a3d9a",
    "dropped": "#b5480b",
    "good": "#1b6e3a",
    "bad": "#b3261e",
    "unsure": "#7a5600",
}


TINIEST = 1e-30  # less counts as nothing
DECADES = 6  # of a scale at the most
MOST_LABELS = 60  # of rows, that do not touch
LEAST_GAP = 0.045  # of an axis between two numbers on it
LETTER, LINE = 0.068, 0.13  # inches of a letter and of a line
PANEL, LEAST_PANEL = 4.8, 2.6  # inches of a heat map among several
LEAST_CELL, MOST_CELL = 0.1, 0.5  # inches
HEIGHT, LEAST_ROW, MOST_ROW = 5.6, 0.09, 0.24
LEAST_BODY = 2.6  # inches of height that a colour bar needs
BESIDE = 0.75  # inches above and below a panel
BAR = 1.05  # inches of a colour bar with its label


def ink_on(background: str) -> str:
    """Black or white, whichever is seen on a colour."""
    from matplotlib.colors import to_rgb

    red, green, blue = to_rgb(background)
    return "#ffffff" if 0.299 * red + 0.587 * green + 0.114 * blue < 0.5 else "#000000"


def log_limits(values: Iterable[float | None], decades: int = DECADES) -> tuple[float, float] | None:
    """The least and the greatest size above 0, over so many decades at the most; None if there is none."""
    sizes = [abs(value) for value in values if value is not None and math.isfinite(value) and abs(value) >= TINIEST]
    return (max(min(sizes), max(sizes) / 10.0**decades), max(sizes)) if sizes else None


def ticks(low: float, high: float, most: int = 8) -> list[float]:
    """Round numbers from `low` to `high`: powers of ten, with 2 and 5 of each within two decades; the ends if none."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    steps = (1, 2, 5) if high <= 100 * low else (1,)
    marks = [float(f"{step}e{decade}") for decade in range(first, last + 1) for step in steps]
    marks = [mark for mark in marks if low <= mark <= high]
    return marks[:: math.ceil(len(marks) / most)] if len(marks) > 1 else [low, high]


def scale_axis(axes: "Axes", which: Literal["x", "y"], values: Sequence[float], decades: int = DECADES) -> str:
    """Scale an axis for these values; returns what its label should say of that, '' for a linear one.

    It is logarithmic where they span more than a factor of ten, and linear around 0 where some are 0 or below.
    """
    finite = [value for value in values if math.isfinite(value)] or [0.0]
    least, most, limits = min(finite), max(finite), log_limits(finite, decades)
    if limits is None or limits[1] <= 10 * limits[0]:
        room = 0.06 * ((max(most, 0.0) - min(least, 0.0)) or 1.0)
        axes.set(**{f"{which}lim": (min(least, 0.0) - room * (least < 0) - room / 4, max(most, 0.0) + room)})
        return ""
    low, high = limits
    if least >= low:
        axes.set(**{f"{which}scale": "log", f"{which}lim": (low / 1.3, high * 1.3)})
        marks, words = ticks(low, high), "logarithmic"
    else:
        below = float(f"1e{math.floor(math.log10(low))}")
        getattr(axes, f"set_{which}scale")("symlog", linthresh=below, linscale=0.5)
        negative = -least if least < -below else 0.0
        axes.set(**{f"{which}lim": (-1.3 * negative - below / 3, high * 1.3)})
        marks = [0.0, *ticks(below, high)]
        marks = [-mark for mark in (ticks(below, negative) if negative > below else []) if mark <= negative] + marks
        words = f"logarithmic, linear below {below:g}"
    getattr(axes, f"set_{which}ticks")(sorted(marks), labels=[f"{mark:.3g}" for mark in sorted(marks)])
    getattr(axes, f"set_{which}ticks")([], minor=True)
    return words


def draw_key(canvas: "FigureBase", looks: Sequence[tuple[str, Mapping[str, Any]]], **style: Any) -> None:
    """A legend: each label with its look, of a line if that has a marker, of a patch otherwise."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: Any = [Line2D([], [], **look) if "marker" in look else Patch(**look) for _, look in looks]
    style = {"loc": "center left", "handlelength": 1.2, "columnspacing": 1.2, **style}
    canvas.legend(handles, [label for label, _ in looks], **style)


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
) -> None:
    """Rows from above, on a logarithmic axis where values differ much; `label` names it.

    With a `limit` the axis is linear, and everything beyond that dashed line is shaded. What is not finite is left out.
    """
    values = [value for kind in kinds for value in kind.values if value is not None]
    values += [end for kind in kinds for bound in kind.bounds if bound for end in bound]
    finite = [value for value in values if math.isfinite(value)] or [0.0]
    if limit is None:
        scale = scale_axis(axes, "x", finite)
        label = f"{label}, {scale}" if scale else label
    else:
        low, high = min(0.0, limit, *finite), max(0.0, limit, *finite)
        room = 0.06 * ((high - low) or 1.0)
        axes.set_xlim(low - room, high + room)
        axes.axvspan(limit, high + room, facecolor=ROLES["faint"], edgecolor="none", zorder=0)
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
    axes.set_xlabel(label)


def colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def spaced(places: Sequence[float]) -> list[float]:
    """Places whose numbers do not touch on an axis: the smallest, the greatest and what fits between."""
    ordered = sorted(set(places))
    gap = LEAST_GAP * (ordered[-1] - ordered[0])
    kept = ordered[:1]
    for place in ordered[1:-1]:
        if place - kept[-1] >= gap and ordered[-1] - place >= gap:
            kept.append(place)
    return kept if len(ordered) == 1 else [*kept, ordered[-1]]


@dataclass(frozen=True, slots=True)
class Panel:
    """One heat map of a figure with several."""

    title: str
    rows: tuple[str, ...]
    values: tuple[tuple[float | None, ...], ...]  # [rows, columns]; None leaves its cell blank
    scale: int = 0  # number of its colour scale


@dataclass(frozen=True, slots=True)
class Scale:
    """A logarithmic colour scale: the numbers of its first and last colour, and whether there are smaller ones."""

    label: str
    low: float
    high: float
    has_smaller: bool = False
    colours: str = HEAT


def log_scale(label: str, values: Iterable[float | None], colours: str = HEAT) -> Scale:
    """A scale for these numbers, over six decades at the most; from 0.1 to 1 if none is above 0."""
    finite = [value for value in values if value is not None and math.isfinite(value)]
    limits = log_limits(value for value in finite if value > 0)
    if limits is None:
        return Scale(label, 0.1, 1.0, bool(finite), colours)
    low, high = limits if limits[0] < limits[1] else (limits[1] / 10, limits[1])
    return Scale(label, low, high, min(finite) < low, colours)


def draw_heat(
    axes: "Axes", values: Sequence[Sequence[float | None]], low: float | None, high: float | None, **style: Any
) -> Any:
    """The matrix as coloured squares from `low` to `high`, its first row above; what is not finite stays blank."""
    import numpy as np

    matrix = np.array([[math.nan if value is None else value for value in row] for row in values], dtype=float)
    shown = np.ma.masked_invalid(np.where(np.isfinite(matrix), matrix, np.nan))
    style = {"cmap": HEAT, "interpolation": "none", "aspect": "auto", **style}
    return axes.imshow(shown, vmin=low, vmax=high, **style)


def label_axes(axes: "Axes", rows: Sequence[str], columns: Sequence[str], width: float, height: float) -> None:
    """Numbers of columns and names of rows, as many as have room in so many inches."""
    step = math.ceil((max(map(len, columns)) + 1) * LETTER * len(columns) / width)
    axes.set_xticks(range(0, len(columns), step), labels=columns[::step])
    step = math.ceil(LINE * len(rows) / height)
    axes.set_yticks(range(0, len(rows), step), labels=[readable(row) for row in rows[::step]])
    axes.tick_params(length=2, pad=1.5)
    axes.spines[:].set(visible=True, color="#999999")


def draw_panels(
    title: str,
    alt: str,
    columns: Sequence[Sequence[Panel]],
    numbers: Sequence[str],
    scales: Sequence[Scale],
    label: str,
    roomy: bool = False,
) -> Drawing:
    """Columns of panels over the same `numbers`, which `label` names, and a colour bar for each scale on the right.

    `roomy` gives each row's name a line. Without any panel the drawing says so.
    """
    columns = [column for column in columns if column]
    if not columns:
        return Drawing(
            title, "Nothing to show.", (5.0, 1.2), lambda figure: figure.text(0.03, 0.5, "nothing to show", va="center")
        )
    width = max(LEAST_PANEL, len(numbers) * min(max(PANEL / len(numbers), LEAST_CELL), MOST_CELL))
    names = [max(len(name) for panel in column for name in panel.rows) for column in columns]
    ratios = [*(0.4 + width + LETTER * longest for longest in names), *[BAR] * len(scales)]
    tallest = max(len(panel.rows) for column in columns for panel in column)
    row = min(max(HEIGHT / tallest, 1.2 * LINE if roomy else LEAST_ROW), MOST_ROW)
    heights = [sum(BESIDE + row * len(panel.rows) for panel in column) for column in columns]

    def draw(figure: "FigureBase") -> None:
        from matplotlib.cm import ScalarMappable
        from matplotlib.colors import LogNorm

        parts = figure.subfigures(1, len(ratios), squeeze=False, width_ratios=ratios)[0]
        norms: list[Any] = [{"norm": LogNorm(scale.low, scale.high), "cmap": scale.colours} for scale in scales]
        for part, column in zip(parts, columns, strict=False):
            inner = [len(panel.rows) * row for panel in column]
            grid = part.subplots(len(column), 1, squeeze=False, gridspec_kw={"height_ratios": inner})[:, 0]
            for axes, panel, height in zip(grid, column, inner, strict=True):
                low = scales[panel.scale].low
                values = [[None if value is None else max(value, low) for value in line] for line in panel.values]
                draw_heat(axes, values, None, None, **norms[panel.scale])
                label_axes(axes, panel.rows, numbers, width, height)
                lines = textwrap.wrap(readable(panel.title), max(12, int(width / 0.075)))
                axes.set_title("\n".join(lines), loc="left", fontsize=FONT)
                axes.set_xlabel(label, fontsize=FONT - 1)
        for part, scale, norm in zip(parts[len(columns) :], scales, norms, strict=True):
            axes = part.add_axes((0.1, 0.12, 0.15, 0.76))
            extend = "min" if scale.has_smaller else "neither"  # a point: smaller numbers share the first colour
            bar = part.colorbar(ScalarMappable(**norm), cax=axes, extend=extend)
            marks = ticks(scale.low, scale.high)
            bar.set_ticks(marks, labels=[f"{mark:.2g}" for mark in marks])
            bar.minorticks_off()
            bar.set_label(scale.label, fontsize=FONT - 1)

    return Drawing(title, alt, (sum(ratios), max(LEAST_BODY, *heights)), draw)
