"""Heat maps: one on axes of its own, or panels side by side and below each other on shared colour scales."""

import math
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from compressor.document.palette import FONT, HEAT, log_limits, ticks
from compressor.document.picture import Drawing
from compressor.formatting import readable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import FigureBase

LETTER, LINE = 0.068, 0.13  # inches of a letter and of a line
WIDTH, LEAST_WIDTH = 4.8, 2.6  # inches of a panel
LEAST_CELL, MOST_CELL = 0.1, 0.5  # inches
HEIGHT, LEAST_ROW, MOST_ROW = 5.6, 0.09, 0.24
LEAST_BODY = 2.6  # inches of height that a colour bar needs
BESIDE = 0.75  # inches above and below a panel
BAR = 1.05  # inches of a colour bar with its label


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
    width = max(LEAST_WIDTH, len(numbers) * min(max(WIDTH / len(numbers), LEAST_CELL), MOST_CELL))
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
            extend = (
                "min" if scale.has_smaller else "neither"
            )  # in a point, where smaller numbers share the first colour
            bar = part.colorbar(ScalarMappable(**norm), cax=axes, extend=extend)
            marks = ticks(scale.low, scale.high)
            bar.set_ticks(marks, labels=[f"{mark:.2g}" for mark in marks])
            bar.minorticks_off()
            bar.set_label(scale.label, fontsize=FONT - 1)

    return Drawing(title, alt, (sum(ratios), max(LEAST_BODY, *heights)), draw)
