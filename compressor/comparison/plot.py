"""The picture of a comparison: loss against kept experts, one line for each way of making the model smaller."""

import math
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compressor.comparison.rows import Comparison, Entry, Row, ranked, sort_key
from compressor.drawing.palette import COLOURS, DPI, MARKERS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

AXES_WIDTH, LEAST_HEIGHT = 6.6, 5.0  # inches
LINE_HEIGHT, LETTER_WIDTH = 0.185, 0.068  # inches of legend text
LABEL_LENGTH = 44  # letters of a legend line before it is broken
STYLES = {"none": "solid", "ridge": (0, (1, 1)), "tune": (0, (5, 1.5))}
GREY = "#777777"
DECADES = 4  # of the logarithmic scale at the most
LEAST_GAP = 0.045  # of the x axis between two numbers on it


def _lines(comparison: Comparison) -> list[list[Entry]]:
    """Entries of one label by falling expert count; the lines as they end on the picture's right edge, from above."""
    lines: dict[str, list[Entry]] = {}
    for entry in ranked(comparison):
        lines.setdefault(entry.label, []).append(entry)
    return sorted(lines.values(), key=lambda line: -sort_key(line[-1].loss))


def linear_below(increases: Iterable[float]) -> float | None:
    """Where a logarithmic scale of the increases turns linear towards 0; None if a linear scale shows them all."""
    sizes = [abs(value) for value in increases if math.isfinite(value) and value != 0]
    if not sizes or max(sizes) <= 10 * min(sizes):
        return None
    return float(10.0 ** math.floor(math.log10(max(min(sizes), max(sizes) / 10**DECADES))))


def spaced(counts: Iterable[int]) -> list[int]:
    """Expert counts whose numbers do not touch on the axis: the smallest, the greatest and what fits between."""
    ordered = sorted(set(counts))
    gap = LEAST_GAP * (ordered[-1] - ordered[0])
    kept = ordered[:1]
    for count in ordered[1:-1]:
        if count - kept[-1] >= gap and ordered[-1] - count >= gap:
            kept.append(count)
    return kept if len(ordered) == 1 else [*kept, ordered[-1]]


def _draw_line(axes: "Axes", original: Row, line: Sequence[Entry], number: int, colour: str) -> "Line2D":
    increases = [[loss - original.loss for loss in entry.losses] for entry in line]
    experts = [original.experts, *(entry.experts for entry in line)]
    means = [0.0, *(entry.loss - original.loss for entry in line)]
    if line[0].is_random:
        low, high = ([0.0, *(limit(values) for values in increases)] for limit in (min, max))
        axes.fill_between(experts, low, high, color=colour, alpha=0.2, linewidth=0)
    hollow = number // len(MARKERS) % 2 == 1
    (drawn,) = axes.plot(
        experts, means, color=colour, linewidth=1.4,
        linestyle="dashed" if line[0].is_random else STYLES.get(line[0].rows[0].correction, "dashdot"),
        marker=MARKERS[number % len(MARKERS)], markersize=6, markerfacecolor="white" if hollow else colour,
        markeredgecolor=colour if hollow else "white", markeredgewidth=1.2 if hollow else 0.5,
        markevery=slice(1, None),  # the start is the original, which is no choice of this line
    )  # fmt: skip
    return drawn


def _legend_label(line: Sequence[Entry]) -> str:
    drops = max(len(entry.rows) for entry in line)
    range_of = f" ({f'mean and range of {drops}' if drops > 1 else 'one drop'})" if line[0].is_random else ""
    return textwrap.fill(f"{line[0].label}{range_of}", LABEL_LENGTH)


def _ticks(least: float, most: float, below: float) -> list[float]:
    """1, 2 and 5 of each decade from `below` to the limits, mirrored for negative values, and 0; 1 alone if many."""
    decades = range(round(math.log10(below)), math.ceil(math.log10(max(-least, most, below))) + 1)
    steps = (1.0, 2.0, 5.0) if len(decades) <= 3 else (1.0,)
    sizes = [step * 10.0**decade for decade in decades for step in steps]
    return sorted([-size for size in sizes if -size >= least] + [0.0] + [size for size in sizes if size <= most])


def _scale(axes: "Axes", comparison: Comparison) -> None:
    """Label the y axis, on a scale on which small and large increases can be told apart.

    Increases of methods that differ by orders of magnitude need a logarithm; the original's 0 and the negative
    increases that a correction may reach need it to be linear around 0.
    """
    below = linear_below(comparison.increase(row) for row in comparison.rows)
    axes.set_ylabel(
        f"loss above the original's {comparison.original.loss:.4f} (nats per token)"
        + (f"\nlogarithmic, linear below {below:g}" if below is not None else "")
    )
    if below is None:
        return
    axes.set_yscale("symlog", linthresh=below, linscale=0.5)
    ticks = _ticks(*axes.get_ylim(), below)
    axes.set_yticks(ticks, labels=[f"{tick:g}" for tick in ticks])
    axes.set_yticks([], minor=True)


def _label_axes(axes: "Axes", comparison: Comparison) -> None:
    first = comparison.original
    counts = {row.experts for row in comparison.rows}
    axes.set_xticks(spaced(counts))
    axes.set_xticks(sorted(counts), minor=True)
    axes.invert_xaxis()
    axes.set_xlabel(f"experts kept in each MoE layer (the original has {first.experts})")
    title = textwrap.fill(f"{comparison.model}: loss with fewer experts", 64)
    axes.set_title(title, fontsize=11, parse_math=False)
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def comparison_figure(comparison: Comparison) -> "Figure":
    """The picture, not saved yet.

    The x axis falls from the original's expert count to the smallest, so lines fan out to the right, where the legend
    lists them in the order in which they end. Colour is the strategy, line style the correction.
    """
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(row.name for row in comparison.rows[1:] if not row.is_random))
    order = list(dict.fromkeys(entry.label for entry in ranked(comparison)))
    figure = Figure(dpi=DPI, layout="constrained")
    axes = figure.add_subplot()
    handles = [(comparison.original.loss, "original", axes.axhline(0.0, color="black", linewidth=1.0))]
    for line in _lines(comparison):
        row = line[0].rows[0]
        colour = GREY if row.is_random else COLOURS[names.index(row.name) % len(COLOURS)]
        drawn = _draw_line(axes, comparison.original, line, order.index(line[0].label), colour)
        handles.append((sort_key(line[-1].loss), _legend_label(line), drawn))
    handles.sort(key=lambda handle: -handle[0])
    labels = [text for _, text, _ in handles]
    style: Any = {"loc": "outside right upper", "fontsize": 8, "frameon": False, "handlelength": 3.2}
    legend = figure.legend([drawn for _, _, drawn in handles], labels, **style)
    for text in legend.get_texts():
        text.set_parse_math(False)
    texts = [text for label in labels for text in label.splitlines()]  # beside the axes, which keep their width
    width = AXES_WIDTH + 0.7 + LETTER_WIDTH * max(map(len, texts))
    figure.set_size_inches(width, max(LEAST_HEIGHT, 0.6 + LINE_HEIGHT * len(texts)))
    _scale(axes, comparison)
    _label_axes(axes, comparison)
    return figure


def plot_comparison(comparison: Comparison, path: Path) -> None:
    """Save the picture as PNG."""
    comparison_figure(comparison).savefig(path, dpi=DPI, format="png")
