"""Lines over few places, and clouds of points: each with a colour, a marker and a line style of its own."""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from compressor.drawing.palette import COLOURS, MARKERS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import FigureBase

LABEL_LENGTH = 44  # letters of a legend line before it is broken
LEAST_GAP = 0.045  # of an axis between two numbers on it


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
