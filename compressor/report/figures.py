"""The figures of a report: the same drawings for the page, as SVG, and for a model card, as PNG."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from compressor.document.blocks import Figure
from compressor.drawing.bars import draw_bars, draw_left, draw_parts
from compressor.drawing.dots import Dots, draw_dots
from compressor.drawing.lines import Line, draw_lines, spaced
from compressor.drawing.palette import FONT, ROLES, draw_key
from compressor.drawing.picture import Drawing
from compressor.gates.document import gate_figure
from compressor.recipe.document import changed, result_of
from compressor.report.data import LayerReport, Load, ReportData
from compressor.report.layers import brief_end, named, roles, share
from compressor.report.matrices import experts, similarity
from compressor.steps.distill.describe import Evaluation, curve
from compressor.words import counted, human_bytes, human_count, readable, short
from compressor.words import share as part_of

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
    HELDOUT[0]: Dots("held-out, before correction", (), "before", "D", False),
    HELDOUT[1]: Dots("held-out, after correction", (), "merged", "D"),
}
Row = tuple[str, Mapping[str, float]]  # a layer's name, and its errors by field, those that are known and finite


def size_rows(data: ReportData) -> list[tuple[str, float, float, str, str]]:
    """What got smaller: name, before and after as numbers and in words."""
    (a, b), (c, d) = data.parameters, data.nbytes
    return [
        (
            "experts per MoE layer",
            data.experts_before,
            data.experts_after,
            f"{data.experts_before:,}",
            f"{data.experts_after:,}",
        ),
        ("parameters", a, b, human_count(a), human_count(b)),
        ("size on disk", c, d, human_bytes(c), human_bytes(d)),
    ]


def sizes(data: ReportData) -> Figure:
    """Bars of what is left of experts, parameters and bytes."""
    rows = size_rows(data)
    said = [f"{name}: {first} before, {second} after, {part_of(b, a)} is left" for name, a, b, first, second in rows]
    bars = [(name, b / a if a else 0.0, f"{first} → {second} ({part_of(b, a)})") for name, a, b, first, second in rows]
    drawing = Drawing(
        "Sizes before and after",
        f"{'; '.join(said)}.",
        (WIDTH, 1.5),
        lambda canvas: draw_left(canvas.subplots(), bars),
        margins=(0.05,) * 4,
    )
    caption = "The whole bar is the source, the filled part what the compressed model has of it."
    return Figure("sizes", "What is left of experts, parameters and bytes", caption, (drawing,))


def visits(data: ReportData) -> Figure | None:
    """A legend, and for each layer with visits the share of every expert and slot; none if nothing was counted.

    As figure 6 of Zhang et al. 2024, arXiv:2407.09590, all on one scale.
    """
    shown = [(layer, name) for layer, name in named(data.layers) if layer.visits_before or layer.visits_after]
    if not shown:
        return None
    highest = max(max((*(layer.visits_before or ()), *(layer.visits_after or ()))) for layer, _ in shown) or 1.0
    kinds = [kind for kind in ("kept", "merged", "dropped") if any(kind in roles(layer) for layer, _ in shown)]
    looks = [
        (
            "slot after" if kind == "after" else kind,
            {"facecolor": ROLES["paper" if kind == "dropped" else kind], "edgecolor": ROLES[kind]},
        )
        for kind in (*kinds, "after")
    ]
    legend = Drawing(
        "What the bars are",
        f"Bars of the source's experts by what became of them: {', '.join(kinds)}; the compressed model's slots below. "
        f"All bars are on one scale up to {share(highest)}.",
        (WIDTH, 0.3),
        partial(draw_key, looks=looks, ncols=4),
        is_legend=True,
        margins=(0.0,) * 4,
    )
    drawings = [
        Drawing(
            name,
            visit_alt(layer),
            VISITS,
            partial(_draw_visits, layer=layer, name=name, highest=highest),
            margins=(0.42, 0.2, 0.1, 0.32),
        )
        for layer, name in shown
    ]
    caption = (
        f"Share of the routed tokens{_tokens(data)}: the source's experts above, the compressed model's slots below, "
        "each model with its own routing; the dashed line is an even share."
    )
    return Figure("visits", "Visits of the experts before, and of the slots after", caption, (legend, *drawings))


def _tokens(data: ReportData) -> str:
    text = f" of {data.measured_text}" if data.measured_text else ""
    return f" on {counted(data.measured_tokens, 'token')}{text}" if data.measured_tokens else ""


def visit_alt(layer: LayerReport) -> str:
    """What a layer's bars show, in numbers."""
    before = _side("Before", "expert", layer.visits_before, layer.load_before)
    return f"{before} {_side('After', 'slot', layer.visits_after, layer.load_after)}"


def _side(when: str, unit: str, visits: Sequence[float] | None, load: Load | None) -> str:
    if not visits:
        return f"{when}: not counted."
    if load is None:
        return f"{when}: {counted(len(visits), unit)}, which no token reached."
    most, least = max(visits), min(visits)
    return (
        f"{when}: {counted(len(visits), unit)}, from {share(least)} ({unit} {list(visits).index(least)}) to "
        f"{share(most)} ({unit} {list(visits).index(most)}); maximum {short(load.maximum_to_mean)} times the mean, "
        f"entropy {short(load.entropy)}."
    )


def _draw_visits(canvas: "FigureBase", layer: LayerReport, name: str, highest: float) -> None:
    above, below = canvas.subplots(2, 1, gridspec_kw={"hspace": 0.75})
    above.set_title(readable(brief_end(name)), loc="left", fontweight="bold", pad=6)
    sides = (above, layer.visits_before, "before", roles(layer)), (below, layer.visits_after, "after", None)
    for axes, visits, when, kinds in sides:
        axes.set(xlim=(-0.6, layer.experts - 0.4), ylim=(0, 1.02 * highest), xticks=[])
        axes.set_yticks([0, highest], labels=["0", share(highest)])
        axes.set_title(when, loc="right", pad=2, color=ROLES["muted"])
        if visits:
            draw_bars(axes, visits, kinds or ["after"] * len(visits), 1 / len(visits))
        else:
            axes.spines["left"].set_visible(False)
            axes.text(0.0, highest / 2, "not counted", color=ROLES["muted"], va="center")


def errors(data: ReportData) -> Figure | None:
    """Dots of each layer's errors; none where no error is known."""
    rows: list[Row] = []
    for layer, name in named(data.layers):
        found = {field: getattr(layer, field) for field in ERRORS}
        if known := {field: value for field, value in found.items() if value is not None and math.isfinite(value)}:
            rows.append((name, known))
    if not rows:
        return None
    row = min(max(TALLEST / len(rows), LEAST_ROW), MOST_ROW)
    kinds = len({field for _, values in rows for field in values})
    size = (WIDTH, 0.17 * kinds + row * len(rows) + 0.6)
    drawing = Drawing("Reconstruction error by layer", error_alt(rows), size, partial(_draw_errors, rows=rows))
    corrected = any(HELDOUT[1] in values for _, values in rows)
    caption = (
        f"Squared error of the compressed MoE block's output over the squared output of the source's{_tokens(data)}, "
        "on the source's own inputs; 0 is no change."
        + (" Held-out errors are those of the correction, on tokens that it did not see." if corrected else "")
    )
    return Figure("errors", "Reconstruction error of each layer", caption, (drawing,))


def error_alt(rows: Sequence[Row]) -> str:
    """The least and the greatest error of each kind."""
    said = []
    for field, dots in ERRORS.items():
        if known := [(values[field], name) for name, values in rows if field in values]:
            (least, first), (most, last) = (choose(known, key=lambda each: each[0]) for choose in (min, max))
            said.append(f"Error {dots.label}: from {short(least)} ({first}) to {short(most)} ({last}).")
    return " ".join(said)


def _draw_errors(canvas: "FigureBase", rows: Sequence[Row]) -> None:
    axes = canvas.subplots()
    rows = [
        (name, {field: min(max(value, -FARTHEST), FARTHEST) for field, value in known.items()}) for name, known in rows
    ]
    kinds = [
        replace(dots, values=[values.get(field) for _, values in rows])
        for field, dots in ERRORS.items()
        if any(field in values for _, values in rows)
    ]
    draw_dots(axes, [brief_end(name) for name, _ in rows], kinds, "‖y' - y‖² / ‖y‖²")
    for place, (_, values) in enumerate(rows):
        if all(field in values for field in HELDOUT):
            axes.hlines(place, values[HELDOUT[0]], values[HELDOUT[1]], color=ROLES["muted"], linewidth=0.8, zorder=1)
    canvas.legend(loc="outside upper left", fontsize=FONT)


def phases(data: ReportData) -> list[tuple[str, float]]:
    """Phases of the run and their seconds, those that took any, without a sum of the others."""
    taken = ((name, value) for name, value in data.seconds.items() if name != "total")
    return [(name, value) for name, value in taken if math.isfinite(value) and value >= 0]


def times(data: ReportData) -> Figure | None:
    """One bar of the time by phase; none without a record."""
    found = phases(data)
    total = sum(value for _, value in found)
    if not total:
        return None
    said = ", ".join(f"{name} {value:.1f} s ({100 * value / total:.0f}%)" for name, value in found)
    alt = f"{counted(len(found), 'phase')} in {total:.1f} seconds: {said}."
    parts = [value for _, value in found]
    drawing = Drawing(
        "Time by phase",
        alt,
        (WIDTH, 0.7),
        lambda canvas: draw_parts(canvas.subplots(), parts, "s"),
        margins=(0.05, 0.3, 0.05, 0.1),
    )
    return Figure("times", "Time by phase", "The numbers are those of the table's rows.", (drawing,))


def distillation(data: ReportData) -> Figure | None:
    """For each distillation its curve on held-out text, with the state that was taken; None without two evaluations."""
    drawings = []
    for step in data.steps:
        if step.get("name") != "distill" or len(found := curve(step)) < 2:
            continue
        best = result_of(step).get("best")
        taken = next((entry for entry in found if entry[0] == best), None) if changed(step) else None
        (first, before, _), (last, after, _) = found[0], found[-1]
        chosen = f"the state after {taken[0]} was taken, at {short(taken[1])}" if taken else "nothing was changed"
        ends = f"{short(before)} after {first} steps, {short(after)} after {last}"
        alt = f"{counted(len(found), 'evaluation')}: {ends}; {chosen}."
        drawings.append(Drawing("KL from the base", alt, CURVE, partial(_draw_curve, found=found, taken=taken)))
    if not drawings:
        return None
    caption = (
        "KL divergence from the base's next-token distributions, on text that was not trained on; the dashed line is "
        "where training began, a ring the state that was taken."
    )
    return Figure("distillation", "Held-out text during the distillation", caption, tuple(drawings))


def _draw_curve(canvas: "FigureBase", found: Sequence[Evaluation], taken: Evaluation | None) -> None:
    axes = canvas.add_subplot()
    steps = [step for step, *_ in found]
    apart = [min(max(value, -FARTHEST), FARTHEST) for _, value, _ in found]
    axes.axhline(apart[0], color=ROLES["muted"], linewidth=0.8, linestyle="dashed")
    draw_lines(axes, [Line("held out", steps, apart, ROLES["after"], marker="o")], first_is_start=False)
    if taken is not None:
        place = min(max(taken[1], -FARTHEST), FARTHEST)
        axes.plot([taken[0]], [place], marker="o", markersize=11, markerfacecolor="none", color=ROLES["good"])
    axes.set_xticks(spaced(steps))
    axes.set_xlabel("steps")
    axes.set_ylabel("nats per token from the base")
    axes.grid(axis="y")


def gate(data: ReportData) -> Figure | None:
    """The gate's own figure; none without a gate."""
    return gate_figure(data.gate) if data.gate else None


MADE: Mapping[str, Callable[[ReportData], Figure | None]] = {
    "sizes": sizes,
    "experts": experts,
    "similarity": similarity,
    "visits": visits,
    "errors": errors,
    "distillation": distillation,
    "gate": gate,
    "times": times,
}
NAMES = tuple(MADE)  # in the order of the page


def figures(data: ReportData, names: Sequence[str] = NAMES) -> tuple[Figure, ...]:
    """The figures of these names that the data gives, by default all in the order of the page."""
    return tuple(figure for name in names if (figure := MADE[name](data)) is not None)
