"""The bars of a report: sizes, visits of experts and slots, and time by phase."""

import math
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from compressor.report.data import LayerReport, Load, ReportData
from compressor.report.drawing import FONT, Panel, Sheet, colour
from compressor.report.layers import brief_end, fates, named, share, short
from compressor.words import counted, human_bytes, human_count

if TYPE_CHECKING:
    from matplotlib.axes import Axes

VISITS = (2.52, 2.05)  # inches of a layer's drawing
LEGEND, SIZES, TIMES = (3.8, 0.34), (3.9, 1.5), (3.9, 0.8)
KINDS = ("kept", "merged", "dropped")
LEAST_LABELLED = 0.06  # share of the whole time that has room for its number


def size_rows(data: ReportData) -> list[tuple[str, float, float, str, str]]:
    """What got smaller: name, before and after as numbers and in words."""
    (a, b), (c, d) = data.parameters, data.nbytes
    return [
        ("experts per MoE layer", data.experts_before, data.experts_after, f"{data.experts_before:,}",
         f"{data.experts_after:,}"),
        ("parameters", a, b, human_count(a), human_count(b)),
        ("size on disk", c, d, human_bytes(c), human_bytes(d)),
    ]  # fmt: skip


def left(before: float, after: float) -> str:
    """What is left of it: 16, 12 -> '75.0%'."""
    return f"{100 * after / before:.1f}%" if before else "-"


def size_parts(data: ReportData) -> tuple[Panel, ...]:
    """Bars of what is left of experts, parameters and bytes."""
    said = [
        f"{name}: {first} before, {second} after, {left(a, b)} is left" for name, a, b, first, second in size_rows(data)
    ]
    return (Panel("Sizes before and after", f"{'; '.join(said)}.", SIZES, partial(_draw_sizes, data=data)),)


def _draw_sizes(sheet: Sheet, data: ReportData) -> None:
    rows = size_rows(data)
    axes = sheet.axes(0.05, 0.05, SIZES[0] - 0.1, SIZES[1] - 0.1)
    axes.set(xlim=(0, 1.0), ylim=(len(rows) - 0.35, -0.6))
    axes.set_axis_off()
    for place, (name, before, after, first, second) in enumerate(rows):
        part = min(after / before, 1.0) if before else 0.0
        axes.barh(place + 0.12, 1.0, 0.34, facecolor=colour("faint"), edgecolor="none")
        axes.barh(place + 0.12, part, 0.34, facecolor=colour("after"), edgecolor="none")
        axes.text(0, place - 0.16, name, fontweight="bold", va="bottom")
        axes.text(1, place - 0.16, f"{first} → {second} ({left(before, after)})", ha="right", va="bottom")


def visit_parts(data: ReportData) -> tuple[Panel, ...]:
    """A legend, and for each layer with visits the share of every expert and slot; none if nothing was counted.

    As figure 6 of Zhang et al. 2024, arXiv:2407.09590, all on one scale.
    """
    shown = [(layer, name) for layer, name in named(data.layers) if layer.visits_before or layer.visits_after]
    if not shown:
        return ()
    highest = max(max((*(layer.visits_before or ()), *(layer.visits_after or ()))) for layer, _ in shown) or 1.0
    kinds = [kind for kind in KINDS if any(kind in _kinds(layer) for layer, _ in shown)]
    legend = Panel(
        "What the bars are",
        f"Bars of the source's experts by what became of them: {', '.join(kinds)}; the compressed model's slots below. "
        f"All bars are on one scale up to {share(highest)}.",
        LEGEND, partial(_draw_legend, kinds=kinds), is_legend=True,
    )  # fmt: skip
    return (
        legend,
        *(Panel(name, visit_alt(layer), VISITS, partial(_draw_visits, layer=layer, name=name, highest=highest))
          for layer, name in shown),
    )  # fmt: skip


def _kinds(layer: LayerReport) -> list[str]:
    """Kept, merged or dropped: [E]."""
    return ["kept" if fate.startswith("protected") else fate.split()[0] for fate in fates(layer).values()]


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


def _draw_visits(sheet: Sheet, layer: LayerReport, name: str, highest: float) -> None:
    width, height = VISITS[0] - 0.56, 0.62
    sheet.text(0.42, VISITS[1] - 0.18, brief_end(name), fontweight="bold")
    above, below = sheet.axes(0.42, 1.12, width, height), sheet.axes(0.42, 0.22, width, height)
    for axes, visits, label in ((above, layer.visits_before, "before"), (below, layer.visits_after, "after")):
        _frame(axes, layer.experts, highest, label)
        if not visits:
            axes.text(0.0, highest / 2, "not counted", color=colour("muted"), va="center")
            continue
        kinds = _kinds(layer) if label == "before" else ["after"] * len(visits)
        for kind in dict.fromkeys(kinds):
            _bars(axes, [value if own == kind else math.nan for value, own in zip(visits, kinds, strict=True)], kind)
        even, right = 1 / len(visits), len(visits) - 0.5
        axes.hlines(even, -0.5, right, color=colour("muted"), linewidth=0.7, linestyles=(0, (3, 2)))
        axes.set_xticks(sorted({0, len(visits) - 1}))


def _frame(axes: "Axes", experts: int, highest: float, label: str) -> None:
    axes.set(xlim=(-0.6, experts - 0.4), ylim=(0, 1.02 * highest))
    axes.set_yticks([0, highest], labels=["0", share(highest)])
    axes.tick_params(labelsize=FONT - 1, pad=2)
    axes.spines["left"].set_visible(False)
    axes.set_title(label, fontsize=FONT, loc="right", pad=2, color=colour("muted"))


def _bars(axes: "Axes", values: Sequence[float], kind: str) -> None:
    """One path for all bars, which keeps the page small; NaN leaves a bar out, and dropped ones are hollow."""
    edges = [place + side for place in range(len(values)) for side in (-0.4, 0.4)]
    heights = [height for value in values for height in (value, math.nan)][:-1]
    style = {"linewidth": 0.7} if kind == "dropped" else {"fill": True, "linewidth": 0}
    axes.stairs(heights, edges, color=colour(kind), **style)


def _draw_legend(sheet: Sheet, kinds: Sequence[str]) -> None:
    x = 0.42
    for kind, said in (*((kind, kind) for kind in kinds), ("after", "slot after")):
        axes = sheet.axes(x, 0.12, 0.16, 0.13)
        axes.set(xlim=(-0.5, 0.5), ylim=(0, 1.05))
        axes.set_axis_off()
        _bars(axes, [1.0], kind)
        sheet.text(x + 0.22, 0.19, said, va="center_baseline")
        x += 0.82


def phases(data: ReportData) -> list[tuple[str, float]]:
    """Phases of the run and their seconds, those that took any, without a sum of the others."""
    taken = ((name, value) for name, value in data.seconds.items() if name != "total")
    return [(name, value) for name, value in taken if math.isfinite(value) and value >= 0]


def time_parts(data: ReportData) -> tuple[Panel, ...]:
    """One bar of the time by phase; none without a record."""
    found = phases(data)
    total = sum(value for _, value in found)
    if not total:
        return ()
    said = ", ".join(f"{name} {value:.1f} s ({100 * value / total:.0f}%)" for name, value in found)
    alt = f"{counted(len(found), 'phase')} in {total:.1f} seconds: {said}."
    return (Panel("Time by phase", alt, TIMES, partial(_draw_times, found=found, total=total)),)


def _draw_times(sheet: Sheet, found: Sequence[tuple[str, float]], total: float) -> None:
    axes = sheet.axes(0.05, 0.3, TIMES[0] - 0.1, 0.3)
    axes.set(xlim=(0, total), ylim=(0, 1), xticks=[0, total], yticks=[])
    axes.set_xticklabels(["0", f"{total:.1f} s"])
    axes.spines[:].set_visible(False)
    first, last = axes.get_xticklabels()
    first.set_horizontalalignment("left")
    last.set_horizontalalignment("right")
    start = 0.0
    for number, (_, value) in enumerate(found, 1):
        axes.barh(0.5, value, 1.0, left=start, facecolor=colour("after" if number % 2 else "before"), edgecolor="none")
        if value / total >= LEAST_LABELLED:
            style: Any = {"ha": "center", "va": "center_baseline", "fontweight": "bold"}
            axes.text(start + value / 2, 0.5, str(number), color=colour("paper"), **style)
        start += value
