"""The routing graph as files that networkx and Gephi open, as a part of the report, and as a picture."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compressor.attribution.centrality import (
    MEASURES,
    STANDING,
    TOP,
    Agreement,
    Centrality,
    agreements,
    centralities,
    ranking,
)
from compressor.attribution.figures import Attribution
from compressor.attribution.graph import STEERS, routing_graph
from compressor.document.blocks import Figure, Table
from compressor.drawing.palette import COLOURS, MARKERS
from compressor.drawing.picture import Drawing
from compressor.words import counted, readable

if TYPE_CHECKING:
    import networkx as nx
    from matplotlib.axes import Axes
    from matplotlib.figure import FigureBase

NAMES = ("graph.graphml", "graph.json", "graph.png")
DRAWN = 60  # edges of the picture
NAMED = 8  # experts of the picture that are named
GROUPS = 8  # communities that the report names
PLACES = {"router": 0.4, "expert": 0.75, "shared": 0.75, "mlp": 0.6}  # within a layer, of which the next begins at 1


@dataclass(frozen=True, slots=True)
class Drawn:
    """The graph of an attribution with the measures that are node attributes in it, too."""

    graph: "nx.DiGraph"
    centrality: Centrality
    agreements: tuple[Agreement, ...]


def measured_graph(attribution: Attribution) -> Drawn:
    """The graph whose experts have each measure of centrality as an attribute."""
    graph = routing_graph(attribution)
    found = centralities(graph)
    for measure, values in found.items():
        for expert, value in values.items():
            graph.nodes[expert][measure] = value
    return Drawn(graph, found, agreements(found))


def graph_content(made: Drawn) -> dict[str, Any]:
    """What attribution.json says of the graph: its size, the first experts by each measure, where measures agree."""
    return {
        "nodes": made.graph.number_of_nodes(),
        "edges": made.graph.number_of_edges(),
        "first": {measure: ranking(made.centrality, measure)[:TOP] for measure in MEASURES},
        "agreement": made.agreements,
    }


def graph_tables(made: Drawn) -> tuple[Table, ...]:
    """Tables of the central experts, of the measures' agreement and of the communities."""
    found, graph = made.centrality, made.graph
    central = [
        (expert, *(f"{found[measure][expert]:.3g}" for measure in MEASURES))
        for expert in ranking(found, STANDING)[:TOP]
    ]
    pairs = {(each.first, each.second): each for each in made.agreements}
    agreed = [(one, *(_agreement(pairs, one, other) for other in MEASURES)) for one in MEASURES]
    members: dict[int, list[str]] = {}
    for expert, number in graph.nodes(data="community"):
        if number is not None:
            members.setdefault(number, []).append(expert)
    groups = [
        (str(number + 1), str(len(own)), str(len({graph.nodes[each]["layer"] for each in own})), _named(graph, own))
        for number, own in sorted(members.items())[:GROUPS]
        if len(own) > 1
    ]
    several = sum(len(own) > 1 for own in members.values())
    standing = "The most central experts, by standing: PageRank over the mean of their layer's experts"
    agreement = (
        f"Where the measures agree: Spearman's rank correlation over the experts, and how many of the first {TOP} "
        "are the same"
    )
    together = f"Experts that are routed to together over layers form {counted(several, 'group')} of several experts"
    often = "its most visited"
    return (
        Table(standing, ("expert", *MEASURES), tuple(central)),
        Table(agreement, ("measure", *MEASURES), tuple(agreed)),
        Table(together, ("group", "experts", "layers", often), tuple(groups), frozenset({often})),
    )


def _agreement(pairs: dict[tuple[str, str], Agreement], one: str, other: str) -> str:
    each = pairs.get((one, other)) or pairs.get((other, one))
    if each is None:
        return ""
    return f"{'-' if each.correlation is None else f'{each.correlation:.2f}'}, {each.shared}"


def _named(graph: "nx.DiGraph", members: Sequence[str]) -> str:
    often = sorted(members, key=lambda each: -graph.nodes[each]["share"])[:4]
    return ", ".join(often) + (" ..." if len(members) > len(often) else "")


def write_graph(made: Drawn, folder: Path) -> None:
    """Save the graph as GraphML and as node-link JSON, without rounding."""
    import networkx as nx

    lines = "\n".join(nx.generate_graphml(made.graph, named_key_ids=True))
    (folder / NAMES[0]).write_text(lines + "\n", encoding="utf-8")
    content = json.dumps(nx.node_link_data(made.graph, edges="edges"), ensure_ascii=False, allow_nan=False, indent=0)
    (folder / NAMES[1]).write_text(content + "\n", encoding="utf-8")


def graph_figure(made: Drawn) -> Figure:
    """Layers from left to right, the heaviest edges between senders and routers, the most central experts by name."""
    graph = made.graph
    heaviest = sorted(graph.edges(data=True), key=lambda edge: -edge[2].get("weight", 0) * (edge[2]["kind"] == STEERS))
    edges = [edge for edge in heaviest[:DRAWN] if edge[2]["kind"] == STEERS and edge[2]["weight"] > 0]
    named = ranking(made.centrality, STANDING)[:NAMED]
    shown = [node for node in graph if any(node in edge[:2] for edge in edges) or node in named]
    layers = sorted({graph.nodes[node]["layer"] for node in shown})
    drawn = counted(len(edges), "heaviest edge")
    title = f"{graph.graph['model']}: the {drawn} into routers, and the experts first by {STANDING}"
    paths = ", ".join(f"{start} to {end}" for start, end, _ in edges[:NAMED]) or "none"
    alt = f"Heaviest edges: {paths}. First by {STANDING}: {', '.join(named) or 'none'}."
    draw = partial(_draw, graph=graph, edges=edges, shown=shown, named=named, layers=layers)
    return Figure("graph", title, "", (Drawing(title, alt, (min(16, 4 + 1.1 * len(layers)), 5), draw),))


def _draw(
    figure: "FigureBase", graph: "nx.DiGraph", edges: Sequence[Any], shown: Sequence[str], named: Sequence[str],
    layers: Sequence[int],
) -> None:  # fmt: skip
    at = _places(graph, shown)
    axes = figure.subplots()
    for start, end, data in reversed(edges):
        strength = (data["weight"] / edges[0][2]["weight"]) ** 0.5
        look = {"color": "#444444", "linewidth": 0.3 + 3 * strength, "alpha": 0.3 + 0.6 * strength}
        arrow = {"arrowstyle": "-", "connectionstyle": "arc3,rad=-0.15", **look}
        axes.annotate("", at[end], at[start], arrowprops=arrow)
    _draw_nodes(axes, graph, shown, at)
    for node in named:
        style: Any = {"textcoords": "offset points", "fontsize": 8, "ha": "center", "weight": "bold"}
        axes.annotate(readable(node), at[node], (0, 6), **style)
    axes.set_xticks([layer + 0.4 for layer in layers], labels=["token" if x < 0 else f"L{x}" for x in layers])
    axes.set(yticks=[], ylim=(-1.3, 1.3))
    axes.spines["left"].set_visible(False)


def _places(graph: "nx.DiGraph", shown: Sequence[str]) -> dict[str, tuple[float, float]]:
    """Routers in the middle line; a layer's other nodes spread over the height, kind by kind in one column."""
    columns: dict[float, list[str]] = {}
    for node in shown:
        kind, layer = graph.nodes[node]["kind"], graph.nodes[node]["layer"]
        columns.setdefault(layer + PLACES.get(kind, 0.4 if layer < 0 else 0.1), []).append(node)
    found = {}
    for x, nodes in columns.items():
        for place, node in enumerate(nodes):
            spread = 0.0 if graph.nodes[node]["kind"] == "router" else 2 * (place + 1) / (len(nodes) + 1) - 1
            found[node] = x, spread
    return found


def _draw_nodes(axes: "Axes", graph: "nx.DiGraph", shown: Sequence[str], at: dict[str, tuple[float, float]]) -> None:
    kinds = dict.fromkeys(graph.nodes[node]["kind"] for node in graph)
    for place, kind in enumerate(kinds):
        own = [at[node] for node in shown if graph.nodes[node]["kind"] == kind]
        if own:
            axes.plot(
                *zip(*own, strict=True), linestyle="none", marker=MARKERS[place], color=COLOURS[place], label=kind,
                markersize=7, markeredgecolor="#222222", zorder=3,
            )  # fmt: skip
    if shown:
        axes.figure.legend(loc="outside right upper")
