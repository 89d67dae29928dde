"""The figures of a report with a cell for each expert or each pair: what became of them, and how alike they are."""

import math
import textwrap
from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from compressor.document.blocks import Figure
from compressor.drawing.cells import MARKS, Cell, draw_cells, group_look
from compressor.drawing.heatmaps import draw_heat, label_axes
from compressor.drawing.palette import COLOURS, FONT, HEAT, ROLES, draw_key
from compressor.drawing.picture import Drawing
from compressor.report.data import LayerReport, ReportData
from compressor.report.layers import all_fates, brief_end, listed, mean, merged, named, order, within
from compressor.words import counted, readable, short

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap
    from matplotlib.figure import FigureBase

GRID = (9.6, 8.0)  # inches of the grid of experts at the most, as far as the least cell allows
LEAST_CELL, MOST_CELL = 0.06, 0.26
NUMBERED_CELL = 0.2  # from this size on a cell holds the number of the expert that its group is called by
MOST_NUMBERS = 1_500  # which take longer to draw than marks
MOST_CELLS = 2**17  # what is larger, nobody can read
KEPT = "#d0d5da"
SIDE, BELOW, LEFT, ABOVE = 2.1, 0.26, 0.34, 0.26  # inches of a matrix and of what is round it
LEVELS = 64  # of the colour scale, few enough for small images
MOST_NUMBERED, MOST_UPRIGHT = 24, 12  # experts whose numbers fit, and fit upright
MOST_NAMED = 8  # groups in a text alternative
DASHES = (0, (3, 2))
CASING, LINE = ("#0b0d10", 2.4), ("#fefefe", 1.1)  # an outline that any colour shows: white on black


def experts(data: ReportData) -> Figure | None:
    """The grid of all experts: a row for each layer, a column for each expert of the source; none of too many."""
    rows, columns = len(data.layers), max((layer.experts for layer in data.layers), default=0)
    if not 0 < rows * columns <= MOST_CELLS:
        return None
    cell = max(LEAST_CELL, min(MOST_CELL, GRID[0] / columns, GRID[1] / rows))
    is_numbered = cell >= NUMBERED_CELL and rows * columns <= MOST_NUMBERS
    grid = [cells(layer) for layer in data.layers]
    least = min(layer.experts for layer in data.layers)
    span = f"{least} to {columns}" if least < columns else f"{columns}"
    looks = _looks(data.layers, is_numbered)
    lines = sum(label.count("\n") + 1 for label, _ in looks)
    legend = Drawing(
        "What the cells are",
        f"{'; '.join(' '.join(label.split()) for label, _ in looks)}.",
        (3.6, 0.17 * lines + 0.12),
        partial(draw_key, looks=looks),
        is_legend=True,
        margins=(0.0,) * 4,
    )
    size = (max(cell * columns + 0.7, 3.6), cell * rows + 0.5)
    names = [str(layer.layer) for layer in data.layers]
    drawing = Drawing(
        "What became of each expert",
        f"Grid of {counted(rows, 'MoE layer')} by {span} experts: {all_fates(data.layers)}. The table below says the "
        "same in numbers.",
        size,
        partial(_draw_grid, grid=grid, names=names, cell=cell, is_numbered=is_numbered),
        margins=(0.5, 0.45, size[0] - 0.5 - cell * columns, 0.05),
    )
    caption = f"A row for each MoE layer, a column for each expert of the source; {all_fates(data.layers)}."
    return Figure("experts", "What became of each expert", caption, (legend, drawing))


def cells(layer: LayerReport) -> list[Cell]:
    """A layer's experts [E]. A merged group has one colour and mark, and its least member's number."""
    found = [Cell(ROLES["paper"], "x")] * layer.experts
    protected, rescaled, changed = set(layer.protected), set(layer.rescaled), 0
    for group in layer.groups:
        is_changed = len(group) > 1 or group[0] in rescaled
        (colour, mark), least = group_look(changed) if is_changed else (KEPT, ""), min(group) if is_changed else None
        changed += is_changed
        for member in group:
            found[member] = Cell(colour, mark, least, member in protected)
    return found


def _looks(layers: Sequence[LayerReport], is_numbered: bool) -> list[tuple[str, dict[str, Any]]]:
    """Each kind of cell in words, and how matplotlib's legend draws it."""
    most = max(len(merged(layer)) + len(layer.rescaled) for layer in layers)  # in a row
    sign = "number (its least member)" if is_numbered else "mark"
    repeat = " (signs repeat)" if not is_numbered and most > len(MARKS) * len(COLOURS) else ""
    cross = {"marker": "x", "color": ROLES["ink"], "linestyle": "none", "markersize": 5}
    found: list[tuple[str, dict[str, Any], bool]] = [
        ("kept", {"facecolor": KEPT}, True),
        (f"merged into one: same colour and {sign} in a row{repeat}", {"facecolor": COLOURS[0]}, most > 0),
        ("cross: dropped", cross, any(layer.dropped for layer in layers)),
        ("frame: protected", {"fill": False, "edgecolor": ROLES["ink"]}, any(each.protected for each in layers)),
    ]
    return [(textwrap.fill(label, 54), style) for label, style, is_there in found if is_there]


def _draw_grid(
    canvas: "FigureBase", grid: Sequence[Sequence[Cell]], names: Sequence[str], cell: float, is_numbered: bool
) -> None:
    axes = canvas.subplots()
    draw_cells(axes, grid, cell, is_numbered)
    columns = max(map(len, grid))
    label_axes(axes, names, list(map(str, range(columns))), cell * columns, cell * len(grid))
    axes.set_ylabel("layer")
    axes.set_xlabel("expert of the source", loc="left")


def similarity(data: ReportData) -> Figure | None:
    """The scale and a matrix for each layer that has one; none if no layer has.

    As figure 2 of Zhang et al. 2024, "Diversifying the Expert Knowledge for Task-Agnostic Pruning in Sparse
    Mixture-of-Experts", arXiv:2407.09590: experts in the order of their groups, which are outlined.
    """
    shown = [(layer, name) for layer, name in named(data.layers) if layer.similarity is not None]
    if not shown:
        return None
    low, high = limits(layer for layer, _ in shown)
    kinds = [
        ("merged", "solid", any(merged(layer) for layer, _ in shown)),
        ("✕ dropped", DASHES, any(layer.dropped for layer, _ in shown)),
    ]
    legend = Drawing(
        "Scale of similarity",
        f"Colours from {low:g}, dark, to {high:g}, light. Solid outlines hold the experts of a merged group, dashed "
        "ones the dropped experts.",
        (3.6, 0.5),
        partial(_draw_scale, low=low, high=high, kinds=[kind[:2] for kind in kinds if kind[2]]),
        is_legend=True,
        margins=(0.2, 0.2, 1.9, 0.15),
    )
    size, margins = (LEFT + SIDE + 0.08, ABOVE + SIDE + BELOW), (LEFT, BELOW, 0.08, ABOVE)
    drawings = [
        Drawing(
            name,
            matrix_alt(layer),
            size,
            partial(_draw_matrix, layer=layer, name=name, low=low, high=high),
            margins=margins,
        )
        for layer, name in shown
    ]
    labels = ", ".join(dict.fromkeys(layer.similarity_label for layer in data.layers if layer.similarity_label))
    caption = (
        f"A square for each layer shows how alike the source's experts are{f' ({labels})' if labels else ''}. "
        "They are ordered so that merged ones lie side by side; ✕ marks a dropped expert, ★ a protected one."
    )
    return Figure("similarity", "Similarity of the experts, with the chosen groups", caption, (legend, *drawings))


def limits(layers: Iterable[LayerReport]) -> tuple[float, float]:
    """A scale in tenths that holds all similarities but those of experts with themselves."""
    values = [value for layer in layers for value in _pairs(layer) if math.isfinite(value)]
    if not values:
        return 0.0, 1.0
    low, high = math.floor(10 * min(values)) / 10, math.ceil(10 * max(values)) / 10
    return (low, high) if low < high else (low, low + 0.1)


def _pairs(layer: LayerReport) -> list[float]:
    """Similarities of all pairs, row by row below the diagonal."""
    return [value for row, line in enumerate(layer.similarity or ()) for value in line[:row]]


def matrix_alt(layer: LayerReport) -> str:
    """What a matrix shows, in numbers."""
    pairs, groups = _pairs(layer), merged(layer)
    inside = [value for group in groups for value in within(layer, group)]
    named = ", ".join("+".join(map(str, group)) for group in groups[:MOST_NAMED]) or "none"
    said = [
        f"{counted(layer.experts, 'expert')} in {counted(layer.kept, 'slot')}; merged groups: {named}"
        f"{' and more' if len(groups) > MOST_NAMED else ''}; dropped: {listed(layer.dropped)}.",
        f"Mean similarity of all pairs {short(mean(pairs))}"
        + (f", within merged groups {short(mean(inside))}." if inside else "."),
    ]
    if pairs:
        places = ((row, column) for row in range(layer.experts) for column in range(row))
        (second, first), most = max(zip(places, pairs, strict=False), key=lambda pair: pair[1])
        said.append(f"The most alike are {first} and {second} with {short(most)}.")
    return " ".join(said)


def _colours() -> "Colormap":
    from matplotlib import colormaps

    return colormaps[HEAT].resampled(LEVELS)


def _draw_matrix(canvas: "FigureBase", layer: LayerReport, name: str, low: float, high: float) -> None:
    assert layer.similarity is not None
    axes, placed = canvas.subplots(), order(layer)
    draw_heat(axes, [[layer.similarity[a][b] for b in placed] for a in placed], low, high, cmap=_colours())
    sizes = sorted(map(len, merged(layer)), reverse=True)
    groups = [(sum(sizes[:place]), size) for place, size in enumerate(sizes)]
    _outline(axes, len(placed), groups, "solid")
    gone = len(layer.dropped)
    _outline(axes, len(placed), [(len(placed) - gone, gone)] if gone else [], DASHES)
    axes.set_title(readable(brief_end(name)), loc="left", fontweight="bold")
    axes.spines[:].set_visible(False)
    axes.set(xticks=[], yticks=[])
    if len(placed) <= MOST_NUMBERED:
        _number(axes, layer, placed)
    else:
        axes.set_xlabel(f"{layer.experts} experts, groups first", loc="left", color=ROLES["muted"])


def _number(axes: "Axes", layer: LayerReport, placed: Sequence[int]) -> None:
    """The experts' numbers at both sides, the dropped ones with a cross, the protected ones with a star."""
    marks = ["✕" if each in layer.dropped else "★" if each in layer.protected else "" for each in placed]
    axes.set_yticks(range(len(placed)), labels=[f"{mark}{each}" for mark, each in zip(marks, placed, strict=True)])
    turn = 90 if len(placed) > MOST_UPRIGHT else 0
    axes.set_xticks(range(len(placed)), labels=list(map(str, placed)), rotation=turn)
    axes.tick_params(length=0, pad=2, labelsize=min(FONT - 1.0, SIDE * 72 / len(placed) / 1.1))
    for labels in (axes.get_xticklabels(), axes.get_yticklabels()):
        for label, mark in zip(labels, marks, strict=True):
            label.set_color(ROLES["dropped" if mark == "✕" else "ink"])


def _outline(axes: "Axes", experts: int, blocks: Sequence[tuple[int, int]], style: Any) -> None:
    """Squares on the diagonal: where each starts and its size; white on black, to be seen on any colour."""
    from matplotlib.patches import Rectangle

    thin = min(1.0, max(0.4, MOST_NUMBERED / experts))  # so that small groups are still to be seen inside
    for (shade, width), dashes in ((CASING, "solid"), (LINE, style)):
        look: Any = {"edgecolor": shade, "linewidth": thin * width, "linestyle": dashes, "joinstyle": "miter"}
        for start, size in blocks:
            axes.add_patch(Rectangle((start - 0.5, start - 0.5), size, size, fill=False, clip_on=False, **look))


def _draw_scale(canvas: "FigureBase", low: float, high: float, kinds: Sequence[tuple[str, Any]]) -> None:
    bar, marks = canvas.subplots(), [low, (low + high) / 2, high]
    steps = [low + (high - low) * step / (LEVELS - 1) for step in range(LEVELS)]
    draw_heat(bar, [steps], low, high, cmap=_colours(), extent=(low, high, 0, 1))
    bar.set_yticks([])
    bar.set_xticks(marks, labels=[f"{mark:g}" for mark in marks])
    bar.spines[:].set_visible(False)
    looks = [
        (
            said,
            [
                {"facecolor": "#808080", "edgecolor": shade, "linewidth": width, "linestyle": dashes}
                for (shade, width), dashes in ((CASING, "solid"), (LINE, style))
            ],
        )
        for said, style in kinds
    ]
    draw_key(canvas, looks, ncols=2, bbox_to_anchor=(0.52, 0.55))
