"""Axes on which small and large values can be told apart: linear, logarithmic, or logarithmic but for the middle."""

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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
    found = [float(f"{step}e{decade}") for decade in range(first, last + 1) for step in steps]
    found = [value for value in found if low * (1 - 1e-9) <= value <= high * (1 + 1e-9)]
    return found[:: math.ceil(len(found) / most)] if len(found) > 1 else [low, high]


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
        marks, said = ticks(low, high), "logarithmic"
    else:
        below = 10.0 ** math.floor(math.log10(low))
        getattr(axes, f"set_{which}scale")("symlog", linthresh=below, linscale=0.5)
        negative = -least if least < -below else 0.0
        axes.set(**{f"{which}lim": (-1.3 * negative - below / 3, high * 1.3)})
        marks = [0.0, *ticks(below, high)]
        marks = [-mark for mark in (ticks(below, negative) if negative > below else []) if mark <= negative] + marks
        said = f"logarithmic, linear below {below:g}"
    getattr(axes, f"set_{which}ticks")(sorted(marks), labels=[f"{mark:.3g}" for mark in sorted(marks)])
    getattr(axes, f"set_{which}ticks")([], minor=True)
    return said
