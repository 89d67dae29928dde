"""Which experts are hubs by their place in the routing graph, and whether the measures agree."""

from collections.abc import Mapping, Sequence
from itertools import combinations
from statistics import fmean
from typing import TYPE_CHECKING

import torch

from compressor.attribution.figures import Attribution
from compressor.attribution.graph import ROUTES, STEERS, edges_of, routing_graph
from compressor.attribution.summary import spearman
from compressor.ties import rounded

if TYPE_CHECKING:
    import networkx as nx

INFLUENCE, AARV, DEGREE, PAGERANK = "influence", "AARV", "out-degree", "PageRank"
STANDING, BETWEENNESS, CORE = "standing", "betweenness", "core"
MEASURES = (INFLUENCE, AARV, DEGREE, PAGERANK, STANDING, BETWEENNESS, CORE)
TOP = 10

Centrality = Mapping[str, Mapping[str, float]]  # by measure, of every expert by its label


def centralities(graph: "nx.DiGraph") -> Centrality:
    """The measures of `MEASURES` of every expert that comes before a router, in model order.

    - influence and AARV: summed over the later routers, as hubs are found by;
    - out-degree: the weights of the edges to later routers, added up;
    - PageRank of the reversed graph: where someone is found who starts at a router drawn by chance, goes back to who
      steers it as the weights say, from an expert to its own router, and starts again with a chance of 0.15;
    - standing: PageRank over the mean of the layer's experts, since early layers reach more routers and experts compete
      for a place with those of their own layer alone; `--protect graph:N` goes by it;
    - betweenness: the part of the pairs of routers whose strongest path passes the expert, over strong edges and those
      to each router's own experts; an edge is 1 / weight long (Brandes 2008);
    - core: the largest k for which the expert is in a part of the graph of strong edges, directions aside, where all
      have k neighbours (Seidman 1983).
    """
    import networkx as nx

    steering, routes = edges_of(graph, STEERS), edges_of(graph, ROUTES)
    strong = strong_edges(steering)
    experts = [node for node, kind in graph.nodes(data="kind") if kind == "expert" and steering.out_degree(node)]
    routers = [node for node, kind in graph.nodes(data="kind") if kind == "router"]
    starts = dict.fromkeys(routers, 1.0)
    back = nx.compose(steering, routes).reverse()
    ranks = nx.pagerank(back, personalization=starts, tol=1e-12, max_iter=1000) if routers else {}
    paths = nx.compose(strong, routes)
    lengths = {(start, end): 1 / weight for start, end, weight in paths.edges(data="weight")}
    nx.set_edge_attributes(paths, lengths, "length")
    between = nx.betweenness_centrality_subset(paths, routers, routers, weight="length")
    pairs = max(1, len(routers) * (len(routers) - 1) // 2)  # a later router never comes before an earlier one
    layers: dict[str, list[float]] = {}
    for expert in experts:
        layers.setdefault(graph.nodes[expert]["module"], []).append(ranks[expert])
    standing = {expert: ranks[expert] / (fmean(layers[graph.nodes[expert]["module"]]) or 1.0) for expert in experts}
    found: dict[str, Mapping[str, float]] = {
        INFLUENCE: dict(steering.out_degree(experts, weight="influence")),
        AARV: dict(steering.out_degree(experts, weight="aarv")),
        DEGREE: dict(steering.out_degree(experts, weight="weight")),
        PAGERANK: ranks,
        STANDING: standing,
        BETWEENNESS: {node: value / pairs for node, value in between.items()},
        CORE: nx.core_number(strong.to_undirected()),
    }
    return {measure: {expert: float(found[measure][expert]) for expert in experts} for measure in MEASURES}


def strong_edges(steering: "nx.DiGraph") -> "nx.DiGraph":
    """The edges into each router that are at least as heavy as the mean of those from senders of the same kind."""
    kinds, strong = steering.nodes(data="kind"), edges_of(steering)
    for router, kind in kinds:
        edges = list(steering.in_edges(router, data=True)) if kind == "router" else []
        weights: dict[str, list[float]] = {}
        for sender, _, data in edges:
            weights.setdefault(kinds[sender], []).append(data["weight"])
        least = {name: fmean(own) * (1 - 1e-9) for name, own in weights.items()}
        strong.add_edges_from(edge for edge in edges if edge[2]["weight"] >= least[kinds[edge[0]]] > 0)
    return strong


def ranking(found: Centrality, measure: str) -> list[str]:
    """Experts above 0 by a measure, the most central first; equal ones by out-degree, then in model order."""
    experts = [*found[measure]]
    values, degrees = (
        rounded(torch.tensor([found[name][expert] for expert in experts], dtype=torch.float64)).tolist()
        for name in (measure, DEGREE)
    )
    order = sorted(range(len(experts)), key=lambda place: (-values[place], -degrees[place]))
    return [experts[place] for place in order if values[place] > 0]


def agreements(found: Centrality) -> dict[tuple[str, str], tuple[float | None, int]]:
    """Of every two measures, how far they order the experts alike, and how many are among the `TOP` first by both.

    The first is Spearman's rank correlation, None for fewer than 3 experts or where a measure is the same for all.
    """
    tops = {measure: set(ranking(found, measure)[:TOP]) for measure in found}
    return {
        (one, other): (spearman([*found[one].values()], [*found[other].values()]), len(tops[one] & tops[other]))
        for one, other in combinations(found, 2)
    }


def most_central(attribution: Attribution, count: int) -> Sequence[tuple[str, int]]:
    """Experts module and number of the `count` experts with the greatest standing, the most central first."""
    graph = routing_graph(attribution)
    chosen = ranking(centralities(graph), STANDING)[:count]
    return [(graph.nodes[label]["module"], graph.nodes[label]["number"]) for label in chosen]
