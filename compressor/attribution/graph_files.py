"""The routing graph as files that networkx and Gephi open, as a part of the report, and as a picture."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compressor.attribution.figures import Attribution
from compressor.attribution.graph import (
    MEASURES,
    STANDING,
    STEERS,
    TOP,
    Centrality,
    agreements,
    centralities,
    edges_of,
    ranking,
    routing_graph,
)
from compressor.document.blocks import Figure, Table
from compressor.drawing.palette import COLOURS, MARKERS
from compressor.drawing.picture import Drawing
from compressor.words import counted, readable

if TYPE_CHECKING:
    import networkx as nx
    from matplotlib.figure import FigureBase

NAMES = ("graph.graphml", "graph.json", "graph.png")
DRAWN = 60  # edges of the picture
NAMED = 8  # experts of the picture that are named
GROUPS = 8  # communities that the report names
PLACES = {"token": 0.4, "router": 0.4, "expert": 0.75, "shared": 0.75, "mlp": 0.6}  # within a layer, which is 1 wide


@dataclass(frozen=True, slots=True)
class Measured:
    """A graph, and the measures that are attributes of its experts, too."""

    graph: "nx.DiGraph"
    centrality: Centrality


def measured_graph(attribution: Attribution) -> Measured:
    """The graph of an attribution, with every measure of centrality."""
    import networkx as nx

    graph = routing_graph(attribution)
    found = centralities(graph)
    for measure, values in found.items():
        nx.set_node_attributes(graph, values, measure)
    return Measured(graph, found)


def graph_content(made: Measured) -> dict[str, Any]:
    """What attribution.json says of the graph: its size, the first experts by each measure, where measures agree."""
    return {
        "nodes": made.graph.number_of_nodes(),
        "edges": made.graph.number_of_edges(),
        "first": {measure: ranking(made.centrality, measure)[:TOP] for measure in MEASURES},
        "agreement": [
            {"first": one, "second": other, "correlation": correlation, "shared": shared}
            for (one, other), (correlation, shared) in agreements(made.centrality).items()
        ],
    }


def graph_tables(made: Measured) -> tuple[Table, ...]:
    """The central experts, how the measures agree, and the groups of experts."""
    found, pairs = made.centrality, agreements(made.centrality)
    central = [
        (expert, *(f"{found[measure][expert]:.3g}" for measure in MEASURES))
        for expert in ranking(found, STANDING)[:TOP]
    ]
    cells: dict[tuple[str, str], str] = {}
    for (one, other), (value, shared) in pairs.items():
        cells[one, other] = cells[other, one] = f"{'-' if value is None else f'{value:.2f}'}, {shared}"
    agreed = [(one, *(cells.get((one, other), "") for other in MEASURES)) for one in MEASURES]
    several = [own for own in _communities(made.graph) if len(own) > 1]
    groups = [
        (str(number), str(len(own)), str(len({made.graph.nodes[each]["layer"] for each in own})), ", ".join(own[:4]))
        for number, own in enumerate(several[:GROUPS])
    ]
    standing = "The most central experts, by standing: PageRank over the mean of their layer's experts"
    agreement = f"Spearman's rank correlation between measures, and how many experts are among the first {TOP} by both"
    together = f"Experts that are routed to together over layers: {counted(len(several), 'group')} of several"
    columns = ("community", "experts", "layers", "most visited")
    return (
        Table(standing, ("expert", *MEASURES), tuple(central)),
        Table(agreement, ("measure", *MEASURES), tuple(agreed)),
        Table(together, columns, tuple(groups), frozenset({columns[-1]})),
    )


def _communities(graph: "nx.DiGraph") -> list[list[str]]:
    """Experts by community, the most visited first."""
    found: dict[int, list[str]] = {}
    for node, data in sorted(graph.nodes(data=True), key=lambda entry: -entry[1].get("share", 0.0)):
        if "community" in data:
            found.setdefault(data["community"], []).append(node)
    return [found[number] for number in sorted(found)]


def write_graph(made: Measured, folder: Path) -> None:
    """Save the graph as GraphML and as node-link JSON, without rounding."""
    import networkx as nx

    lines = "\n".join(nx.generate_graphml(made.graph, named_key_ids=True))
    (folder / NAMES[0]).write_text(lines + "\n", encoding="utf-8")
    content = json.dumps(nx.node_link_data(made.graph, edges="edges"), ensure_ascii=False, allow_nan=False, indent=0)
    (folder / NAMES[1]).write_text(content + "\n", encoding="utf-8")


def graph_figure(made: Measured) -> Figure:
    """Layers from left to right, the heaviest edges between senders and routers, the most central experts by name."""
    nodes, named = made.graph.nodes, ranking(made.centrality, STANDING)[:NAMED]
    steering = edges_of(made.graph, STEERS).edges(data="weight")
    edges = sorted((edge for edge in steering if edge[2] > 0), key=lambda edge: -edge[2])[:DRAWN]
    ends = {*named, *(end for edge in edges for end in edge[:2])}
    at = _places({node: data for node, data in nodes(data=True) if node in ends})
    layers = sorted({nodes[node]["layer"] for node in at})
    title = f"{counted(len(edges), 'heaviest edge')} into routers, experts first by {STANDING}"
    title = f"{made.graph.graph['model']}: {title}"
    paths = ", ".join(f"{start} to {end}" for start, end, _ in edges[:NAMED]) or "none"
    alt = f"Heaviest edges: {paths}. Experts first by {STANDING}: {', '.join(named) or 'none'}."
    draw = partial(_draw, nodes=nodes, edges=edges, at=at, named=named, layers=layers)
    return Figure("graph", title, "", (Drawing(title, alt, (min(16, 4 + 1.1 * len(layers)), 5), draw),))


def _draw(
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
