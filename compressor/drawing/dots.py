"""Dots with intervals: a row for each thing, a kind of dot for each figure of it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from compressor.drawing.palette import ROLES, scale_axis
from compressor.words import readable

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_LABELS = 60  # of rows, that do not touch


@dataclass(frozen=True, slots=True)
class Dots:
    """One figure of every row; None where a row has none. Bounds, where given, are ends of a line through the dot."""

    label: str
    values: Sequence[float | None]
    role: str
    marker: str = "o"
    is_filled: bool = True
    bounds: Sequence[tuple[float, float] | None] = ()


def face(role: str, is_filled: bool = True, size: float = 5.0) -> dict[str, Any]:
    """How a marker looks: filled, or hollow in its role's colour."""
    colours = {"markerfacecolor": ROLES[role if is_filled else "paper"], "markeredgecolor": ROLES[role]}
    return {**colours, "linestyle": "none", "markersize": size, "markeredgewidth": 1.1}


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
    ends = [end for kind in kinds for bound in kind.bounds if bound for end in bound]
    values = [value for kind in kinds for value in kind.values if value is not None] + ends
    finite = [value for value in values if math.isfinite(value)] or [0.0]
    said = scale_axis(axes, "x", finite) if scaled else ""
    if not scaled:
        low, high = min(0.0, limit or 0.0, *finite), max(0.0, limit or 0.0, *finite)
        room = 0.06 * ((high - low) or 1.0)
        axes.set_xlim(low - room, high + room)
    if limit is not None:
        axes.axvspan(limit, axes.get_xlim()[1], facecolor=ROLES["faint"], edgecolor="none", zorder=0)
        axes.axvline(limit, color=ROLES["ink"], linewidth=1.1, linestyle=(0, (3, 1.5)))
        axes.axvline(0.0, color=ROLES["muted"], linewidth=0.7)
    for kind in kinds:
        for place, bound in enumerate(kind.bounds):
            if bound is not None:
                axes.plot(
                    bound,
                    [place, place],
                    color=ROLES[kind.role],
                    linewidth=1.6,
                    solid_capstyle="butt",
                    marker="|",
                    markersize=7,
                    zorder=1.5,
                )
        if found := [(value, place) for place, value in enumerate(kind.values) if value is not None]:
            size = 7.0 if kind.marker == "X" else 5.0
            axes.plot(
                *zip(*found, strict=True), marker=kind.marker, label=kind.label, **face(kind.role, kind.is_filled, size)
            )
    axes.set_ylim(len(rows) - 0.5, -0.5)
    step = math.ceil(len(rows) / MOST_LABELS)
    axes.set_yticks(range(0, len(rows), step), labels=[readable(row) for row in rows][::step])
    axes.grid(axis="x")
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel(f"{label}, {said}" if said else label)
