"""The similarity matrices of a report: experts in the order of their groups, which are outlined.

As figure 2 of Zhang et al. 2024, "Diversifying the Expert Knowledge for Task-Agnostic Pruning in Sparse
Mixture-of-Experts", arXiv:2407.09590.
"""

import math
from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from compressor.report.data import LayerReport, ReportData
from compressor.report.drawing import FONT, Panel, Sheet, colour
from compressor.report.layers import brief_end, listed, mean, merged, named, order, short, within
from compressor.words import counted

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap

SIDE, BELOW, LEFT, ABOVE = 2.1, 0.24, 0.34, 0.26  # inches of a matrix and of what is round it
LEGEND = (3.8, 0.52)
LEVELS = 64  # of the colour scale, few enough for small images
MOST_NUMBERED, MOST_UPRIGHT = 24, 12  # experts whose numbers fit, and fit upright
MOST_NAMED = 8  # groups in a text alternative
DASHES = (0, (3, 2))
CASING, LINE = ("#0b0d10", 2.4), ("#fefefe", 1.1)  # an outline that any colour shows, in either mode: white on black
COLOURS = "viridis"  # as in all heatmaps here; grows lighter for colour-blind readers too


def similarity_parts(data: ReportData) -> tuple[Panel, ...]:
    """The scale and a matrix for each layer that has one; none if no layer has."""
    shown = [(layer, name) for layer, name in named(data.layers) if layer.similarity is not None]
    if not shown:
        return ()
    low, high = limits(layer for layer, _ in shown)
    legend = Panel(
        "Scale of similarity",
        f"Colours from {low:g}, dark, to {high:g}, light. Solid outlines hold the experts of a merged group, dashed "
        "ones the dropped experts.",
        LEGEND,
        partial(_draw_legend, low=low, high=high, has_merged=any(merged(layer) for layer, _ in shown),
                has_dropped=any(layer.dropped for layer, _ in shown)),
        is_legend=True,
    )  # fmt: skip
    size = (LEFT + SIDE + 0.08, ABOVE + SIDE + BELOW)
    return (
        legend,
        *(Panel(name, matrix_alt(layer), size, partial(_draw, layer=layer, name=name, low=low, high=high))
          for layer, name in shown),
    )  # fmt: skip


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

    return colormaps[COLOURS].resampled(LEVELS)


def _draw(sheet: Sheet, layer: LayerReport, name: str, low: float, high: float) -> None:
    import numpy as np

    assert layer.similarity is not None
    placed = order(layer)
    matrix = np.array(layer.similarity)[np.ix_(placed, placed)]
    axes = sheet.axes(LEFT, BELOW, SIDE, SIDE)
    axes.imshow(matrix, vmin=low, vmax=high, cmap=_colours(), interpolation="none", aspect="auto")
    axes.set_axis_off()
    sizes = sorted(map(len, merged(layer)), reverse=True)
    starts = [sum(sizes[:place]) for place in range(len(sizes))]
    _outline(axes, len(placed), [*zip(starts, sizes, strict=True)], "solid")
    if layer.dropped:
        _outline(axes, len(placed), [(len(placed) - len(layer.dropped), len(layer.dropped))], DASHES)
    sheet.text(LEFT, BELOW + SIDE + 0.07, brief_end(name), fontweight="bold")
    if len(placed) <= MOST_NUMBERED:
        _number(axes, layer, placed)
    else:
        sheet.text(LEFT, BELOW - 0.15, f"{layer.experts} experts, groups first", "muted", fontsize=FONT - 1)


def _number(axes: "Axes", layer: LayerReport, placed: Sequence[int]) -> None:
    """The experts' numbers at both sides, the dropped ones with a cross, the protected ones with a star."""
    size = min(FONT - 1.5, SIDE * 72 / len(placed) / 1.1)
    turned = 90 if len(placed) > MOST_UPRIGHT else 0
    for place, expert in enumerate(placed):
        mark = "✕" if expert in layer.dropped else "★" if expert in layer.protected else ""
        role = colour("dropped" if expert in layer.dropped else "ink")
        axes.text(-0.75, place, f"{mark}{expert}", ha="right", va="center_baseline", fontsize=size, color=role)
        below: Any = {"ha": "center", "va": "top", "rotation": turned}
        axes.text(place, len(placed) - 0.2, str(expert), fontsize=size, color=role, **below)


def _outline(axes: "Axes", experts: int, blocks: Sequence[tuple[int, int]], style: Any) -> None:
    """Squares on the diagonal: where each starts and its size; white on black, to be seen on any colour."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    if not blocks:
        return
    squares = [
        Path([(a, a), (b, a), (b, b), (a, b), (a, a)], closed=True)
        for a, b in ((start - 0.5, start + size - 0.5) for start, size in blocks)
    ]
    path = Path.make_compound_path(*squares)
    thin = min(1.0, max(0.4, MOST_NUMBERED / experts))  # so that small groups are still to be seen inside
    whole: Any = {"fill": False, "clip_on": False, "joinstyle": "miter"}
    for (shade, width), dashes in ((CASING, "solid"), (LINE, style)):
        axes.add_patch(PathPatch(path, edgecolor=shade, linewidth=thin * width, linestyle=dashes, **whole))


def _draw_legend(sheet: Sheet, low: float, high: float, has_merged: bool, has_dropped: bool) -> None:
    import numpy as np

    bar = sheet.axes(LEFT, 0.24, 1.3, 0.13)
    bar.imshow(np.linspace(low, high, LEVELS)[None], cmap=_colours(), interpolation="none", aspect="auto",
               extent=(low, high, 0, 1))  # fmt: skip
    bar.set_yticks([])
    bar.spines[:].set_visible(False)
    marks = (low, (low + high) / 2, high)
    bar.set_xticks(marks, labels=[f"{value:g}" for value in marks])
    bar.tick_params(pad=2)
    x = LEFT + 1.65
    for said, style, is_shown in (("merged", "solid", has_merged), ("✕ dropped", DASHES, has_dropped)):
        if is_shown:
            axes = sheet.axes(x, 0.22, 0.18, 0.18)
            axes.imshow([[0.3]], vmin=0, vmax=1, cmap=_colours(), interpolation="none")
            axes.set_axis_off()
            _outline(axes, 1, [(0, 1)], style)
            sheet.text(x + 0.26, 0.31, said, va="center_baseline")
            x += 0.9
