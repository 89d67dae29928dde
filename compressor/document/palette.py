"""Colours, sizes of type, scales of axes and keys: what all drawings share."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import FigureBase

DPI = 150
FONT = 8.0  # points
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


def ink_on(background: str) -> str:
    """Black or white, whichever is seen on a colour."""
    from matplotlib.colors import to_rgb

    red, green, blue = to_rgb(background)
    return "#ffffff" if 0.299 * red + 0.587 * green + 0.114 * blue < 0.5 else "#000000"


TINIEST = 1e-30  # less counts as nothing
DECADES = 6  # of a scale at the most


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
