"""Bars: upright ones for a share of each thing, lying ones for what is left of a whole, and one cut into its parts."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from compressor.drawing.palette import ROLES, ink_on

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LEAST_LABELLED = 0.06  # share of the whole that has room for its number


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
    """For each row its name, the share of the whole that is left, 0 to 1, and what that is in words."""
    axes.set(xlim=(0, 1.0), ylim=(len(rows) - 0.35, -0.6))
    axes.set_axis_off()
    for place, (name, part, said) in enumerate(rows):
        axes.barh(place + 0.12, 1.0, 0.34, facecolor=ROLES["faint"], edgecolor="none")
        axes.barh(place + 0.12, min(part, 1.0), 0.34, facecolor=ROLES["after"], edgecolor="none")
        axes.text(0, place - 0.16, name, fontweight="bold", va="bottom")
        axes.text(1, place - 0.16, said, ha="right", va="bottom")


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
