"""The figures of a report: the same drawings for the page, as SVG, and for a model card, as PNG."""

import math
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from compressor.document.blocks import Figure
from compressor.document.heatmaps import draw_heat, label_axes
from compressor.document.marks import (
    MARKS,
    Cell,
    Dots,
    Line,
    draw_bars,
    draw_cells,
    draw_dots,
    draw_left,
    draw_lines,
    draw_parts,
    group_look,
    spaced,
)
from compressor.document.palette import COLOURS, FONT, HEAT, ROLES, draw_key
from compressor.document.picture import Drawing
from compressor.evaluation.gate_report import gate_figure
from compressor.formatting import counted, listed, percent, readable, short, span
from compressor.recipe.document import changed, result_of
from compressor.report.data import LayerReport, Report, all_dispositions, gone, load_of, mean, order, roles, within
from compressor.steps.distill.step import curve

if TYPE_CHECKING:
    from matplotlib.figure import FigureBase

WIDTH = 3.6  # inches
VISITS = (2.5, 2.0)  # inches of a layer's drawing
CURVE = (3.6, 2.2)
MOST_ROW, LEAST_ROW, TALLEST = 0.26, 0.13, 7.0
FARTHEST = 1e30  # errors and divergences beyond it are drawn there: no axis holds the largest numbers
HELDOUT = ("heldout_error_before", "heldout_error_after")
ERRORS = {  # by field of a layer: what it is and how it is drawn
    "error": Dots("of the MoE block", (), "after"),
    HELDOUT[0]: Dots("held-out, before reconstruction", (), "before", "D", False),
    HELDOUT[1]: Dots("held-out, after reconstruction", (), "merged", "D"),
}
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
MOST_LETTERS = 24  # of a layer's name
DASHES = (0, (3, 2))
CASING, LINE = ("#0b0d10", 2.4), ("#fefefe", 1.1)  # an outline that any colour shows: white on black
MERGED, DROPPED = ("merged", "solid"), ("✕ dropped", DASHES)


def _brief(layer: LayerReport) -> str:
    """A layer's name; of a long one the end, where modules differ."""
    name = layer.name
    return readable(name if len(name) <= MOST_LETTERS else f"…{name[1 - MOST_LETTERS :]}")


def _drawable(value: float) -> float:
    return min(max(value, -FARTHEST), FARTHEST)


def sizes(data: Report) -> Figure:
    """Bars of what is left of experts, parameters and bytes."""
    said, bars = [], []
    for row in data.sizes():
        said.append(f"{row.name}: {row.shown_before} before, {row.shown_after} after, {row.left} is left")
        left = row.after / row.before if row.before else 0.0
        bars.append((row.name, left, f"{row.shown_before} → {row.shown_after} ({row.left})"))
    drawing = Drawing(
        "Sizes before and after",
        f"{'; '.join(said)}.",
        (WIDTH, 1.5),
        lambda canvas: draw_left(canvas.subplots(), bars),
        margins=(0.05,) * 4,
    )
    caption = "The whole bar is the base, the filled part what the compressed model has of it."
    return Figure("sizes", "What is left of experts, parameters and bytes", caption, (drawing,))


def experts(data: Report) -> Figure | None:
    """The grid of all experts: a row for each layer, a column for each expert of the base; none of too many."""
    layers = data.layers
    rows, columns = len(layers), max((layer.plan.experts for layer in layers), default=0)
    if not 0 < rows * columns <= MOST_CELLS:
        return None
    cell = max(LEAST_CELL, min(MOST_CELL, GRID[0] / columns, GRID[1] / rows))
    is_numbered = cell >= NUMBERED_CELL and rows * columns <= MOST_NUMBERS
    most = max(sum(not group.untouched for group in layer.plan.groups) for layer in layers)  # merged ones in a row
    sign = "number (its least member)" if is_numbered else "mark"
    repeat = " (signs repeat)" if not is_numbered and most > len(MARKS) * len(COLOURS) else ""
    cross = {"marker": "x", "color": ROLES["ink"], "linestyle": "none", "markersize": 5}
    kinds: list[tuple[str, dict[str, Any], bool]] = [
        ("kept", {"facecolor": KEPT}, True),
        (f"merged into one: same colour and {sign} in a row{repeat}", {"facecolor": COLOURS[0]}, most > 0),
        (f"cross: {gone(layer.plan for layer in layers)}", cross, any(layer.plan.dropped for layer in layers)),
        ("frame: protected", {"fill": False, "edgecolor": ROLES["ink"]}, any(each.protected for each in layers)),
    ]
    looks = [(textwrap.fill(label, 54), style) for label, style, is_there in kinds if is_there]
    legend = Drawing(
        "What the cells are",
        f"{'; '.join(' '.join(label.split()) for label, _ in looks)}.",
        (3.6, 0.17 * sum(label.count("\n") + 1 for label, _ in looks) + 0.12),
        partial(draw_key, looks=looks),
        is_legend=True,
        margins=(0.0,) * 4,
    )

    def draw(canvas: "FigureBase") -> None:
        axes = canvas.subplots()
        draw_cells(axes, [cells(layer) for layer in layers], cell, is_numbered)
        names = [str(layer.plan.layer) for layer in layers]
        label_axes(axes, names, list(map(str, range(columns))), cell * columns, cell * rows)
        axes.set_ylabel("layer")
        axes.set_xlabel("expert of the base", loc="left")

    became = all_dispositions([layer.plan for layer in layers])
    each = span(layer.plan.experts for layer in layers)
    size = (max(cell * columns + 0.7, 3.6), cell * rows + 0.5)
    drawing = Drawing(
        "What became of each expert",
        f"Grid of {counted(rows, 'MoE layer')} by {each} experts: {became}. The table below says the same in numbers.",
        size,
        draw,
        margins=(0.5, 0.45, size[0] - 0.5 - cell * columns, 0.05),
    )
    caption = f"A row for each MoE layer, a column for each expert of the base; {became}."
    return Figure("experts", "What became of each expert", caption, (legend, drawing))


def cells(layer: LayerReport) -> list[Cell]:
    """A layer's experts [E]. A merged group has one colour and mark, and its least member's number."""
    found = [Cell(ROLES["paper"], "x")] * layer.plan.experts
    changed = 0
    for group in layer.plan.groups:
        (colour, mark), least = (KEPT, ""), None
        if not group.untouched:
            (colour, mark), least = group_look(changed), min(group.members)
            changed += 1
        for member in group.members:
            found[member] = Cell(colour, mark, least, member in layer.protected)
    return found


def similarity(data: Report) -> Figure | None:
    """The scale and a matrix for each layer that has one; none if no layer has.

    As figure 2 of Zhang et al. 2024, "Diversifying the Expert Knowledge for Task-Agnostic Pruning in Sparse
    Mixture-of-Experts", arXiv:2407.09590: experts in the order of their groups, which are outlined.
    """
    from matplotlib import colormaps

    layers = [layer for layer in data.layers if layer.similarity is not None]
    if not layers:
        return None
    low, high = limits(layers)
    colours = colormaps[HEAT].resampled(LEVELS)
    kinds: list[tuple[str, Any]] = [MERGED] if any(layer.plan.merged for layer in layers) else []
    kinds += [DROPPED] if any(layer.plan.dropped for layer in layers) else []

    def draw_scale(canvas: "FigureBase") -> None:
        bar, marks = canvas.subplots(), [low, (low + high) / 2, high]
        steps = [low + (high - low) * step / (LEVELS - 1) for step in range(LEVELS)]
        draw_heat(bar, [steps], low, high, cmap=colours, extent=(low, high, 0, 1))
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

    legend = Drawing(
        "Scale of similarity",
        f"Colours from {low:g}, dark, to {high:g}, light. Solid outlines hold the experts of a merged group, dashed "
        "ones the dropped experts.",
        (3.6, 0.5),
        draw_scale,
        is_legend=True,
        margins=(0.2, 0.2, 1.9, 0.15),
    )
    size, margins = (LEFT + SIDE + 0.08, ABOVE + SIDE + BELOW), (LEFT, BELOW, 0.08, ABOVE)
    draw = partial(_draw_matrix, low=low, high=high, cmap=colours)
    drawings = [
        Drawing(layer.name, matrix_alt(layer), size, partial(draw, layer=layer), margins=margins) for layer in layers
    ]
    labels = ", ".join(dict.fromkeys(layer.similarity_label for layer in data.layers if layer.similarity_label))
    caption = (
        f"A square for each layer shows how similar the base's experts are{f' ({labels})' if labels else ''}. "
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
    return [value for row, line in enumerate(layer.similarity or ()) for value in line[:row]]


def matrix_alt(layer: LayerReport) -> str:
    """What a matrix shows, in numbers."""
    pairs, groups = _pairs(layer), layer.plan.merged
    inside = [value for group in groups for value in within(layer, group)]
    named = ", ".join("+".join(map(str, group)) for group in groups[:MOST_NAMED]) or "none"
    said = [
        f"{counted(layer.plan.experts, 'expert')} in {counted(len(layer.plan.groups), 'slot')}; merged groups: {named}"
        f"{' and more' if len(groups) > MOST_NAMED else ''}; {gone([layer.plan])}: {listed(layer.plan.dropped)}.",
        f"Mean similarity of all pairs {short(mean(pairs))}"
        + (f", within merged groups {short(mean(inside))}." if inside else "."),
    ]
    if pairs:
        places = ((row, column) for row in range(layer.plan.experts) for column in range(row))
        (second, first), most = max(zip(places, pairs, strict=False), key=lambda pair: pair[1])
        said.append(f"The most similar are {first} and {second} with {short(most)}.")
    return " ".join(said)


def _draw_matrix(canvas: "FigureBase", layer: LayerReport, low: float, high: float, cmap: Any) -> None:
    """The matrix with its groups outlined, and the experts' numbers at both sides where they fit."""
    from matplotlib.patches import Rectangle

    assert layer.similarity is not None
    axes, placed = canvas.subplots(), order(layer.plan)
    draw_heat(axes, [[layer.similarity[a][b] for b in placed] for a in placed], low, high, cmap=cmap)
    count, dropped, start = len(placed), len(layer.plan.dropped), 0
    blocks: list[tuple[int, int, Any]] = []  # where each begins on the diagonal, its size, its line
    for size in sorted(map(len, layer.plan.merged), reverse=True):
        blocks.append((start, size, "solid"))
        start += size
    blocks += [(count - dropped, dropped, DASHES)] if dropped else []
    thin = min(1.0, max(0.4, MOST_NUMBERED / count))  # so that small groups are still to be seen inside
    for start, size, style in blocks:
        for (shade, width), dashes in ((CASING, "solid"), (LINE, style)):
            look: Any = {"edgecolor": shade, "linewidth": thin * width, "linestyle": dashes, "joinstyle": "miter"}
            axes.add_patch(Rectangle((start - 0.5, start - 0.5), size, size, fill=False, clip_on=False, **look))
    axes.set_title(_brief(layer), loc="left", fontweight="bold")
    axes.spines[:].set_visible(False)
    axes.set(xticks=[], yticks=[])
    if count > MOST_NUMBERED:
        axes.set_xlabel(f"{layer.plan.experts} experts, groups first", loc="left", color=ROLES["muted"])
        return
    marks = ["✕" if each in layer.plan.dropped else "★" if each in layer.protected else "" for each in placed]
    axes.set_yticks(range(count), labels=[f"{mark}{each}" for mark, each in zip(marks, placed, strict=True)])
    axes.set_xticks(range(count), labels=list(map(str, placed)), rotation=90 if count > MOST_UPRIGHT else 0)
    axes.tick_params(length=0, pad=2, labelsize=min(FONT - 1.0, SIDE * 72 / count / 1.1))
    for labels in (axes.get_xticklabels(), axes.get_yticklabels()):
        for label, mark in zip(labels, marks, strict=True):
            label.set_color(ROLES["dropped" if mark == "✕" else "ink"])


def visits(data: Report) -> Figure | None:
    """A legend, and for each layer the share of tokens of every expert and slot; none if nothing was counted.

    As figure 6 of Zhang et al. 2024, arXiv:2407.09590, all on one scale.
    """
    layers = [layer for layer in data.layers if layer.visits_before or layer.visits_after]
    if not layers:
        return None
    highest = max(max((*(layer.visits_before or ()), *(layer.visits_after or ()))) for layer in layers) or 1.0
    kinds = [kind for kind in ("kept", "merged", "dropped") if any(kind in roles(layer) for layer in layers)]
    looks = [
        (
            "slot after" if kind == "after" else kind,
            {"facecolor": ROLES["paper" if kind == "dropped" else kind], "edgecolor": ROLES[kind]},
        )
        for kind in (*kinds, "after")
    ]
    legend = Drawing(
        "What the bars are",
        f"Bars of the base's experts by what became of them: {', '.join(kinds)}; the compressed model's slots below. "
        f"All bars are on one scale up to {percent(highest)}.",
        (WIDTH, 0.3),
        partial(draw_key, looks=looks, ncols=4),
        is_legend=True,
        margins=(0.0,) * 4,
    )

    def draw(canvas: "FigureBase", layer: LayerReport) -> None:
        above, below = canvas.subplots(2, 1, gridspec_kw={"hspace": 0.75})
        above.set_title(_brief(layer), loc="left", fontweight="bold", pad=6)
        sides = (above, layer.visits_before, "before", roles(layer)), (below, layer.visits_after, "after", None)
        for axes, shares, when, kinds in sides:
            axes.set(xlim=(-0.6, layer.plan.experts - 0.4), ylim=(0, 1.02 * highest), xticks=[])
            axes.set_yticks([0, highest], labels=["0", percent(highest)])
            axes.set_title(when, loc="right", pad=2, color=ROLES["muted"])
            if shares:
                draw_bars(axes, shares, kinds or ["after"] * len(shares), 1 / len(shares))
            else:
                axes.spines["left"].set_visible(False)
                axes.text(0.0, highest / 2, "not counted", color=ROLES["muted"], va="center")

    margins = (0.42, 0.2, 0.1, 0.32)
    drawings = [
        Drawing(layer.name, visit_alt(layer), VISITS, partial(draw, layer=layer), margins=margins) for layer in layers
    ]
    caption = (
        f"Share of the routed tokens{_tokens(data)}: the base's experts above, the compressed model's slots below, "
        "each model with its own routing; the dashed line is an even share."
    )
    return Figure("visits", "Routed tokens of the experts before, and of the slots after", caption, (legend, *drawings))


def _tokens(data: Report) -> str:
    return f" on {data.measured_on}" if data.measured_tokens else ""


def visit_alt(layer: LayerReport) -> str:
    """What a layer's bars show, in numbers."""
    said = []
    for when, unit, shares in (("Before", "expert", layer.visits_before), ("After", "slot", layer.visits_after)):
        if not shares:
            said.append(f"{when}: not counted.")
        elif (load := load_of(shares)) is None:
            said.append(f"{when}: {counted(len(shares), unit)}, which no token reached.")
        else:
            least, most = (f"{percent(end)} ({unit} {shares.index(end)})" for end in (min(shares), max(shares)))
            said.append(
                f"{when}: {counted(len(shares), unit)}, from {least} to {most}; maximum {short(load.maximum_to_mean)} "
                f"times the mean, entropy {short(load.entropy)}."
            )
    return " ".join(said)


def errors(data: Report) -> Figure | None:
    """Dots of each layer's errors; none where no error is known."""
    rows: list[tuple[LayerReport, Mapping[str, float]]] = []  # of each layer its errors that are known and finite
    for layer in data.layers:
        known = {field: value for field in ERRORS if (value := getattr(layer, field)) is not None}
        if known := {field: value for field, value in known.items() if math.isfinite(value)}:
            rows.append((layer, known))
    if not rows:
        return None
    said, kinds = [], []
    for field, dots in ERRORS.items():
        if values := {layer.name: known[field] for layer, known in rows if field in known}:
            least, most = (
                f"{short(values[name])} ({name})"
                for name in (choose(values, key=values.__getitem__) for choose in (min, max))
            )
            said.append(f"Error {dots.label}: from {least} to {most}.")
            drawn = [_drawable(known[field]) if field in known else None for _, known in rows]
            kinds.append(replace(dots, values=drawn))

    def draw(canvas: "FigureBase") -> None:
        axes = canvas.subplots()
        draw_dots(axes, [_brief(layer) for layer, _ in rows], kinds, "‖y' - y‖² / ‖y‖²")
        for place, (_, known) in enumerate(rows):
            if all(field in known for field in HELDOUT):
                before, after = (_drawable(known[field]) for field in HELDOUT)
                axes.hlines(place, before, after, color=ROLES["muted"], linewidth=0.8, zorder=1)
        canvas.legend(loc="outside upper left", fontsize=FONT)

    row = min(max(TALLEST / len(rows), LEAST_ROW), MOST_ROW)
    size = (WIDTH, 0.17 * len(kinds) + row * len(rows) + 0.6)
    drawing = Drawing("Reconstruction error by layer", " ".join(said), size, draw)
    corrected = any(HELDOUT[1] in known for _, known in rows)
    caption = (
        f"Squared error of the compressed MoE block's output over the squared output of the base's{_tokens(data)}, "
        "on the base's own inputs; 0 is no change."
        + (" Held-out errors are those of the reconstruction, on tokens that it did not see." if corrected else "")
    )
    return Figure("errors", "Reconstruction error of each layer", caption, (drawing,))


def phases(data: Report) -> dict[str, float]:
    """Seconds of the run's phases, those that took any, without a sum of the others."""
    return {
        name: value for name, value in data.seconds.items() if name != "total" and math.isfinite(value) and value >= 0
    }


def times(data: Report) -> Figure | None:
    """One bar of the time by phase; none without a record."""
    parts = phases(data)
    if not (total := sum(parts.values())):
        return None
    said = ", ".join(f"{name} {value:.1f} s ({100 * value / total:.0f}%)" for name, value in parts.items())
    drawing = Drawing(
        "Time by phase",
        f"{counted(len(parts), 'phase')} in {total:.1f} seconds: {said}.",
        (WIDTH, 0.7),
        lambda canvas: draw_parts(canvas.subplots(), list(parts.values()), "s"),
        margins=(0.05, 0.3, 0.05, 0.1),
    )
    return Figure("times", "Time by phase", "The numbers are those of the table's rows.", (drawing,))


def distillation(data: Report) -> Figure | None:
    """For each distillation its curve on held-out text, with the state that was taken; None without two evaluations."""
    drawings = []
    for step in data.steps:
        if step.get("name") != "distill" or len(points := curve(step)) < 2:
            continue
        best = result_of(step).get("best") if changed(step) else None
        taken = next((point for point in points if point[0] == best), None)
        (first, before, _), (last, after, _) = points[0], points[-1]
        chosen = f"the state after {taken[0]} was taken, at {short(taken[1])}" if taken else "nothing was changed"
        ends = f"{short(before)} after {first} steps, {short(after)} after {last}"
        alt = f"{counted(len(points), 'evaluation')}: {ends}; {chosen}."

        def draw(canvas: "FigureBase", points: Sequence[Any] = points, taken: Any = taken) -> None:
            axes, steps = canvas.add_subplot(), [step for step, *_ in points]
            apart = [_drawable(value) for _, value, _ in points]
            axes.axhline(apart[0], color=ROLES["muted"], linewidth=0.8, linestyle="dashed")
            draw_lines(axes, [Line("held out", steps, apart, ROLES["after"], marker="o")], first_is_start=False)
            if taken is not None:
                ring: dict[str, Any] = {
                    "marker": "o",
                    "markersize": 11,
                    "markerfacecolor": "none",
                    "color": ROLES["good"],
                }
                axes.plot([taken[0]], [_drawable(taken[1])], **ring)
            axes.set_xticks(spaced(steps))
            axes.set_xlabel("steps")
            axes.set_ylabel("nats per token from the base")
            axes.grid(axis="y")

        drawings.append(Drawing("KL from the base", alt, CURVE, draw))
    if not drawings:
        return None
    caption = (
        "KL divergence from the base's next-token distributions, on text that was not trained on; the dashed line is "
        "where training began, a ring the state that was taken."
    )
    return Figure("distillation", "Held-out text during the distillation", caption, tuple(drawings))


MADE: Mapping[str, Callable[[Report], Figure | None]] = {
    "sizes": sizes,
    "experts": experts,
    "similarity": similarity,
    "visits": visits,
    "errors": errors,
    "distillation": distillation,
    "gate": lambda data: gate_figure(data.gate) if data.gate else None,
    "times": times,
}
NAMES = tuple(MADE)  # in the order of the page


def figures(data: Report, names: Sequence[str] = NAMES) -> tuple[Figure, ...]:
    """The figures of these names that the data gives, by default all in the order of the page."""
    return tuple(figure for name in names if (figure := MADE[name](data)) is not None)
