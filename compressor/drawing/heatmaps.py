"""Heatmaps side by side and below each other, at the size that their rows and columns need."""

import math
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from compressor.drawing.palette import DPI, axes_at

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap
    from matplotlib.figure import Figure

FONT, LETTER, LINE = 7, 0.068, 0.125  # points of a label; inches of a letter and of a line
WIDTH, LEAST_WIDTH = 4.8, 2.6  # inches of a panel
LEAST_CELL, MOST_CELL = 0.1, 0.5  # inches
HEIGHT, LEAST_ROW, MOST_ROW = 5.6, 0.09, 0.24
LEAST_BODY = 2.3  # inches of height that a colour bar's label needs
TITLE, GAP = 0.28, 0.42  # inches above a panel, and below it for the columns' numbers
MARGIN, BAR_SPACE, BAR = 0.3, 0.85, 0.13
DECADES = 6  # of a colour scale at the most
TINIEST = 1e-30  # less counts as nothing


@dataclass(frozen=True, slots=True)
class Panel:
    """One heatmap."""

    title: str
    rows: tuple[str, ...]
    values: tuple[tuple[float | None, ...], ...]  # [rows, columns]; None leaves its cell blank
    scale: int = 0  # number of its colour scale


@dataclass(frozen=True, slots=True)
class Scale:
    """A logarithmic colour scale: the numbers of its first and last colour, and whether there are smaller ones."""

    label: str
    colours: str  # a colour map's name
    low: float
    high: float
    has_smaller: bool


def log_scale(label: str, colours: str, values: Iterable[float | None]) -> Scale:
    """A scale for these numbers, over six decades at the most; from 0.1 to 1 if none is above 0."""
    finite = [value for value in values if value is not None and math.isfinite(value)]
    positive = [value for value in finite if value >= TINIEST]
    if not positive:
        return Scale(label, colours, 0.1, 1.0, bool(finite))
    high = max(positive)
    low = max(min(positive), high / 10**DECADES)
    low = low if low < high else high / 10
    return Scale(label, colours, low, high, min(finite) < low)


def ticks(low: float, high: float) -> list[float]:
    """Round numbers from `low` to `high`: powers of ten, with 2 and 5 of each if there are few; the ends if none."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    steps = (1, 2, 5) if last - first <= 2 else (1,)
    found = [float(f"{step}e{decade}") for decade in range(first, last + 1) for step in steps]
    found = [value for value in found if low <= value <= high]
    return found if len(found) > 1 else [low, high]


def heat_figure(
    title: str, columns: Sequence[Sequence[Panel]], numbers: Sequence[str], scales: Sequence[Scale], all_rows: bool
) -> "Figure":
    """The picture, not saved yet: columns of panels over the same `numbers`, colour bars on the right.

    Labels of rows are left out where they would touch, unless `all_rows` makes room for each.
    """
    from matplotlib.figure import Figure

    columns = [column for column in columns if column]
    panels = [panel for column in columns for panel in column]
    if not panels:
        return _empty(title)
    cell = min(max(WIDTH / len(numbers), LEAST_CELL), MOST_CELL)
    width = max(cell * len(numbers), LEAST_WIDTH)
    tallest = max(len(panel.rows) for panel in panels)
    row = min(max(HEIGHT / tallest, 1.2 * LINE if all_rows else LEAST_ROW), MOST_ROW)
    left = [0.35 + LETTER * max(len(name) for panel in column for name in panel.rows) for column in columns]
    body = max(LEAST_BODY, *(sum(_height(panel, row, width) for panel in column) for column in columns))
    across = sum(left) + len(columns) * (width + MARGIN) + BAR_SPACE * len(scales)
    heading = textwrap.wrap(title, max(20, int(across / 0.09)))
    up = 0.15 + 0.19 * len(heading) + body + 0.1
    figure = Figure(figsize=(across, up), dpi=DPI)
    figure.text(0.15 / across, 1 - 0.1 / up, "\n".join(heading), va="top", fontsize=10, parse_math=False)
    x = 0.0
    for column, labels in zip(columns, left, strict=True):
        y = 0.1 + body
        x += labels
        for panel in column:
            y -= _height(panel, row, width)
            axes = axes_at(figure, x, y + GAP, width, row * len(panel.rows))
            _draw(axes, panel, scales[panel.scale], numbers)
            _label(axes, panel, numbers, width, row)
        x += width + MARGIN
    for place, scale in enumerate(scales):
        bar = max(LEAST_BODY, min(body, 4.0)) - TITLE - GAP
        _draw_bar(axes_at(figure, x + BAR_SPACE * place, 0.1 + body - TITLE - bar, BAR, bar), scale)
    return figure


def _empty(title: str) -> "Figure":
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.0, 1.2), dpi=DPI)
    text = "\n".join([*textwrap.wrap(title, 60), "", "nothing to show"])
    figure.text(0.03, 0.9, text, va="top", fontsize=9, parse_math=False)
    return figure


def _title(panel: Panel, width: float) -> list[str]:
    return textwrap.wrap(panel.title, max(12, int(width / 0.082)))


def _height(panel: Panel, row: float, width: float) -> float:
    return TITLE + LINE * (len(_title(panel, width)) - 1) + row * len(panel.rows) + GAP


def _colours(scale: Scale) -> "Colormap":
    from matplotlib import colormaps

    return colormaps[scale.colours].with_extremes(bad="white")


def _draw(axes: "Axes", panel: Panel, scale: Scale, numbers: Sequence[str]) -> None:
    import numpy as np

    values = np.array([[math.nan if value is None else value for value in row] for row in panel.values])
    values[~np.isfinite(values)] = math.nan
    shown = np.ma.masked_invalid(np.log10(np.clip(values, scale.low, scale.high)))
    axes.imshow(
        shown, aspect="auto", interpolation="nearest", cmap=_colours(scale),
        vmin=math.log10(scale.low), vmax=math.log10(scale.high),
    )  # fmt: skip
    axes.spines[:].set_color("#999999")
    axes.set_ylim(len(panel.rows) - 0.5, -0.5)
    axes.set_xlim(-0.5, len(numbers) - 0.5)


def _label(axes: "Axes", panel: Panel, numbers: Sequence[str], width: float, row: float) -> None:
    letters = max(map(len, numbers))
    step = math.ceil((letters + 1) * LETTER / (width / len(numbers)))
    axes.set_xticks(range(0, len(numbers), step), labels=numbers[::step], fontsize=FONT)
    step = math.ceil(LINE / row)
    axes.set_yticks(range(0, len(panel.rows), step), labels=panel.rows[::step], fontsize=FONT, parse_math=False)
    axes.tick_params(length=2, pad=1.5)
    axes.set_xlabel("layer of the receiving router", fontsize=FONT, labelpad=1)
    axes.set_title("\n".join(_title(panel, width)), fontsize=8, loc="left", pad=3, parse_math=False)


def _draw_bar(axes: "Axes", scale: Scale) -> None:
    """A colour bar with round numbers; where smaller ones share the first colour it ends in a point."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    low, high = math.log10(scale.low), math.log10(scale.high)
    source = ScalarMappable(Normalize(low, high), _colours(scale))
    bar = axes.figure.colorbar(source, cax=axes, extend="min" if scale.has_smaller else "neither")
    marks = ticks(scale.low, scale.high)
    bar.set_ticks([math.log10(mark) for mark in marks], labels=[f"{mark:.2g}" for mark in marks], fontsize=FONT)
    bar.set_label(scale.label, fontsize=FONT)
