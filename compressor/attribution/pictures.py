"""The pictures of a routing attribution: what steers which router, which way, and whether it changes the choice.

After "Understanding Cross-Layer Contributions to Mixture-of-Experts Routing in LLMs" (ICLR 2026).
"""

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from compressor.attribution.figures import (
    COMPONENTS,
    Attribution,
    Pair,
    Sender,
    kind_shares,
    pairs,
    rank_correlation,
    sender_labels,
    strongest,
)
from compressor.attribution.graph import RELATIVE, STEERS, Centrality, edges_of, ranking
from compressor.attribution.hubs import Hub
from compressor.document.blocks import Figure
from compressor.document.drawing import MARKERS, Panel, Scale, colour, draw_panels, log_scale, scale_axis
from compressor.document.picture import FONT, Drawing
from compressor.formatting import counted, readable

if TYPE_CHECKING:
    import networkx as nx
    from matplotlib.axes import Axes
    from matplotlib.figure import FigureBase

NAMES = ("influence", "scores", "experts", "causal")
TITLES = {"token": "token embedding", "attention": "attention", "mlp": "dense MLP", "moe": "MoE", "other": "other"}
GROUPS = {**TITLES, "shared": "shared experts"}
HUB = "★"
HUBS_NAMED = 8  # in a legend
EDGES_DRAWN, EXPERTS_NAMED = 60, 8  # of the graph
PLACES = {"token": 0.4, "router": 0.4, "expert": 0.75, "shared": 0.75, "mlp": 0.6}  # within a layer, which is 1 wide

Row = Callable[[Sender], Sequence[float | None]]
Group = tuple[str, list[Pair], dict[str, Any]]  # of points: label, pairs, and how they are drawn


def pictures(attribution: Attribution, hubs: Sequence[Hub], top: int) -> tuple[Figure, ...]:
    """The four figures by their `NAMES`."""
    return (
        influence_figure(attribution),
        scores_figure(attribution),
        experts_figure(attribution, hubs, top),
        causal_figure(attribution, hubs),
    )


def _panels(attribution: Attribution, kinds: Iterable[str], row: Row, score: str = "", scale: int = 0) -> list[Panel]:
    """A heat map for each kind of component, with a row for each sender that has a value."""
    panels = []
    for kind in kinds:
        senders = [each for each in attribution.of_kind(kind) if any(value is not None for value in row(each))]
        labels, layers = sender_labels(senders), [sender.layer for sender in senders]
        if None not in layers and len(set(layers)) == len(layers):  # layers alone, where each sender has another
            labels = [f"L{layer}" for layer in layers]
        if senders:
            values = tuple(tuple(row(sender)) for sender in senders)
            panels.append(Panel(f"{TITLES[kind]}{score}", tuple(labels), values, scale))
    return panels


def _heat(
    name: str,
    title: str,
    alt: str,
    attribution: Attribution,
    columns: Sequence[Sequence[Panel]],
    scales: Sequence[Scale],
    roomy: bool = False,
) -> Figure:
    title, numbers = f"{attribution.model}: {title}", [str(receiver.layer) for receiver in attribution.receivers]
    drawing = draw_panels(title, alt, columns, numbers, scales, "layer of the receiving router", roomy)
    return Figure(name, title, "", (drawing,))


def influence_figure(attribution: Attribution) -> Figure:
    """Each component's influence on each router; one colour scale for all of them."""
    columns = [
        _panels(attribution, kinds, lambda sender: sender.influence)
        for kinds in (("token", "attention", "other"), ("mlp", "moe"))
    ]
    values = [value for sender in attribution.of_kind(*COMPONENTS) for value in sender.influence]
    shares = [f"{TITLES[each.kind]} {100 * each.share:.1f}%" for each in kind_shares(attribution) if each.share]
    alt = f"Shares of all influence: {', '.join(shares) or 'none'}."
    title = "influence on routing, by the layer of the sender (rows)"
    return _heat("influence", title, alt, attribution, columns, [log_scale("variance of sub-scores", values)])


def scores_figure(attribution: Attribution) -> Figure:
    """How far each component promotes experts (APS, left) and inhibits them (ANS, right), on one scale of sizes."""
    rows: dict[str, Row] = {
        "APS": lambda sender: sender.positive,
        "ANS": lambda sender: [None if value is None else abs(value) for value in sender.negative],
    }
    columns = [
        _panels(attribution, TITLES, row, f": {score}", number) for number, (score, row) in enumerate(rows.items())
    ]
    values = [value for row in rows.values() for each in attribution.of_kind(*COMPONENTS) for value in row(each)]
    scales = [
        log_scale("APS: mean positive score", values, "YlOrRd"),
        log_scale("-ANS: mean negative score", values, "YlGnBu"),
    ]
    alt = "Mean positive and mean negative sub-scores; attribution.json has the numbers."
    title = "promoting (APS) and inhibiting (ANS) sub-scores, by the layer of the sender (rows)"
    return _heat("scores", title, alt, attribution, columns, scales)


def experts_figure(attribution: Attribution, hubs: Sequence[Hub], top: int) -> Figure:
    """A strip for each of the `top` strongest routed experts, hubs with a star, and of the strongest heads."""
    starred = {(hub.module, hub.expert) for hub in hubs}
    panels, alt = [], []
    for kind, name in (("expert", "routed experts"), ("head", "attention heads")):
        senders = strongest(attribution.of_kind(kind), top)
        if not senders:
            continue
        labels = [
            f"{HUB} {label}" if kind == "expert" and (sender.module, sender.number) in starred else label
            for sender, label in zip(senders, sender_labels(senders), strict=True)
        ]
        note = f", {HUB} hub" if any(label.startswith(HUB) for label in labels) else ""
        panels.append(Panel(f"strongest {name}{note}", tuple(labels), tuple(sender.influence for sender in senders)))
        alt.append(f"Strongest {name}: {', '.join(labels)}.")
    scale = log_scale("variance of sub-scores", (value for panel in panels for row in panel.values for value in row))
    title = "influence of single experts and heads"
    return _heat("experts", title, " ".join(alt), attribution, [panels], [scale], roomy=True)


def causal_figure(attribution: Attribution, hubs: Sequence[Hub]) -> Figure:
    """Whether a greater variance goes with a greater change of the chosen experts: components, and single experts."""
    components = [
        (title, [*pairs(attribution, kind)], _style(place)) for place, (kind, title) in enumerate(GROUPS.items())
    ]
    drawings = (
        _scatter("components on each router", components),
        _scatter("routed experts on each router", _expert_groups(attribution, hubs)),
    )
    return Figure("causal", f"{attribution.model}: influence and causal effect", "", drawings)


def _scatter(title: str, groups: Sequence[Group]) -> Drawing:
    """AARV over influence, one colour for each group that has points; later groups on top."""
    groups = [group for group in groups if group[1]]
    points = [pair for _, members, _ in groups for pair in members]
    value = rank_correlation(points)
    correlation = "no rank correlation" if value is None else f"Spearman rank correlation {value:.2f}"
    correlation = f"{correlation} ({len(points):,} pairs)"

    def draw(figure: "FigureBase") -> None:
        axes: Axes = figure.subplots()
        for label, members, style in groups:
            _, influence, change = zip(*members, strict=True)
            axes.plot(influence, change, linestyle="none", label=label, markeredgewidth=0.4, **style)
        scales = (
            scale_axis(axes, "x", [pair.influence for pair in points], 10),
            scale_axis(axes, "y", [pair.rank_change for pair in points], 10),
        )
        axes.set_title(f"{title}\n{correlation}")
        axes.set_xlabel("\n".join(filter(None, ("influence: variance of the sub-scores", scales[0]))))
        axes.set_ylabel("\n".join(filter(None, ("AARV: mean change of the top-k experts' ranks", scales[1]))))
        axes.grid()
        if groups:
            figure.legend(loc="outside right upper", fontsize=FONT - 1, handletextpad=0.2)

    return Drawing(title, f"{correlation}.", (5.3, 4.2), draw)


def _style(place: int) -> dict[str, Any]:
    return {"color": colour(place), "marker": MARKERS[place], "markersize": 5, "markeredgecolor": "white"}


def _expert_groups(attribution: Attribution, hubs: Sequence[Hub]) -> list[Group]:
    by_expert: dict[tuple[str, int | None], list[Pair]] = {}
    for pair in pairs(attribution, "expert"):
        by_expert.setdefault((pair.sender.module, pair.sender.number), []).append(pair)
    named = [(hub.label, by_expert.pop((hub.module, hub.expert), [])) for hub in hubs]
    plain = [pair for members in by_expert.values() for pair in members]
    size = 5.0 if len(plain) < 2000 else 3.0 if len(plain) < 20000 else 1.5
    more = [pair for _, members in named[HUBS_NAMED:] for pair in members]
    return [
        ("no hub", plain, {"color": "#aaaaaa", "marker": ".", "markersize": size}),
        ("more hubs", more, {"color": "black", "marker": ".", "markersize": 5}),
        *((f"hub {label}", members, _style(place)) for place, (label, members) in enumerate(named[:HUBS_NAMED])),
    ]


def graph_figure(graph: "nx.DiGraph", centrality: Centrality) -> Figure:
    """Layers from left to right, the heaviest edges between senders and routers, the most central experts by name."""
    nodes, named = graph.nodes, ranking(centrality, RELATIVE)[:EXPERTS_NAMED]
    steering = edges_of(graph, STEERS).edges(data="weight")
    edges = sorted((edge for edge in steering if edge[2] > 0), key=lambda edge: -edge[2])[:EDGES_DRAWN]
    ends = {*named, *(end for edge in edges for end in edge[:2])}
    columns: dict[float, list[str]] = {}  # by place from left to right: a layer's nodes kind by kind
    for node, data in nodes(data=True):
        if node in ends:
            columns.setdefault(data["layer"] + PLACES.get(data["kind"], 0.1), []).append(node)
    at = {  # routers in the middle, other nodes spread over the height
        node: (x, 0.0 if nodes[node]["kind"] == "router" else 2 * (place + 1) / (len(own) + 1) - 1)
        for x, own in columns.items()
        for place, node in enumerate(own)
    }
    layers = sorted({nodes[node]["layer"] for node in at})
    title = f"{counted(len(edges), 'heaviest edge')} into routers, experts first by {RELATIVE}"
    title = f"{graph.graph['model']}: {title}"
    paths = ", ".join(f"{start} to {end}" for start, end, _ in edges[:EXPERTS_NAMED]) or "none"
    alt = f"Heaviest edges: {paths}. Experts first by {RELATIVE}: {', '.join(named) or 'none'}."

    def draw(figure: "FigureBase") -> None:
        axes = figure.subplots()
        for start, end, weight in reversed(edges):
            strength = (weight / edges[0][2]) ** 0.5
            look = {"color": "#444444", "linewidth": 0.3 + 3 * strength, "alpha": 0.3 + 0.6 * strength}
            bow = {"arrowstyle": "-", "connectionstyle": "arc3,rad=-0.15"}
            axes.annotate("", at[end], at[start], arrowprops={**bow, **look})
        for place, kind in enumerate(dict.fromkeys(kind for _, kind in nodes(data="kind"))):
            if own := [at[node] for node in at if nodes[node]["kind"] == kind]:
                look = {"marker": MARKERS[place], "color": colour(place), "markersize": 7, "zorder": 3}
                axes.plot(*zip(*own, strict=True), linestyle="none", label=kind, markeredgecolor="#222222", **look)
        for node in named:
            style: Any = {"textcoords": "offset points", "fontsize": 8, "ha": "center", "weight": "bold"}
            axes.annotate(readable(node), at[node], (0, 6), **style)
        axes.set_xticks([layer + 0.4 for layer in layers], labels=["token" if x < 0 else f"L{x}" for x in layers])
        axes.set(yticks=[], ylim=(-1.3, 1.3))
        axes.spines["left"].set_visible(False)
        if at:
            figure.legend(loc="outside right upper")

    return Figure("graph", title, "", (Drawing(title, alt, (min(16, 4 + 1.1 * len(layers)), 5), draw),))
