"""Marks on axes: bars by role, and dots with intervals."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from compressor.document.palette import COLOURS, ROLES, scale_axis
from compressor.formatting import readable

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_LABELS = 60  # of rows, that do not touch
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


def colour(number: int) -> str:
    """Colour of the n-th thing."""
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
