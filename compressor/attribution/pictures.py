"""The pictures of a routing attribution: what steers which router, which way, and whether it changes the choice.

After "Understanding Cross-Layer Contributions to Mixture-of-Experts Routing in LLMs" (ICLR 2026).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from compressor.attribution.figures import (
    COMPONENTS,
    Attribution,
    Pair,
    Sender,
    expert_label,
    kind_shares,
    pairs,
    rank_correlation,
    sender_labels,
    strongest,
)
from compressor.attribution.graph import STANDING, STEERS, Measured, edges_of, ranking
from compressor.attribution.hubs import Hub
from compressor.document.blocks import Figure
from compressor.drawing.heatmaps import Panel, Scale, draw_panels, log_scale, panels_size
from compressor.drawing.marks import colour
from compressor.drawing.palette import COLOURS, FONT, MARKERS, scale_axis
from compressor.drawing.picture import Drawing
from compressor.words import counted, readable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import FigureBase

NAMES = ("influence", "scores", "experts", "causal")
TITLES = {"token": "token embedding", "attention": "attention", "mlp": "dense MLP", "moe": "MoE", "other": "other"}
GROUPS = {**TITLES, "shared": "shared experts"}
HUB = "★"
HUBS_NAMED = 8  # in a legend
RECEIVERS = "layer of the receiving router"
EDGES_DRAWN, EXPERTS_NAMED = 60, 8  # of the graph
PLACES = {"token": 0.4, "router": 0.4, "expert": 0.75, "shared": 0.75, "mlp": 0.6}  # within a layer, which is 1 wide

Rows = Sequence[float | None]
Group = tuple[str, list[Pair], dict[str, Any]]  # of points: label, pairs, and how they are drawn


def pictures(attribution: Attribution, hubs: Sequence[Hub], top: int) -> tuple[Figure, ...]:
    """The four figures by their `NAMES`."""
    return (
        influence_figure(attribution),
        scores_figure(attribution),
        experts_figure(attribution, hubs, top),
        causal_figure(attribution, hubs),
    )


def _panel(title: str, senders: Iterable[Sender], row: Callable[[Sender], Rows], scale: int = 0) -> list[Panel]:
    """A heat map with a row for each sender that has a value, or none."""
    shown = [sender for sender in senders if any(value is not None for value in row(sender))]
    rows = tuple(tuple(row(sender)) for sender in shown)
    labels, layers = sender_labels(shown), [sender.layer for sender in shown]
    if None not in layers and len(set(layers)) == len(layers):  # layers alone, where each sender has another
        labels = [f"L{layer}" for layer in layers]
    return [Panel(title, tuple(labels), rows, scale)] if shown else []


def _heat(
    name: str,
    title: str,
    alt: str,
    attribution: Attribution,
    columns: Sequence[Sequence[Panel]],
    scales: Sequence[Scale],
    roomy: bool = False,
) -> Figure:
    """A figure of panels over the receivers; without any, one that says so."""
    columns = [column for column in columns if column]
    numbers = [str(receiver.layer) for receiver in attribution.receivers]
    title = f"{attribution.model}: {title}"
    if not columns:

        def nothing(figure: "FigureBase") -> None:
            figure.text(0.03, 0.5, "nothing to show", va="center")

        return Figure(name, title, "", (Drawing(title, "Nothing to show.", (5.0, 1.2), nothing),))
    draw = partial(draw_panels, columns=columns, numbers=numbers, scales=scales, label=RECEIVERS, roomy=roomy)
    return Figure(name, title, "", (Drawing(title, alt, panels_size(columns, numbers, len(scales), roomy), draw),))


def influence_figure(attribution: Attribution) -> Figure:
    """Each component's influence on each router; one colour scale for all of them."""
    panels = {
        kind: _panel(title, attribution.of_kind(kind), lambda sender: sender.influence)
        for kind, title in TITLES.items()
    }
    values = [value for sender in attribution.of_kind(*COMPONENTS) for value in sender.influence]
    columns = [[*panels["token"], *panels["attention"], *panels["other"]], [*panels["mlp"], *panels["moe"]]]
    shares = [f"{TITLES[each.kind]} {100 * each.share:.1f}%" for each in kind_shares(attribution) if each.share]
    alt = f"Shares of all influence: {', '.join(shares) or 'none'}."
    scale = log_scale("variance of sub-scores", values)
    return _heat(
        "influence", "influence on routing, by the layer of the sender (rows)", alt, attribution, columns, [scale]
    )


def scores_figure(attribution: Attribution) -> Figure:
    """How far each component promotes experts (APS, left) and inhibits them (ANS, right), on one scale of sizes."""
    rows: list[Callable[[Sender], Rows]] = [
        lambda sender: sender.positive,
        lambda sender: [None if value is None else abs(value) for value in sender.negative],
    ]
    columns = [
        [
            panel
            for kind, title in TITLES.items()
            for panel in _panel(f"{title}: {name}", attribution.of_kind(kind), row, number)
        ]
        for number, (name, row) in enumerate(zip(("APS", "ANS"), rows, strict=True))
    ]
    values = [value for row in rows for sender in attribution.of_kind(*COMPONENTS) for value in row(sender)]
    scales = [
        log_scale("APS: mean positive score", values, "YlOrRd"),
        log_scale("-ANS: mean negative score", values, "YlGnBu"),
    ]
    alt = "Mean positive and mean negative sub-scores; attribution.json has the numbers."
    title = "promoting (APS) and inhibiting (ANS) sub-scores, by the layer of the sender (rows)"
    return _heat("scores", title, alt, attribution, columns, scales)


def experts_figure(attribution: Attribution, hubs: Sequence[Hub], top: int) -> Figure:
    """A strip for each of the `top` strongest routed experts, hubs with a star, and of the strongest heads."""
    marked = {(hub.module, hub.expert) for hub in hubs}
    panels, said = [], []
    for kind, name in (("expert", "routed experts"), ("head", "attention heads")):
        chosen = strongest(attribution.of_kind(kind), top)
        if not chosen:
            continue
        labels = [
            f"{HUB} {label}" if kind == "expert" and (sender.module, sender.number) in marked else label
            for sender, label in zip(chosen, sender_labels(chosen), strict=True)
        ]
        note = f", {HUB} hub" if any(label.startswith(HUB) for label in labels) else ""
        panels.append(Panel(f"strongest {name}{note}", tuple(labels), tuple(sender.influence for sender in chosen)))
        said.append(f"Strongest {name}: {', '.join(labels)}.")
    scale = log_scale("variance of sub-scores", (value for panel in panels for row in panel.values for value in row))
    title = "influence of single experts and heads"
    return _heat("experts", title, " ".join(said), attribution, [panels], [scale], roomy=True)


def causal_figure(attribution: Attribution, hubs: Sequence[Hub]) -> Figure:
    """Whether a greater variance goes with a greater change of the chosen experts: components, and single experts."""
    components: list[Group] = []
    for place, (kind, title) in enumerate(GROUPS.items()):
        if members := list(pairs(attribution, kind)):
            components.append((title, members, _style(place)))
    clouds = {
        "components on each router": components,
        "routed experts on each router": _expert_groups(attribution, hubs),
    }
    drawings = tuple(
        Drawing(title, f"{_correlated(groups)}.", (5.3, 4.2), partial(_scatter, title=title, groups=groups))
        for title, groups in clouds.items()
    )
    return Figure("causal", f"{attribution.model}: influence and causal effect", "", drawings)


def _correlated(groups: Sequence[Group]) -> str:
    found = [pair for _, members, _ in groups for pair in members]
    correlation = rank_correlation(found)
    said = "no rank correlation" if correlation is None else f"Spearman rank correlation {correlation:.2f}"
    return f"{said} ({len(found):,} pairs)"


def _scatter(figure: "FigureBase", title: str, groups: Sequence[Group]) -> None:
    """AARV over influence, one colour for each group; later groups on top."""
    axes: Axes = figure.subplots()
    found = [pair for _, members, _ in groups for pair in members]
    for label, members, style in groups:
        influence, change = [pair.influence for pair in members], [pair.rank_change for pair in members]
        axes.plot(influence, change, linestyle="none", label=label, markeredgewidth=0.4, **style)
    scaled = {"x": [pair.influence for pair in found], "y": [pair.rank_change for pair in found]}
    said = {which: scale_axis(axes, which, values, 10) for which, values in scaled.items()}  # type: ignore[arg-type]
    axes.set_title(f"{title}\n{_correlated(groups)}")
    axes.set_xlabel("\n".join(filter(None, ("influence: variance of the sub-scores", said["x"]))))
    axes.set_ylabel("\n".join(filter(None, ("AARV: mean change of the top-k experts' ranks", said["y"]))))
    axes.grid()
    if groups:
        figure.legend(loc="outside right upper", fontsize=FONT - 1, handletextpad=0.2)


def _style(place: int) -> dict[str, Any]:
    return {"color": colour(place), "marker": MARKERS[place], "markersize": 5, "markeredgecolor": "white"}


def _expert_groups(attribution: Attribution, hubs: Sequence[Hub]) -> list[Group]:
    found: dict[tuple[str, int | None], list[Pair]] = {}
    for pair in pairs(attribution, "expert"):
        found.setdefault((pair.sender.module, pair.sender.number), []).append(pair)
    named = [(expert_label(hub.layer, hub.expert), found.pop((hub.module, hub.expert), [])) for hub in hubs]
    plain = [pair for members in found.values() for pair in members]
    size = 5.0 if len(plain) < 2000 else 3.0 if len(plain) < 20000 else 1.5
    more = [pair for _, members in named[HUBS_NAMED:] for pair in members]
    groups: list[Group] = [
        ("no hub", plain, {"color": "#aaaaaa", "marker": ".", "markersize": size}),
        ("more hubs", more, {"color": "black", "marker": ".", "markersize": 5}),
        *((f"hub {label}", members, _style(place)) for place, (label, members) in enumerate(named[:HUBS_NAMED])),
    ]
    return [group for group in groups if group[1]]


def graph_figure(made: Measured) -> Figure:
    """Layers from left to right, the heaviest edges between senders and routers, the most central experts by name."""
    nodes, named = made.graph.nodes, ranking(made.centrality, STANDING)[:EXPERTS_NAMED]
    steering = edges_of(made.graph, STEERS).edges(data="weight")
    edges = sorted((edge for edge in steering if edge[2] > 0), key=lambda edge: -edge[2])[:EDGES_DRAWN]
    ends = {*named, *(end for edge in edges for end in edge[:2])}
    at = _places({node: data for node, data in nodes(data=True) if node in ends})
    layers = sorted({nodes[node]["layer"] for node in at})
    title = f"{counted(len(edges), 'heaviest edge')} into routers, experts first by {STANDING}"
    title = f"{made.graph.graph['model']}: {title}"
    paths = ", ".join(f"{start} to {end}" for start, end, _ in edges[:EXPERTS_NAMED]) or "none"
    alt = f"Heaviest edges: {paths}. Experts first by {STANDING}: {', '.join(named) or 'none'}."
    draw = partial(_draw_graph, nodes=nodes, edges=edges, at=at, named=named, layers=layers)
    return Figure("graph", title, "", (Drawing(title, alt, (min(16, 4 + 1.1 * len(layers)), 5), draw),))


def _draw_graph(
    figure: "FigureBase",
    nodes: Any,
    edges: Sequence[Any],
    at: Mapping[str, tuple[float, float]],
    named: Sequence[str],
    layers: Sequence[int],
) -> None:
    axes = figure.subplots()
    for start, end, weight in reversed(edges):
        strength = (weight / edges[0][2]) ** 0.5
        look = {"color": "#444444", "linewidth": 0.3 + 3 * strength, "alpha": 0.3 + 0.6 * strength}
        bow = {"arrowstyle": "-", "connectionstyle": "arc3,rad=-0.15"}
        axes.annotate("", at[end], at[start], arrowprops={**bow, **look})
    for place, kind in enumerate(dict.fromkeys(kind for _, kind in nodes(data="kind"))):
        if own := [at[node] for node in at if nodes[node]["kind"] == kind]:
            look = {"marker": MARKERS[place], "color": COLOURS[place], "markersize": 7, "markeredgecolor": "#222222"}
            axes.plot(*zip(*own, strict=True), linestyle="none", label=kind, zorder=3, **look)
    for node in named:
        style: Any = {"textcoords": "offset points", "fontsize": 8, "ha": "center", "weight": "bold"}
        axes.annotate(readable(node), at[node], (0, 6), **style)
    axes.set_xticks([layer + 0.4 for layer in layers], labels=["token" if x < 0 else f"L{x}" for x in layers])
    axes.set(yticks=[], ylim=(-1.3, 1.3))
    axes.spines["left"].set_visible(False)
    if at:
        figure.legend(loc="outside right upper")


def _places(shown: Mapping[str, Mapping[str, Any]]) -> dict[str, tuple[float, float]]:
    """Routers in the middle; a layer's other nodes spread over the height, kind by kind from left to right."""
    columns: dict[float, list[str]] = {}
    for node, data in shown.items():
        columns.setdefault(data["layer"] + PLACES.get(data["kind"], 0.1), []).append(node)
    return {
        node: (x, 0.0 if shown[node]["kind"] == "router" else 2 * (place + 1) / (len(nodes) + 1) - 1)
        for x, nodes in columns.items()
        for place, node in enumerate(nodes)
    }
