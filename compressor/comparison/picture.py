"""The picture of a comparison: loss against kept experts, one line for each way of making the model smaller."""

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any

from compressor.comparison.rows import Comparison, Entry, Row, label, ranked, sort_key
from compressor.document.blocks import Figure
from compressor.drawing.lines import LABEL_LENGTH, Line, colour, draw_lines, legend_beside, mark, spaced
from compressor.drawing.palette import ROLES, scale_axis
from compressor.drawing.picture import Drawing
from compressor.words import human_count

if TYPE_CHECKING:
    from matplotlib.figure import FigureBase

AXES_WIDTH, LEAST_HEIGHT = 6.6, 5.0  # inches
LINE_HEIGHT, LETTER_WIDTH = 0.185, 0.068  # inches of legend text
STYLES: Mapping[str, Any] = {"none": "solid", "ridge": (0, (1, 1)), "tune": (0, (5, 1.5))}
DECADES = 4  # of the logarithmic scale at the most
CAPTION = (
    "Loss above the original's by the experts kept in each MoE layer; the legend lists lines in the order in which "
    "they end. Colour is the strategy, line style the correction, and the grey band random drops."
)


def comparison_figure(comparison: Comparison) -> Figure:
    """The picture; its x axis falls from the original's expert count, so lines fan out to the right."""
    lines, title = _lines(comparison), f"{comparison.model}: loss with fewer experts"
    texts = ["original", *(text for line in lines for text in textwrap.wrap(_label(line), LABEL_LENGTH))]
    size = AXES_WIDTH + 0.7 + LETTER_WIDTH * max(map(len, texts)), max(LEAST_HEIGHT, 0.6 + LINE_HEIGHT * len(texts))
    drawing = Drawing(title, _alt(comparison), size, partial(_draw, comparison=comparison, lines=lines))
    return Figure("comparison", title, CAPTION, (drawing,))


def _lines(comparison: Comparison) -> list[list[Entry]]:
    """Entries of one label by falling expert count; the lines as they end on the picture's right edge, from above."""
    lines: dict[str, list[Entry]] = {}
    for entry in ranked(comparison):
        lines.setdefault(entry.label, []).append(entry)
    return sorted(lines.values(), key=lambda line: -sort_key(line[-1].loss))


def _label(line: Sequence[Entry]) -> str:
    drops = max(len(entry.rows) for entry in line)
    range_of = f" ({f'mean and range of {drops}' if drops > 1 else 'one drop'})" if line[0].is_random else ""
    return f"{line[0].label}{range_of}"


def _alt(comparison: Comparison) -> str:
    first = comparison.original.loss
    said = [
        f"With {count:g} experts: {', '.join(f'{entry.label} {entry.loss - first:+.4f}' for entry in entries)}."
        for count, entries in groupby(ranked(comparison), lambda entry: entry.kept)
    ]
    return " ".join([f"Loss above the original's {first:.4f}, the least first.", *said])


def _line(original: Row, line: Sequence[Entry], number: int, shade: str) -> Line:
    """From the original, which is no choice of this line; random drops in a band from the least to the greatest."""
    increases = [[loss - original.loss for loss in entry.losses] for entry in line]
    low, high = ([0.0, *map(limit, increases)] if line[0].is_random else [] for limit in (min, max))
    means = [0.0, *(entry.loss - original.loss for entry in line)]
    style = "dashed" if line[0].is_random else STYLES.get(line[0].rows[0].correction, "dashdot")
    experts = [original.kept, *(entry.kept for entry in line)]
    return Line(_label(line), experts, means, shade, style, low=low, high=high, **mark(number))


def _draw(canvas: "FigureBase", comparison: Comparison, lines: Sequence[Sequence[Entry]]) -> None:
    axes, first = canvas.add_subplot(), comparison.original
    names = list(dict.fromkeys(row.name for row in comparison.rows[1:] if not row.is_random))
    order = list(dict.fromkeys(entry.label for entry in ranked(comparison)))
    made = []
    for line in lines:
        row = line[0].rows[0]
        shade = ROLES["muted"] if row.is_random else colour(names.index(row.name))
        made.append(_line(first, line, order.index(line[0].label), shade))
    zero = axes.axhline(0.0, color=ROLES["ink"], linewidth=1.0)
    ends = [sort_key(line[-1].loss) for line in lines]
    listed = [(first.loss, "original", zero), *zip(ends, map(_label, lines), draw_lines(axes, made), strict=True)]
    listed.sort(key=lambda each: -each[0])
    legend_beside(canvas, [handle for *_, handle in listed], [label for _, label, _ in listed])
    said = scale_axis(axes, "y", [comparison.increase(row) for row in comparison.rows], DECADES)
    axes.set_ylabel(f"loss above the original's {first.loss:.4f} (nats per token)" + (f"\n{said}" if said else ""))
    counts = {row.kept for row in comparison.rows}
    axes.set_xticks(spaced(list(counts)))
    axes.set_xticks(sorted(counts), minor=True)
    axes.invert_xaxis()
    axes.set_xlabel(f"experts kept in each MoE layer{_of_size(comparison)} (the original has {first.experts})")
    axes.grid(axis="y")


def _of_size(comparison: Comparison) -> str:
    return ", parts counted as parts of one" if any(row.split > 1 for row in comparison.rows) else ""


def active_figure(comparison: Comparison) -> Figure:
    """Loss by the parameters that a token passes, a line for each model that was cut to several top-k."""
    lines: dict[str, list[Row]] = {}
    for row in comparison.rows[1:]:
        if not row.is_random:
            plain = replace(row, top_k=None)
            lines.setdefault(f"{label(plain)}, {row.experts} experts", []).append(row)
    title = f"{comparison.model}: loss with fewer active parameters"
    first = comparison.original.loss
    said = [
        f"{name}: {', '.join(f'{human_count(row.active or 0)} {row.loss - first:+.4f}' for row in rows)}."
        for name, rows in lines.items()
    ]
    alt = " ".join([f"Loss above the original's {first:.4f} by active parameters.", *said])
    texts = [text for name in lines for text in textwrap.wrap(name, LABEL_LENGTH)]
    size = AXES_WIDTH + 0.7 + LETTER_WIDTH * max(map(len, texts)), max(LEAST_HEIGHT, 0.6 + LINE_HEIGHT * len(texts))
    draw = partial(_draw_active, comparison=comparison, lines=lines)
    caption = "Loss above the original's by the parameters that a token passes."
    return Figure("active", title, caption, (Drawing(title, alt, size, draw),))


def _draw_active(canvas: "FigureBase", comparison: Comparison, lines: Mapping[str, Sequence[Row]]) -> None:
    axes, original, made = canvas.add_subplot(), comparison.original, []
    names = list(dict.fromkeys(row.name for row in comparison.rows[1:] if not row.is_random))
    for number, (name, rows) in enumerate(lines.items()):
        points = sorted(rows, key=lambda row: -(row.active or 0))
        style = STYLES.get(points[0].correction, "dashdot")
        active, losses = [row.active or 0 for row in points], [row.loss - original.loss for row in points]
        shade = colour(names.index(points[0].name))
        made.append(Line(name, active, losses, shade, style, low=[], high=[], **mark(number)))
    handles = draw_lines(axes, made)
    legend_beside(canvas, handles, [line.label for line in made])
    scale_axis(axes, "y", [comparison.increase(row) for row in comparison.rows], DECADES)
    axes.axhline(0.0, color=ROLES["ink"], linewidth=1.0)
    axes.set_ylabel(f"loss above the original's {original.loss:.4f} (nats per token)")
    axes.invert_xaxis()
    axes.set_xlabel(f"parameters that a token passes (of the original's: {human_count(original.active or 0)})")
    axes.grid(axis="y")
