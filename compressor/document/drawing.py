"""Parts of all drawings: colours, type, scales of axes, keys, and marks: bars, dots with intervals and heat maps."""

import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
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
    """Return black or white, whichever is seen on a colour."""
    from matplotlib.colors import to_rgb

    red, green, blue = to_rgb(background)
    luma = 0.299 * red + 0.587 * green + 0.114 * blue
    return "#ffffff" if luma < 0.5 else "#000000"


def log_limits(values: Iterable[float], decades: int = DECADES) -> tuple[float, float] | None:
    """Return the least and the greatest size above 0, over so many decades at the most; None if there is none."""
    sizes = [abs(value) for value in values if abs(value) >= TINIEST]
    if not sizes:
        return None
    greatest = max(sizes)
    return max(min(sizes), greatest / 10.0**decades), greatest


def ticks(low: float, high: float, most: int = 8) -> list[float]:
    """Return round numbers from `low` to `high`: powers of ten, with 2 and 5 of each within two decades; or ends."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = (1, 2, 5) if high <= 100 * low else (1,)
    round_numbers = [float(f"{step}e{decade}") for decade in decades for step in steps]
    marks = [mark for mark in round_numbers if low <= mark <= high]
    return marks[:: math.ceil(len(marks) / most)] if len(marks) > 1 else [low, high]


def scale_axis(axes: "Axes", which: Literal["x", "y"], values: Sequence[float], decades: int = DECADES) -> str:
    """Scale an axis for these values; returns the words for its label, '' for a linear one.

    It is logarithmic where they span more than a factor of ten, and linear around 0 where some are 0 or below.
    """
    finite = [value for value in values if math.isfinite(value)] or [0.0]
    least, most = min(finite), max(finite)
    limits = log_limits(finite, decades)
    if limits is None or limits[1] <= 10 * limits[0]:
        bottom, top = min(least, 0.0), max(most, 0.0)
        room = 0.06 * ((top - bottom) or 1.0)
        below = 1.25 * room if least < 0 else room / 4
        axes.set(**{f"{which}lim": (bottom - below, top + room)})
        return ""
    low, high = limits
    if least >= low:
        axes.set(**{f"{which}scale": "log", f"{which}lim": (low / 1.3, high * 1.3)})
        marks = ticks(low, high)
        words = "logarithmic"
    else:
        below = float(f"1e{math.floor(math.log10(low))}")
        getattr(axes, f"set_{which}scale")("symlog", linthresh=below, linscale=0.5)
        negative = -least if least < -below else 0.0
        axes.set(**{f"{which}lim": (-1.3 * negative - below / 3, high * 1.3)})
        mirrored = ticks(below, negative) if negative > below else []
        marks = sorted([*(-mark for mark in mirrored if mark <= negative), 0.0, *ticks(below, high)])
        words = f"logarithmic, linear below {below:g}"
    set_ticks = getattr(axes, f"set_{which}ticks")
    set_ticks(marks, labels=[f"{mark:.3g}" for mark in marks])
    set_ticks([], minor=True)
    return words


def draw_key(canvas: "FigureBase", looks: Sequence[tuple[str, Mapping[str, Any]]], **style: Any) -> None:
    """Draw a legend: each label with its look, of a line if that has a marker, of a patch otherwise."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: Any = [Line2D([], [], **look) if "marker" in look else Patch(**look) for _, look in looks]
    style = {"loc": "center left", "handlelength": 1.2, "columnspacing": 1.2, **style}
    canvas.legend(handles, [label for label, _ in looks], **style)


def draw_bars(axes: "Axes", values: Sequence[float], roles: Sequence[str], even: float | None = None) -> None:
    """Draw a bar for each value in its role's colour; dropped ones are hollow, and `even` is a dashed line.

    One path for all bars of a role keeps a page small.
    """
    edges = [bar + side for bar in range(len(values)) for side in (-0.4, 0.4)]
    for role in dict.fromkeys(roles):
        heights = list[float]()
        for value, other in zip(values, roles, strict=True):
            heights += [value if other == role else math.nan, math.nan]
        hollow = role == "dropped"
        axes.stairs(heights[:-1], edges, color=ROLES[role], fill=not hollow, linewidth=0.7 if hollow else 0, label=role)
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
    """Draw rows from above, on a logarithmic axis where values differ much; `label` names it.

    With a `limit` the axis is linear, and everything beyond that dashed line is shaded. What is not finite is left out.
    """
    values = list[float]()
    for kind in kinds:
        values += [value for value in kind.values if value is not None]
        values += chain.from_iterable(bound for bound in kind.bounds if bound is not None)
    if limit is None:
        scale = scale_axis(axes, "x", values)
        label = f"{label}, {scale}" if scale else label
    else:
        finite = [value for value in values if math.isfinite(value)]
        low, high = min(0.0, limit, *finite), max(0.0, limit, *finite)
        room = 0.06 * ((high - low) or 1.0)
        axes.set_xlim(low - room, high + room)
        axes.axvspan(limit, high + room, facecolor=ROLES["faint"], edgecolor="none", zorder=0)
        axes.axvline(limit, color=ROLES["ink"], linewidth=1.1, linestyle=(0, (3, 1.5)))
        axes.axvline(0.0, color=ROLES["muted"], linewidth=0.7)
    ends: dict[str, Any] = {"marker": "|", "markersize": 7, "solid_capstyle": "butt", "linewidth": 1.6, "zorder": 1.5}
    for kind in kinds:
        shade = ROLES[kind.role]
        for row, bound in enumerate(kind.bounds):
            if bound is not None:
                axes.plot(bound, [row, row], color=shade, **ends)
        dots = [(value, row) for row, value in enumerate(kind.values) if value is not None]
        if dots:
            axes.plot(
                *zip(*dots, strict=True),
                label=kind.label,
                linestyle="none",
                marker=kind.marker,
                markersize=7.0 if kind.marker == "X" else 5.0,
                markerfacecolor=shade if kind.is_filled else ROLES["paper"],
                markeredgecolor=shade,
                markeredgewidth=1.1,
            )
    axes.set_ylim(len(rows) - 0.5, -0.5)
    step = math.ceil(len(rows) / MOST_LABELS)
    axes.set_yticks(range(0, len(rows), step), labels=[readable(row) for row in rows[::step]])
    axes.grid(axis="x")
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel(label)


def colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def spaced(places: Iterable[float]) -> list[float]:
    """Return places whose numbers do not touch on an axis: the smallest, the greatest and what fits between."""
    first, *others = sorted(set(places))
    if not others:
        return [first]
    last = others.pop()
    gap = LEAST_GAP * (last - first)
    chosen = [first]
    for position in others:
        if position - chosen[-1] >= gap and last - position >= gap:
            chosen.append(position)
    return [*chosen, last]


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
    """Return a scale for these numbers, over six decades at the most; from 0.1 to 1 if none is above 0."""
    finite = [value for value in values if value is not None and math.isfinite(value)]
    limits = log_limits(value for value in finite if value > 0)
    if limits is None:
        return Scale(label, 0.1, 1.0, bool(finite), colours)
    low, high = limits
    low = low if low < high else high / 10
    return Scale(label, low, high, min(finite) < low, colours)


def draw_heat(axes: "Axes", values: Any, low: float | None, high: float | None, **style: Any) -> Any:
    """Draw the matrix as coloured squares from `low` to `high`, its first row above; what is not finite stays blank."""
    import numpy as np

    shown = np.ma.masked_invalid(np.array(values, dtype=float))
    style = {"cmap": HEAT, "interpolation": "none", "aspect": "auto", **style}
    return axes.imshow(shown, vmin=low, vmax=high, **style)


def label_axes(axes: "Axes", rows: Sequence[str], columns: Sequence[str], width: float, height: float) -> None:
    """Label columns and rows, as many as there are inches for."""
    longest = max(map(len, columns)) + 1
    step = math.ceil(longest * LETTER * len(columns) / width)
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
    """Return columns of panels over the same `numbers`, which `label` names, and a colour bar for each scale.

    `roomy` gives each row's name a line. Without any panel the drawing says so.
    """
    columns = [column for column in columns if column]
    if not columns:
        return Drawing(title, "Nothing to show.", (5.0, 1.2), _write_nothing)
    width = max(LEAST_PANEL, len(numbers) * min(max(PANEL / len(numbers), LEAST_CELL), MOST_CELL))
    ratios = list[float]()
    for column in columns:
        longest = max(len(name) for panel in column for name in panel.rows)
        ratios.append(0.4 + width + LETTER * longest)
    ratios += [BAR] * len(scales)
    tallest = max(len(panel.rows) for column in columns for panel in column)
    row = min(max(HEIGHT / tallest, 1.2 * LINE if roomy else LEAST_ROW), MOST_ROW)

    def draw(figure: "FigureBase") -> None:
        import numpy as np
        from matplotlib.cm import ScalarMappable
        from matplotlib.colors import LogNorm

        parts = figure.subfigures(1, len(ratios), squeeze=False, width_ratios=ratios)[0]
        norms: list[Any] = [{"norm": LogNorm(scale.low, scale.high), "cmap": scale.colours} for scale in scales]
        for part, column in zip(parts, columns, strict=False):
            inner = [len(panel.rows) * row for panel in column]
            grid = part.subplots(len(column), 1, squeeze=False, gridspec_kw={"height_ratios": inner})[:, 0]
            for axes, panel, height in zip(grid, column, inner, strict=True):
                # smaller numbers share the first colour, and blank cells stay NaN
                values = np.maximum(np.array(panel.values, dtype=float), scales[panel.scale].low)
                draw_heat(axes, values, None, None, **norms[panel.scale])
                label_axes(axes, panel.rows, numbers, width, height)
                lines = textwrap.wrap(readable(panel.title), max(12, int(width / 0.075)))
                axes.set_title("\n".join(lines), loc="left", fontsize=FONT)
                axes.set_xlabel(label, fontsize=FONT - 1)
        for part, scale, norm in zip(parts[len(columns) :], scales, norms, strict=True):
            axes = part.add_axes((0.1, 0.12, 0.15, 0.76))
            extend = "min" if scale.has_smaller else "neither"
            bar = part.colorbar(ScalarMappable(**norm), cax=axes, extend=extend)
            marks = ticks(scale.low, scale.high)
            bar.set_ticks(marks, labels=[f"{mark:.2g}" for mark in marks])
            bar.minorticks_off()
            bar.set_label(scale.label, fontsize=FONT - 1)

    height = LEAST_BODY
    for column in columns:
        height = max(height, sum(BESIDE + row * len(panel.rows) for panel in column))
    return Drawing(title, alt, (sum(ratios), height), draw)


def _write_nothing(figure: "FigureBase") -> None:
    figure.text(0.03, 0.5, "nothing to show", va="center")
