"""The pictures of a routing attribution: what steers which router, which way, and whether it changes the choice.

After "Understanding Cross-Layer Contributions to Mixture-of-Experts Routing in LLMs" (ICLR 2026).
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

from compressor.attribution.figures import (
    Attribution,
    Pair,
    Sender,
    kind_shares,
    pairs,
    sender_labels,
    spearman,
    strongest,
)
from compressor.attribution.graph import RELATIVE, STEERS, Centrality, edges_of, ranking
from compressor.document.blocks import Figure
from compressor.document.drawing import (
    HEAT,
    MARKERS,
    Panel,
    colour,
    draw_panels,
    log_scale,
    scale_axis,
)
from compressor.document.picture import FONT, Drawing
from compressor.formatting import counted, readable
from compressor.recipe.hubs import Hub

if TYPE_CHECKING:
    import networkx as nx
    from matplotlib.axes import Axes
    from matplotlib.figure import FigureBase

NAMES = ("influence", "scores", "experts", "causal")
TITLES = {
    "token": "token embedding",
    "attention": "attention",
    "mlp": "dense MLP",
    "moe": "MoE",
    "other": "other",
}
GROUPS = {**TITLES, "shared": "shared experts"}
VARIANCE = {"variance of sub-scores": HEAT}
HUB = "★"
HUBS_NAMED = 8  # in a legend
# of the graph
EDGES_DRAWN = 60
EXPERTS_NAMED = 8
NODE = 49  # square points
# within a layer, which is 1 wide
PLACES = {
    "token": 0.4,
    "router": 0.4,
    "expert": 0.75,
    "shared": 0.75,
    "mlp": 0.6,
}

Group = tuple[str, Sequence[Pair], dict[str, Any]]  # of points: label, pairs, and how they are drawn


def pictures(
    attribution: Attribution, hubs: Sequence[Hub], top: int, compared: Sequence[tuple[Sender, Sender]] = ()
) -> tuple[Figure, ...]:
    """The four figures by their `NAMES`; `compared` are experts before others were blocked, and without those."""
    return (
        influence_figure(attribution),
        scores_figure(attribution),
        experts_figure(attribution, hubs, top, compared),
        causal_figure(attribution, hubs),
    )


def _row(sender: Sender, name: str) -> list[float | None]:
    """The sizes of a sender's figures of this name, by receiver."""
    return [None if value is None else abs(value) for value in getattr(sender, name)]


def _panels(attribution: Attribution, kinds: Iterable[str], name: str, score: str = "", scale: int = 0) -> list[Panel]:
    """A heat map for each kind of component, with a row for each sender that has a value."""
    panels = []
    for kind in kinds:
        senders = [sender for sender in attribution.of_kind(kind) if set(getattr(sender, name)) - {None}]
        labels = sender_labels(senders)
        layers = {sender.layer for sender in senders}
        if None not in layers and len(layers) == len(senders):  # layers alone, where each sender has another
            labels = [f"L{sender.layer}" for sender in senders]
        if senders:
            values = tuple(tuple(_row(sender, name)) for sender in senders)
            panels.append(Panel(f"{TITLES[kind]}{score}", tuple(labels), values, scale))
    return panels


def _heat(
    name: str,
    title: str,
    alt: str,
    attribution: Attribution,
    columns: Sequence[Sequence[Panel]],
    scales: Mapping[str, str],
) -> Figure:
    """Columns of heat maps; `scales` has the colours of each by its label, over the values of all panels."""
    title = f"{attribution.model}: {title}"
    layers = [str(receiver.layer) for receiver in attribution.receivers]
    label = "layer of the receiving router"
    values = list[float | None]()
    for panel in chain.from_iterable(columns):
        values += chain.from_iterable(panel.values)
    drawn = [log_scale(measure, values, colours) for measure, colours in scales.items()]
    drawing = draw_panels(title, alt, columns, layers, drawn, label, roomy=name == "experts")
    return Figure(name, title, "", (drawing,))


def influence_figure(attribution: Attribution) -> Figure:
    """Each component's influence on each router; one colour scale for all of them."""
    columns = [
        _panels(attribution, ("token", "attention", "other"), "influence"),
        _panels(attribution, ("mlp", "moe"), "influence"),
    ]
    shares = [f"{TITLES[kind.kind]} {100 * kind.share:.1f}%" for kind in kind_shares(attribution) if kind.share]
    alt = f"Shares of all influence: {', '.join(shares) or 'none'}."
    title = "influence on routing, by the layer of the sender (rows)"
    return _heat("influence", title, alt, attribution, columns, VARIANCE)


def scores_figure(attribution: Attribution) -> Figure:
    """Draw how each component promotes experts (APS, left) and inhibits them (ANS, right), on one scale."""
    columns = [
        _panels(attribution, TITLES, "positive", ": APS", 0),
        _panels(attribution, TITLES, "negative", ": ANS", 1),
    ]
    scales = {"APS: mean positive score": "YlOrRd", "-ANS: mean negative score": "YlGnBu"}
    alt = "Mean positive and mean negative sub-scores; attribution.json has the numbers."
    title = "promoting (APS) and inhibiting (ANS) sub-scores, by the layer of the sender (rows)"
    return _heat("scores", title, alt, attribution, columns, scales)


def experts_figure(
    attribution: Attribution, hubs: Sequence[Hub], top: int, compared: Sequence[tuple[Sender, Sender]] = ()
) -> Figure:
    """A strip for each of the `top` strongest routed experts, hubs with a star, and of the strongest heads.

    Experts that are `compared` come first, before others were blocked and without those.
    """
    starred = {(hub.module, hub.expert) for hub in hubs}
    panels = list[Panel]()
    alt = list[str]()
    for kind, name in (("expert", "routed experts"), ("head", "attention heads")):
        senders = strongest(attribution.of_kind(kind), top)
        labels = []
        note = ""
        for sender, label in zip(senders, sender_labels(senders), strict=True):
            is_hub = kind == "expert" and (sender.module, sender.number) in starred
            note = f", {HUB} hub" if is_hub else note
            labels.append(f"{HUB} {label}" if is_hub else label)
        if senders:
            rows = tuple(sender.influence for sender in senders)
            panels.append(Panel(f"strongest {name}{note}", tuple(labels), rows))
            alt.append(f"Strongest {name}: {', '.join(labels)}.")
    without = ", ".join(attribution.without)
    for index, name in enumerate(("with all experts", f"without {without}") if compared else ()):
        senders = tuple(pair[index] for pair in compared)
        rows = tuple(sender.influence for sender in senders)
        panels.insert(index, Panel(name, tuple(sender_labels(senders)), rows))
    title = "influence of single experts and heads"
    return _heat("experts", title, " ".join(alt), attribution, [panels], VARIANCE)


def causal_figure(attribution: Attribution, hubs: Sequence[Hub]) -> Figure:
    """Draw the change of the chosen experts over the variance: components, and single experts."""
    components: list[Group] = []
    for number, (kind, title) in enumerate(GROUPS.items()):
        components.append((title, [*pairs(attribution, kind)], _style(number)))
    drawings = (
        _scatter("components on each router", components),
        _scatter("routed experts on each router", _expert_groups(attribution, hubs)),
    )
    return Figure("causal", f"{attribution.model}: influence and causal effect", "", drawings)


def _scatter(title: str, groups: Sequence[Group]) -> Drawing:
    """AARV over influence, one colour for each group that has points; later groups on top."""
    groups = [group for group in groups if group[1]]
    points = [pair for _, members, _ in groups for pair in members]
    influences = [pair.influence for pair in points]
    changes = [pair.rank_change for pair in points]
    value = spearman(influences, changes)
    correlation = "no rank correlation" if value is None else f"Spearman rank correlation {value:.2f}"
    correlation = f"{correlation} ({len(points):,} pairs)"

    def draw(figure: "FigureBase") -> None:
        axes: Axes = figure.subplots()
        for label, members, style in groups:
            _, x, y = zip(*members, strict=True)
            axes.plot(x, y, linestyle="none", label=label, markeredgewidth=0.4, **style)
        x_scale = scale_axis(axes, "x", influences, 10)
        y_scale = scale_axis(axes, "y", changes, 10)
        axes.set_title(f"{title}\n{correlation}")
        axes.set_xlabel(f"influence: variance of the sub-scores\n{x_scale}".strip())
        axes.set_ylabel(f"AARV: mean change of the top-k experts' ranks\n{y_scale}".strip())
        axes.grid()
        if groups:
            figure.legend(loc="outside right upper", fontsize=FONT - 1, handletextpad=0.2)

    return Drawing(title, f"{correlation}.", (5.3, 4.2), draw)


def _style(number: int) -> dict[str, Any]:
    return {
        "color": colour(number),
        "marker": MARKERS[number],
        "markersize": 5,
        "markeredgecolor": "white",
    }


def _expert_groups(attribution: Attribution, hubs: Sequence[Hub]) -> list[Group]:
    """Points of experts that are no hubs, of the strongest hubs by name, and of the others."""
    labels: dict[tuple[str, int | None], str] = {}
    for number, hub in enumerate(hubs):
        labels[hub.module, hub.expert] = f"hub {hub.label}" if number < HUBS_NAMED else "more hubs"
    members: dict[str, list[Pair]] = {label: [] for label in ("no hub", "more hubs", *labels.values())}
    for pair in pairs(attribution, "expert"):
        members[labels.get((pair.sender.module, pair.sender.number), "no hub")].append(pair)
    count = len(members["no hub"])
    size = 5.0 if count < 2000 else 3.0 if count < 20000 else 1.5
    styles = [
        {"color": "#aaaaaa", "marker": ".", "markersize": size},
        {"color": "black", "marker": ".", "markersize": 5},
        *map(_style, range(len(members) - 2)),
    ]
    return [(label, points, style) for (label, points), style in zip(members.items(), styles, strict=True)]


def graph_figure(graph: "nx.DiGraph", centrality: Centrality) -> Figure:
    """Layers from left to right, the heaviest edges between senders and routers, the most central experts by name."""
    nodes = graph.nodes
    named = ranking(centrality, RELATIVE)[:EXPERTS_NAMED]
    steering = [edge for edge in edges_of(graph, STEERS).edges(data="weight") if edge[2] > 0]
    edges = sorted(steering, key=lambda edge: -edge[2])[:EDGES_DRAWN]
    shown = set(named).union(*(edge[:2] for edge in edges))
    at = _places({node: data for node, data in nodes(data=True) if node in shown})
    layers = sorted({nodes[node]["layer"] for node in at})
    title = f"{counted(len(edges), 'heaviest edge')} into routers, experts first by {RELATIVE}"
    title = f"{graph.graph['model']}: {title}"
    paths = ", ".join(f"{start} to {end}" for start, end, _ in edges[:EXPERTS_NAMED]) or "none"
    alt = f"Heaviest edges: {paths}. Experts first by {RELATIVE}: {', '.join(named) or 'none'}."

    def draw(figure: "FigureBase") -> None:
        import networkx as nx

        axes = figure.subplots()
        strengths = [(weight / edges[0][2]) ** 0.5 for *_, weight in edges]
        nx.draw_networkx_edges(
            graph,
            at,
            [edge[:2] for edge in edges],
            ax=axes,
            arrows=True,
            arrowstyle="-",
            connectionstyle="arc3,rad=-0.15",
            edge_color="#444444",
            width=[0.3 + 3 * strength for strength in strengths],
            alpha=[0.3 + 0.6 * strength for strength in strengths],
            node_size=NODE,
        )
        for number, kind in enumerate(dict.fromkeys(kind for _, kind in nodes(data="kind"))):
            nx.draw_networkx_nodes(
                graph,
                at,
                [node for node in at if nodes[node]["kind"] == kind],
                ax=axes,
                node_size=NODE,
                node_color=colour(number),
                node_shape=MARKERS[number],
                edgecolors="#222222",
                label=kind,
            )
        above = {node: (x, y + 0.04) for node, (x, y) in at.items()}
        labels = {node: readable(node) for node in named}
        nx.draw_networkx_labels(
            graph, above, labels, font_size=8, font_weight="bold", verticalalignment="bottom", ax=axes
        )
        axes.tick_params(bottom=True, labelbottom=True)
        axes.set_xticks([layer + 0.4 for layer in layers], labels=["token" if x < 0 else f"L{x}" for x in layers])
        axes.set(yticks=[], ylim=(-1.3, 1.3))
        axes.spines["left"].set_visible(False)
        if at:
            figure.legend(loc="outside right upper")

    return Figure("graph", title, "", (Drawing(title, alt, (min(16, 4 + 1.1 * len(layers)), 5), draw),))


def _places(nodes: Mapping[str, Mapping[str, Any]]) -> dict[str, tuple[float, float]]:
    """Places of nodes: a layer's from left to right by kind, routers in the middle, others spread over the height."""
    columns: dict[float, list[str]] = {}
    for node, data in nodes.items():
        columns.setdefault(data["layer"] + PLACES.get(data["kind"], 0.1), []).append(node)
    places = {}
    for x, column in columns.items():
        for number, node in enumerate(column, start=1):
            y = 0.0 if nodes[node]["kind"] == "router" else 2 * number / (len(column) + 1) - 1
            places[node] = x, y
    return places
