"""The pictures of a routing attribution: what steers which router, which way, and whether it changes the choice.

After "Understanding Cross-Layer Contributions to Mixture-of-Experts Routing in LLMs" (ICLR 2026).
"""

import math
import textwrap
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compressor.attribution.figures import Attribution, Sender
from compressor.attribution.hubs import Hub
from compressor.attribution.summary import (
    COMPONENTS,
    Pair,
    expert_label,
    pairs,
    rank_correlation,
    sender_labels,
    strongest,
)
from compressor.drawing.heatmaps import FONT, TINIEST, Panel, Scale, heat_figure, log_scale
from compressor.drawing.palette import COLOURS, DPI, MARKERS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NAMES = ("influence.png", "scores.png", "experts.png", "causal.png")
TITLES = {"token": "token embedding", "attention": "attention", "mlp": "dense MLP", "moe": "MoE", "other": "other"}
GROUPS = {**TITLES, "shared": "shared experts"}
HUB = "★"
HUBS_NAMED = 8  # in a legend
AXIS_DECADES = 10  # of a logarithmic axis at the most

Rows = Sequence[float | None]
Group = tuple[str, list[Pair], dict[str, Any]]  # of points: label, pairs, and how they are drawn


def _panel(title: str, senders: Iterable[Sender], row: Callable[[Sender], Rows], scale: int = 0) -> list[Panel]:
    """A heatmap with a row for each sender that has a value, or none."""
    shown = [sender for sender in senders if any(value is not None for value in row(sender))]
    if not shown:
        return []
    return [Panel(title, tuple(_layer_labels(shown)), tuple(tuple(row(sender)) for sender in shown), scale)]


def _layer_labels(senders: Sequence[Sender]) -> list[str]:
    """Layers alone, where each sender has another."""
    layers = [sender.layer for sender in senders]
    if None in layers or len(set(layers)) < len(layers):
        return sender_labels(senders)
    return [f"L{layer}" for layer in layers]


def _receivers(attribution: Attribution) -> list[str]:
    return [str(receiver.layer) for receiver in attribution.receivers]


def _values(senders: Iterable[Sender], row: Callable[[Sender], Rows]) -> list[float | None]:
    return [value for sender in senders for value in row(sender)]


def influence_figure(attribution: Attribution) -> "Figure":
    """Each component's influence on each router; one colour scale for all of them."""
    panels = {
        kind: _panel(title, attribution.of_kind(kind), lambda sender: sender.influence)
        for kind, title in TITLES.items()
    }
    values = _values(attribution.of_kind(*COMPONENTS), lambda sender: sender.influence)
    scale = log_scale("variance of sub-scores", "viridis", values)
    columns = [[*panels["token"], *panels["attention"], *panels["other"]], [*panels["mlp"], *panels["moe"]]]
    title = f"{attribution.model}: influence on routing, by the layer of the sender (rows)"
    return heat_figure(title, columns, _receivers(attribution), [scale], all_rows=False)


def _size(values: Rows) -> Rows:
    return [None if value is None else abs(value) for value in values]


def scores_figure(attribution: Attribution) -> "Figure":
    """How far each component promotes experts (APS, left) and inhibits them (ANS, right), on one scale of sizes."""
    rows: list[Callable[[Sender], Rows]] = [lambda sender: sender.positive, lambda sender: _size(sender.negative)]
    columns = [
        [
            panel
            for kind, title in TITLES.items()
            for panel in _panel(f"{title}: {name}", attribution.of_kind(kind), row, number)
        ]
        for number, (name, row) in enumerate(zip(("APS", "ANS"), rows, strict=True))
    ]
    senders = attribution.of_kind(*COMPONENTS)
    both = log_scale("", "", [value for row in rows for value in _values(senders, row)])
    scales = [
        Scale("APS: mean positive score", "YlOrRd", both.low, both.high, both.has_smaller),
        Scale("-ANS: mean negative score", "YlGnBu", both.low, both.high, both.has_smaller),
    ]
    title = f"{attribution.model}: promoting (APS) and inhibiting (ANS) sub-scores, by the layer of the sender (rows)"
    return heat_figure(title, columns, _receivers(attribution), scales, all_rows=False)


def experts_figure(attribution: Attribution, hubs: Sequence[Hub], top: int) -> "Figure":
    """A strip for each of the `top` strongest routed experts, hubs with a star, and of the strongest heads."""
    marked = {(hub.module, hub.expert) for hub in hubs}
    panels, values = [], []
    for kind, name in (("expert", "routed experts"), ("head", "attention heads")):
        chosen = strongest(attribution.of_kind(kind), top)
        if not chosen:
            continue
        labels = [
            f"{HUB} {label}" if kind == "expert" and (sender.module, sender.number) in marked else label
            for sender, label in zip(chosen, sender_labels(chosen), strict=True)
        ]
        note = f", {HUB} hub" if any(label.startswith(HUB) for label in labels) else ""
        rows = tuple(sender.influence for sender in chosen)
        panels.append(Panel(f"strongest {name}{note}", tuple(labels), rows))
        values += [value for row in rows for value in row]
    scale = log_scale("variance of sub-scores", "viridis", values)
    title = f"{attribution.model}: influence of single experts and heads"
    return heat_figure(title, [panels], _receivers(attribution), [scale], all_rows=True)


def _limit_axis(axes: "Axes", which: str, values: Sequence[float]) -> None:
    """A logarithmic axis over whole decades; where there are zeros, or too many decades, it is linear around 0."""
    positive = [value for value in values if value >= TINIEST]
    if not positive:
        axes.set(**{f"{which}lim": (-0.05, 1.0), f"{which}ticks": [0.0]})
        return
    high = math.ceil(math.log10(max(positive)))
    low = math.floor(math.log10(max(min(positive), 10.0 ** (high - AXIS_DECADES))))
    high = max(high, low + 1)
    step = math.ceil((high - low) / 6)
    marks = [10.0**decade for decade in range(high, low - 1, -step)]
    is_log = min(values) >= 10.0**low
    axes.set(**{f"{which}scale": "log"} if is_log else {})
    if not is_log:
        getattr(axes, f"set_{which}scale")("symlog", linthresh=10.0**low, linscale=0.6)
        marks.append(0.0)
    margin = (10.0 ** (low - 0.1) if is_log else -(10.0**low) / 3, 10.0 ** (high + 0.1))
    axes.set(**{f"{which}lim": margin})
    getattr(axes, f"set_{which}ticks")(marks, labels=[f"{mark:g}" for mark in marks])
    getattr(axes, f"set_{which}ticks")([], minor=True)


def _scatter(axes: "Axes", title: str, groups: Sequence[Group]) -> None:
    """AARV over influence, one colour for each group; later groups on top."""
    found = [pair for _, members, _ in groups for pair in members]
    for label, members, style in groups:
        axes.plot(
            [pair.influence for pair in members], [pair.rank_change for pair in members],
            linestyle="none", label=label, markeredgewidth=0.4, **style,
        )  # fmt: skip
    _limit_axis(axes, "x", [pair.influence for pair in found])
    _limit_axis(axes, "y", [pair.rank_change for pair in found])
    correlation = rank_correlation(found)
    said = "no rank correlation" if correlation is None else f"Spearman rank correlation {correlation:.2f}"
    axes.set_title(f"{title}\n{said} ({len(found):,} pairs)", fontsize=9)
    axes.set_xlabel("influence: variance of the sub-scores", fontsize=8)
    axes.set_ylabel("AARV: mean change of the top-k experts' ranks", fontsize=8)
    axes.tick_params(labelsize=FONT)
    axes.grid(color="#e4e4e4", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if groups:
        legend = axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, handletextpad=0.2)
        for text in legend.get_texts():
            text.set_parse_math(False)


def _style(place: int) -> dict[str, Any]:
    return {"color": COLOURS[place], "marker": MARKERS[place], "markersize": 5, "markeredgecolor": "white"}


def causal_figure(attribution: Attribution, hubs: Sequence[Hub]) -> "Figure":
    """Whether a greater variance goes with a greater change of the chosen experts: components, and single experts."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.5, 4.4), dpi=DPI, layout="constrained")
    title = textwrap.fill(f"{attribution.model}: influence and causal effect", 90)
    figure.suptitle(title, fontsize=11).set_parse_math(False)
    components, experts = figure.subplots(1, 2)
    groups: list[Group] = []
    for place, (kind, title) in enumerate(GROUPS.items()):
        if members := list(pairs(attribution, kind)):
            groups.append((title, members, _style(place)))
    _scatter(components, "components on each router", groups)
    _scatter(experts, "routed experts on each router", _expert_groups(attribution, hubs))
    return figure


def _expert_groups(attribution: Attribution, hubs: Sequence[Hub]) -> list[Group]:
    found: dict[tuple[str, int | None], list[Pair]] = {}
    for pair in pairs(attribution, "expert"):
        found.setdefault((pair.sender.module, pair.sender.number), []).append(pair)
    named = [(expert_label(hub.layer, hub.expert), found.pop((hub.module, hub.expert), [])) for hub in hubs]
    plain = [pair for members in found.values() for pair in members]
    size = 5.0 if len(plain) < 2000 else 3.0 if len(plain) < 20000 else 1.5
    crowd = {"color": "#aaaaaa", "marker": ".", "markersize": size}
    groups: list[Group] = [("no hub", plain, crowd)] if plain else []
    more = [pair for _, members in named[HUBS_NAMED:] for pair in members]
    if more:
        groups.append(("more hubs", more, {"color": "black", "marker": ".", "markersize": 5}))
    for place, (label, members) in enumerate(named[:HUBS_NAMED]):
        if members:
            groups.append((f"hub {label}", members, _style(place)))
    return groups


def plot_attribution(attribution: Attribution, hubs: Sequence[Hub], top: int, folder: Path) -> None:
    """Save the four pictures as PNG."""
    figures = (
        influence_figure(attribution),
        scores_figure(attribution),
        experts_figure(attribution, hubs, top),
        causal_figure(attribution, hubs),
    )
    for name, figure in zip(NAMES, figures, strict=True):
        figure.savefig(folder / name, dpi=DPI, format="png")
