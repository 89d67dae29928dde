"""Who writes what into whose routing, as a networkx graph.

Nodes are the token's embedding, attention heads (or the whole attention where its heads cannot be told apart), dense
MLPs, shared experts, routed experts and routers; their id is a short label, such as `token`, `L3 head 5`, `L1 E9`,
`L2 router`. An edge is of one of three kinds:

- `steers`, sender -> later router: `influence`, `aarv` (where it is measured) and `covariance`, as the attribution has
  them. The covariances of all edges into a router add up to the variance of its logits. `weight` is the edge's part of
  the influence of all edges into that router, so that no router counts for more because its logits are larger.
- `routes`, router -> each expert of its layer: `weight` is the part of the router's choices that fall on that expert.
  It makes paths: whoever steers a router decides which experts write to later ones.
- `scores`, sender -> later expert, where that was asked for: `influence` on that expert's score. The edges from one
  sender to all experts of a router add up to its influence on the router, so no centrality counts them again.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch

from compressor.attribution.communities import communities
from compressor.attribution.figures import Attribution, Sender
from compressor.attribution.summary import router_labels, sender_labels, spearman
from compressor.ties import rounded
from compressor.words import one_line

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


STEERS, ROUTES, SCORES = "steers", "routes", "scores"
BEFORE = -1  # the layer of the token's embedding


def routing_graph(attribution: Attribution, seed: int = 0) -> "nx.DiGraph":
    """The graph of an attribution, nodes in model order; `seed` is for the communities of experts."""
    import networkx as nx

    graph = nx.DiGraph(model=one_line(attribution.model), tokens=attribution.tokens)
    senders, routers = attribution.parts(), router_labels(attribution.receivers)
    labels = dict(zip([sender.name for sender in senders], sender_labels(senders), strict=True))
    experts = _experts(attribution, senders)
    groups = communities(experts, attribution.together, seed)
    of = {sender.name: groups[expert] for expert, sender in experts.items()}
    for sender in senders:
        layer = BEFORE if sender.layer is None else sender.layer
        more = {"number": sender.number, "community": of.get(sender.name)}
        _add_node(graph, labels[sender.name], sender.kind, layer, sender.module, share=sender.share, **more)
    for label, receiver in zip(routers, attribution.receivers, strict=True):
        figures = {"variance": receiver.variance, "unexplained": receiver.unexplained}
        _add_node(graph, label, "router", receiver.layer, receiver.module, **figures)
    for number, label in enumerate(routers):
        total = math.fsum(_known(sender.influence[number] for sender in senders))
        for sender in senders:
            if not (known := [*_known([sender.influence[number]])]):
                continue
            covariance = sender.covariance[number] if sender.covariance else None
            figures = _finite(influence=known[0], aarv=sender.rank_change[number], covariance=covariance)
            weight = known[0] / total if total else 0.0
            graph.add_edge(labels[sender.name], label, kind=STEERS, weight=weight, **figures)
        own = [sender for (router, _), sender in experts.items() if router == number and sender.share > 0]
        visits = math.fsum(sender.share for sender in own)
        for sender in own:
            graph.add_edge(label, labels[sender.name], kind=ROUTES, weight=sender.share / visits)
    for edge in attribution.score_edges:
        end = labels[experts[edge.receiver, edge.expert].name]
        graph.add_edge(labels[edge.sender], end, kind=SCORES, influence=edge.influence)
    return graph


def _experts(attribution: Attribution, senders: Iterable[Sender]) -> dict[tuple[int, int], Sender]:
    """The routed experts by the number of their router among the receivers, and their own."""
    found = {(sender.module, sender.number): sender for sender in senders if sender.kind == "expert"}
    numbers = {receiver.module: number for number, receiver in enumerate(attribution.receivers)}
    return {(numbers[name], expert or 0): sender for (name, expert), sender in found.items() if name in numbers}


def _known(values: Iterable[float | None]) -> Iterable[float]:
    return (value for value in values if value is not None and math.isfinite(value))


def _finite(**figures: Any) -> dict[str, Any]:
    """Those that are there and are numbers, for GraphML has no word for others."""
    return {name: value for name, value in figures.items() if value is not None and math.isfinite(value)}


def _add_node(graph: "nx.DiGraph", label: str, kind: str, layer: int, module: str, **figures: Any) -> None:
    graph.add_node(label, label=label, kind=kind, layer=layer, module=module, **_finite(**figures))


def edges_of(graph: "nx.DiGraph", *kinds: str) -> "nx.DiGraph":
    """The graph with the edges of these kinds alone, and all nodes."""
    import networkx as nx

    found = nx.DiGraph()
    found.add_nodes_from(graph.nodes(data=True))
    found.add_edges_from((start, end, data) for start, end, data in graph.edges(data=True) if data["kind"] in kinds)
    return found
