"""The figures of a report: the same drawings for the page, as SVG, and for a model card, as PNG."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain, cycle
from typing import TYPE_CHECKING, Any

import numpy as np

from compressor.document.blocks import Figure
from compressor.document.drawing import (
    COLOURS,
    HEAT,
    ROLES,
    draw_bars,
    draw_heat,
    draw_key,
    ink_on,
    label_axes,
    scale_axis,
)
from compressor.document.picture import FONT, Drawing
from compressor.formatting import counted, percent, readable, short
from compressor.report.data import (
    ERRORS,
    LayerReport,
    Report,
    order,
    within,
)
from compressor.steps.dispositions import all_dispositions, gone
from compressor.steps.section import is_changed

if TYPE_CHECKING:
    from matplotlib.figure import FigureBase

WIDTH = 3.6  # inches
LARGEST = 1e30  # what is larger no axis holds; the tables have it
DRAWN_ERRORS: Mapping[str, Mapping[str, Any]] = {  # how fields of a layer are drawn
    "error": {"color": ROLES["after"], "marker": "o"},
    "heldout_error_before": {
        "color": ROLES["before"],
        "marker": "D",
        "markerfacecolor": ROLES["paper"],
    },
    "heldout_error_after": {"color": ROLES["merged"], "marker": "D"},
}
GRID = (9.6, 8.0)  # inches of the grid of experts at the most, as far as the least cell allows
LEAST_CELL, MOST_CELL = 0.06, 0.26
KEPT = "#d0d5da"
# one fewer than colours, so that a row's first 72 groups differ in one or the other
MARKS = "osD^vP<>"
SIDE = 2.1  # inches of a matrix
LEVELS = 64  # of the colour scale, few enough for small images
MOST_NUMBERED = 24  # experts whose numbers fit
MOST_LABELS = 60  # of rows, that do not touch
MOST_LETTERS = 24  # at the end of a layer's name, where modules differ
DASHES = (0, (3, 2))


def cells(layer: LayerReport) -> list[tuple[str, str]]:
    """Return colour and mark of a layer's experts [E]: the same of all merged into one, no mark of
    a kept one."""
    looks = [(ROLES["paper"], "x")] * layer.plan.experts
    changed = zip(cycle(COLOURS), cycle(MARKS), strict=False)
    for group in layer.plan.groups:
        look = (KEPT, "") if group.untouched else next(changed)
        for member in group.members:
            looks[member] = look
    return looks


def experts(data: Report) -> Figure | None:
    """Return the grid of all experts: a row for each layer, a column for each expert of the
    base."""
    layers = data.layers
    rows, columns = len(layers), max((layer.plan.experts for layer in layers), default=0)
    if not layers:
        return None
    cell = max(LEAST_CELL, min(MOST_CELL, GRID[0] / columns, GRID[1] / rows))
    looks: list[tuple[str, Any]] = [
        ("kept", {"facecolor": KEPT}),
        ("merged into one: same colour and mark in a row", {"facecolor": COLOURS[0]}),
        (
            f"cross: {gone(layer.plan for layer in layers)}",
            {"marker": "x", "color": ROLES["ink"], "linestyle": "none", "markersize": 5},
        ),
        ("frame: protected", {"fill": False, "edgecolor": ROLES["ink"]}),
    ]

    def draw(canvas: "FigureBase") -> None:
        from matplotlib.colors import to_rgb

        axes = canvas.subplots()
        shades = np.ones((rows, columns, 3))
        signs = dict[tuple[str, str], list[Any]]()
        for row, layer in enumerate(layers):
            for column, (colour, mark) in enumerate(cells(layer)):
                shades[row, column] = to_rgb(colour)
                if mark:
                    signs.setdefault((mark, ink_on(colour)), []).append((column, row))
        axes.imshow(shades, interpolation="none")
        axes.hlines(
            np.arange(rows + 1) - 0.5, -0.5, columns - 0.5, color="white", linewidth=6 * cell
        )
        axes.vlines(
            np.arange(columns + 1) - 0.5, -0.5, rows - 0.5, color="white", linewidth=6 * cell
        )
        for (mark, colour), places in signs.items():
            xs, ys = zip(*places, strict=True)
            axes.scatter(
                xs,
                ys,
                s=(36 * cell) ** 2,
                c=colour,
                marker=mark,
                linewidths=max(0.4, 3 * cell),
            )
        protected = [
            (column, row) for row, layer in enumerate(layers) for column in layer.protected
        ]
        if protected:
            width = max(0.6, 5 * cell)
            xs, ys = zip(*protected, strict=True)
            axes.scatter(
                xs,
                ys,
                s=(66 * cell - width) ** 2,
                marker="s",
                facecolors="none",
                edgecolors=ROLES["ink"],
                linewidths=width,
            )
        axes.set(xlim=(-0.5, columns - 0.5), ylim=(rows - 0.5, -0.5))
        names = [str(layer.plan.layer) for layer in layers]
        label_axes(axes, names, list(map(str, range(columns))), cell * columns, cell * rows)
        axes.set_ylabel("layer")
        axes.set_xlabel("expert of the base", loc="left")
        draw_key(canvas, looks, loc="outside upper left")

    became = all_dispositions([layer.plan for layer in layers])
    size = (max(cell * columns + 0.7, WIDTH), cell * rows + 1.3)
    alt = (
        f"Grid of {counted(rows, 'MoE layer')} by {columns} experts: {became}. The table has "
        "the same in numbers."
    )
    drawing = Drawing("What became of each expert", alt, size, draw)
    caption = f"A row for each MoE layer, a column for each expert of the base; {became}."
    return Figure("experts", "What became of each expert", caption, (drawing,))


def similarity_figure(reports: Sequence[LayerReport], name: str, title: str) -> Figure | None:
    """Return a matrix for each layer that has one; None if no layer has.

    As figure 2 of Zhang et al. 2024, "Diversifying the Expert Knowledge for Task-Agnostic Pruning
    in Sparse Mixture-of-Experts", arXiv:2407.09590: experts in the order of their groups, which are
    outlined."""
    from matplotlib import colormaps
    from matplotlib.patches import Rectangle
    from matplotlib.patheffects import withStroke

    layers = [layer for layer in reports if layer.similarity is not None]
    if not layers:
        return None
    low, high = limits(layers)
    shades = colormaps[HEAT].resampled(LEVELS)

    def draw(canvas: "FigureBase", layer: LayerReport) -> None:
        axes = canvas.subplots()
        experts = order(layer.plan)
        count = len(experts)
        dropped = layer.plan.dropped
        ordered = np.array(layer.similarity)[np.ix_(experts, experts)]
        draw_heat(axes, ordered, low, high, cmap=shades)
        outlines = list[tuple[int, int, Any]]()
        start = 0
        for size in sorted(map(len, layer.plan.merged), reverse=True):
            outlines.append((start, size, "solid"))
            start += size
        if dropped:
            outlines.append((count - len(dropped), len(dropped), DASHES))
        for start, size, style in outlines:
            outline = Rectangle(
                (start - 0.5, start - 0.5),
                size,
                size,
                linestyle=style,
                # white on black, which any colour shows
                path_effects=[withStroke(linewidth=1.8, foreground="#0b0d10")],
                edgecolor="#fefefe",
                linewidth=0.8,
                fill=False,
                clip_on=False,
            )
            axes.add_patch(outline)
        axes.set_title(readable(layer.name[-MOST_LETTERS:]), loc="left", fontweight="bold")
        axes.spines[:].set_visible(False)
        axes.set(xticks=[], yticks=[])
        if count > MOST_NUMBERED:
            axes.set_xlabel(f"{count} experts, groups first", loc="left", color=ROLES["muted"])
            return
        signs = dict.fromkeys(layer.protected, "★") | dict.fromkeys(dropped, "✕")
        axes.set_yticks(range(count), labels=[f"{signs.get(each, '')}{each}" for each in experts])
        axes.set_xticks(range(count), labels=list(map(str, experts)), rotation=90)
        axes.tick_params(length=0, pad=2, labelsize=min(FONT - 1.0, SIDE * 72 / count / 1.1))

    drawings = []
    for layer in layers:
        alt = f"{all_dispositions([layer.plan])}; the tables have the numbers."
        drawings.append(
            Drawing(layer.name, alt, (SIDE + 0.4, SIDE + 0.5), partial(draw, layer=layer))
        )
    labels = ", ".join(
        dict.fromkeys(layer.similarity_label for layer in layers if layer.similarity_label)
    )
    caption = (
        "A square for each layer shows how similar the base's experts "
        f"are{f' ({labels})' if labels else ''}. They are ordered so that merged ones lie side by "
        "side, in solid outlines; a dashed one holds the dropped. ✕ marks a dropped expert, ★ a "
        "protected one."
    )
    return Figure(name, f"{title}, from {low:g} (dark) to {high:g} (light)", caption, drawings)


def limits(layers: Iterable[LayerReport]) -> tuple[float, float]:
    """Return a scale in tenths that holds all similarities but those of experts with themselves."""
    similarities = chain.from_iterable(map(within, layers))
    finite = list(filter(math.isfinite, similarities))
    low = math.floor(10 * min(finite, default=0)) / 10
    high = math.ceil(10 * max(finite, default=1)) / 10
    return low, max(high, low + 0.1)


def visits(data: Report) -> Figure | None:
    """Return for each layer the share of tokens of every expert and slot; None if nothing was
    counted.

    As figure 6 of Zhang et al. 2024, arXiv:2407.09590, all on one scale.
    """
    layers = [layer for layer in data.layers if layer.visits_before or layer.visits_after]
    if not layers:
        return None
    shares = chain.from_iterable(
        (*(layer.visits_before or ()), *(layer.visits_after or ())) for layer in layers
    )
    highest = max(shares) or 1.0

    def draw(canvas: "FigureBase", layer: LayerReport) -> None:
        above, below = canvas.subplots(2, 1)
        above.set_title(readable(layer.name[-MOST_LETTERS:]), loc="left", fontweight="bold", pad=6)
        roles = ["kept"] * layer.plan.experts
        for expert in layer.plan.dropped:
            roles[expert] = "dropped"
        for expert in chain(*layer.plan.merged):
            roles[expert] = "merged"
        sides = (
            (above, layer.visits_before, "before", roles),
            (below, layer.visits_after, "after", ["after"] * len(layer.plan.groups)),
        )
        for axes, shares, when, colours in sides:
            axes.set(xlim=(-0.6, layer.plan.experts - 0.4), ylim=(0, 1.02 * highest), xticks=[])
            axes.set_yticks([0, highest], labels=["0", percent(highest)])
            axes.set_title(when, loc="right", pad=2, color=ROLES["muted"])
            if shares:
                draw_bars(axes, shares, colours, 1 / len(shares))
            else:
                axes.text(0.0, highest / 2, "not counted", color=ROLES["muted"], va="center")

    drawings = []
    for layer in layers:
        alt = f"{all_dispositions([layer.plan])}; the table below has the shares."
        drawings.append(Drawing(layer.name, alt, (2.5, 2.0), partial(draw, layer=layer)))
    read = f" on {data.measured_on}" if data.measured_tokens else ""
    title = (
        "Routed tokens: grey kept, purple merged, hollow dropped experts before; blue slots after"
    )
    caption = (
        f"Share of the routed tokens{read}: the base's experts above, the compressed model's slots "
        "below, each model with its own routing; the dashed line is an even share."
    )
    return Figure("visits", title, caption, drawings)


def errors(data: Report) -> Figure | None:
    """Return dots of each layer's errors; None if no error is known."""
    drawn = dict[str, Any]()  # an array for each kind of error, NaN where none is known
    alts = []
    for field in DRAWN_ERRORS:
        values = np.array([getattr(layer, field) for layer in data.layers], dtype=float)
        known = values[abs(values) < LARGEST]
        if known.size:
            drawn[field] = np.where(abs(values) < LARGEST, values, math.nan)
            least, most = short(float(known.min())), short(float(known.max()))
            alts.append(f"{ERRORS[field].capitalize()}: from {least} to {most}.")
    if not drawn:
        return None
    rows = len(data.layers)

    def draw(canvas: "FigureBase") -> None:
        axes = canvas.subplots()
        for field, values in drawn.items():
            style = {"linestyle": "none", **DRAWN_ERRORS[field]}
            axes.plot(values, range(rows), label=ERRORS[field], **style)
        scale = scale_axis(axes, "x", np.concatenate([*drawn.values()]).tolist())
        axes.set_xlabel(f"‖y' - y‖² / ‖y‖², {scale}" if scale else "‖y' - y‖² / ‖y‖²")
        axes.set_ylim(rows - 0.5, -0.5)
        names = [readable(layer.name[-MOST_LETTERS:]) for layer in data.layers]
        step = math.ceil(rows / MOST_LABELS)
        axes.set_yticks(range(0, rows, step), labels=names[::step])
        axes.grid(axis="x")
        canvas.legend(loc="outside upper left", fontsize=FONT)

    size = (WIDTH, 0.17 * len(drawn) + min(max(7.0 / rows, 0.13), 0.26) * rows + 0.6)
    read = f" on {data.measured_on}" if data.measured_tokens else ""
    drawing = Drawing("Reconstruction error by layer", " ".join(alts), size, draw)
    caption = (
        "Squared error of the compressed MoE block's output over the squared output of the "
        f"base's{read}, on the base's own inputs; 0 is no change."
    )
    if "heldout_error_after" in drawn:
        caption += (
            " Held-out errors are those of the reconstruction, on tokens that it did not see."
        )
    return Figure("errors", "Reconstruction error of each layer", caption, (drawing,))


def distillation(data: Report) -> Figure | None:
    """Return each distillation's curve on held-out text and the state it took; None without two
    evaluations."""

    def draw(canvas: "FigureBase", points: Mapping[int, float], best: Any) -> None:
        axes = canvas.add_subplot()
        axes.axhline(
            next(iter(points.values())), color=ROLES["muted"], linewidth=0.8, linestyle="dashed"
        )
        axes.plot(
            [*points], [*points.values()], color=ROLES["after"], marker="o", markeredgecolor="white"
        )
        if best in points:
            ring: dict[str, Any] = {"marker": "o", "markersize": 11, "markerfacecolor": "none"}
            axes.plot([best], [points[best]], color=ROLES["good"], **ring)
        axes.locator_params(axis="x", integer=True)
        axes.set_xlabel("steps")
        axes.set_ylabel("nats per token from the base")
        axes.grid(axis="y")

    drawings = []
    for step in data.plan.of("distill"):
        curve = (step.result or {}).get("curve", ())
        measured = {evaluation["step"]: float(evaluation["kl"]) for evaluation in curve}
        points = {number: value for number, value in measured.items() if abs(value) < LARGEST}
        if step.result is None or len(points) < 2:
            continue
        best = step.result["best"] if is_changed(step) else None
        chosen = (
            "nothing was changed"
            if best is None
            else f"the state after {best} was taken, at {short(points[best])}"
        )
        (first, before), *_, (last, after) = points.items()
        alt = (
            f"{counted(len(points), 'evaluation')}: {short(before)} after {first} steps, "
            f"{short(after)} after {last}; {chosen}."
        )
        drawings.append(
            Drawing("KL from the base", alt, (WIDTH, 2.2), partial(draw, points=points, best=best))
        )
    if not drawings:
        return None
    caption = (
        "KL divergence from the base's next-token distributions, on text that was not trained on; "
        "the dashed line is where training began, a ring the state that was taken."
    )
    return Figure("distillation", "Held-out text during the distillation", caption, drawings)


FIGURES: Mapping[str, Callable[[Report], Figure | None]] = {
    "experts": experts,
    "similarity": lambda data: similarity_figure(
        data.layers, "similarity", "Similarity of the experts"
    ),
    "visits": visits,
    "errors": errors,
    "distillation": distillation,
}
NAMES = tuple(FIGURES)  # in the order of the page


def figures(data: Report, names: Sequence[str] = NAMES) -> tuple[Figure, ...]:
    """Return the figures of these names that the data gives, by default all in the order of the
    page."""
    return tuple(filter(None, (FIGURES[name](data) for name in names)))
