"""Parts of all drawings: colours, type, scales of axes, keys, and marks: bars, dots with intervals
and heat maps."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

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
LETTER, LINE = 0.068, 0.13  # inches of a letter and of a line


def ink_on(background: str) -> str:
    """Return black or white, whichever is seen on a colour."""
    from matplotlib.colors import to_rgb

    red, green, blue = to_rgb(background)
    luma = 0.299 * red + 0.587 * green + 0.114 * blue
    return "#ffffff" if luma < 0.5 else "#000000"


def log_limits(values: Iterable[float], decades: int = DECADES) -> tuple[float, float] | None:
    """Return the least and the greatest size above 0, over so many decades at the most; None if
    there is none."""
    sizes = [abs(value) for value in values if abs(value) >= TINIEST]
    if not sizes:
        return None
    greatest = max(sizes)
    return max(min(sizes), greatest / 10.0**decades), greatest


def log_locator(low: float, high: float) -> Any:
    """Return where a logarithmic axis has numbers: at powers of ten, with 2 and 5 of each within
    two decades."""
    from matplotlib.ticker import LogLocator

    return LogLocator(subs=(1, 2, 5) if high <= 100 * low else (1,))


def scale_axis(
    axes: "Axes", which: Literal["x", "y"], values: Sequence[float], decades: int = DECADES
) -> str:
    """Scale an axis for these values; returns the words for its label, '' for a linear one.

    It is logarithmic where they span more than a factor of ten, and linear around 0 where some are
    0 or below."""
    finite = [value for value in values if math.isfinite(value)] or [0.0]
    least, most = min(finite), max(finite)
    limits = log_limits(finite, decades)
    if limits is None or limits[1] <= 10 * limits[0]:
        bottom, top = min(least, 0.0), max(most, 0.0)
        room = 0.06 * ((top - bottom) or 1.0)
        axes.set(**{f"{which}lim": (bottom - room, top + room)})
        return ""
    low, high = limits
    axis = getattr(axes, f"{which}axis")
    if least >= low:
        axes.set(**{f"{which}scale": "log", f"{which}lim": (low / 1.3, high * 1.3)})
        axis.set_major_locator(log_locator(low, high))
        words = "logarithmic"
    else:
        below = float(f"1e{math.floor(math.log10(low))}")
        getattr(axes, f"set_{which}scale")("symlog", linthresh=below, linscale=0.5)
        axes.set(**{f"{which}lim": (1.3 * min(least, -below / 4), high * 1.3)})
        axis.get_major_locator().set_params(numticks=6)
        words = f"logarithmic, linear below {below:g}"
    axis.set_major_formatter("{x:.3g}")
    axis.set_minor_formatter("")
    return words


def draw_key(
    canvas: "FigureBase", looks: Sequence[tuple[str, Mapping[str, Any]]], **style: Any
) -> None:
    """Draw a legend: each label with its look, of a line if that has a marker, of a patch
    otherwise."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: Any = [
        Line2D([], [], **look) if "marker" in look else Patch(**look) for _, look in looks
    ]
    style = {"loc": "center left", "handlelength": 1.2, "columnspacing": 1.2, **style}
    canvas.legend(handles, [label for label, _ in looks], **style)


def draw_bars(
    axes: "Axes", values: Sequence[float], roles: Sequence[str], even: float | None = None
) -> None:
    """Draw a bar for each value in its role's colour; dropped ones are hollow, and `even` is a
    dashed line.

    One path for all bars of a role keeps a page small.
    """
    edges = [bar + side for bar in range(len(values)) for side in (-0.4, 0.4)]
    for role in dict.fromkeys(roles):
        heights = []
        for value, other in zip(values, roles, strict=True):
            heights += [value if other == role else math.nan, math.nan]
        hollow = role == "dropped"
        axes.stairs(
            heights[:-1],
            edges,
            color=ROLES[role],
            fill=not hollow,
            linewidth=0.7 if hollow else 0,
            label=role,
        )
    if even is not None:
        style = (0, (3, 2))
        axes.hlines(
            even, -0.5, len(values) - 0.5, color=ROLES["muted"], linewidth=0.7, linestyles=style
        )
    axes.set_xticks(sorted({0, len(values) - 1}))
    axes.spines["left"].set_visible(False)


def colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def draw_heat(
    axes: "Axes", values: Any, low: float | None, high: float | None, **style: Any
) -> Any:
    """Draw the matrix as coloured squares from `low` to `high`, its first row above; what is not
    finite stays blank."""
    import numpy as np

    shown = np.ma.masked_invalid(np.array(values, dtype=float))
    style = {"cmap": HEAT, "interpolation": "none", "aspect": "auto", **style}
    return axes.imshow(shown, vmin=low, vmax=high, **style)


def label_axes(
    axes: "Axes", rows: Sequence[str], columns: Sequence[str], width: float, height: float
) -> None:
    """Label columns and rows, as many as there are inches for."""
    longest = max(map(len, columns)) + 1
    step = math.ceil(longest * LETTER * len(columns) / width)
    axes.set_xticks(range(0, len(columns), step), labels=columns[::step])
    step = math.ceil(LINE * len(rows) / height)
    axes.set_yticks(range(0, len(rows), step), labels=[readable(row) for row in rows[::step]])
    axes.tick_params(length=2, pad=1.5)
    axes.spines[:].set(visible=True, color="#999999")
