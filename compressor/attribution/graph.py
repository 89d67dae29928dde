"""Who writes what into whose routing, as a networkx graph, and the communities of experts that are routed to together.

Nodes are the token's embedding, attention heads (or the whole attention where its heads cannot be told apart), dense
MLPs, shared experts, routed experts and routers; their id is a short label, such as `token`, `L3 head 5`, `L1 E9`,
`L2 router`. An edge is of one of three kinds:

- `steers`, sender -> later router: `influence`, `aarv` (where it is measured) and `covariance`, as the attribution has
  them. The covariances of all edges into a router add up to the variance of its logits. `weight` is the edge's part of
  the influence of all edges into that router, so that no router counts for more because its logits are larger.
- `routes`, router -> each expert of its layer: `weight` is the part of the router's choices that fall on that expert.
  It makes paths: whoever steers a router decides which experts write to later ones.
- `scores`, sender -> later expert, if requested: `influence` on that expert's score. The edges from one
  sender to all experts of a router add up to its influence on the router, so no centrality counts them again.

T tokens, R routers in model order, E experts, K top-k. Chance would send n_i * n_j / T tokens through expert i of one
router and expert j of the next one, of which n_i and n_j tokens are routed to each.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import combinations, pairwise
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from compressor.attribution.figures import Attribution, Together, router_labels, sender_labels, spearman
from compressor.devices import as_float64, float64_device
from compressor.distributed import ranks
from compressor.formatting import one_line
from compressor.tolerance import rounded

if TYPE_CHECKING:
    import networkx as nx

INFLUENCE, AARV, DEGREE, PAGERANK = "influence", "AARV", "out-degree", "PageRank"
RELATIVE, BETWEENNESS, CORE = "relative PageRank", "betweenness", "core"
MEASURES = (INFLUENCE, AARV, DEGREE, PAGERANK, RELATIVE, BETWEENNESS, CORE)
TOP = 10
STEERS, ROUTES, SCORES = "steers", "routes", "scores"
BEFORE = -1  # the layer of the token's embedding
NOTABLE = 3.0  # standard deviations of a Poisson count by which two experts exceed chance
FOLLOWING = 8  # experts of the next router that are kept for each expert

Centrality = Mapping[str, Mapping[str, float]]  # by measure, of every expert by its label
Expert = tuple[int, int]  # number of its router among the receivers, and its own


def centralities(graph: "nx.DiGraph") -> Centrality:
    """The measures of `MEASURES` of every expert that comes before a router, in model order.

    - influence and AARV: summed over the later routers, as hubs are found by;
    - out-degree: the weights of the edges to later routers, added up;
    - PageRank of the reversed graph: where someone is found who starts at a router drawn by chance, goes back to who
      steers it as the weights say, from an expert to its own router, and starts again with a chance of 0.15;
    - relative PageRank: PageRank over the mean of the layer's experts, since early layers reach more routers and
      experts compete for a place with those of their own layer alone; `--protect graph:N` goes by it;
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
    relative = {expert: ranks[expert] / (fmean(layers[graph.nodes[expert]["module"]]) or 1.0) for expert in experts}
    measured: dict[str, Mapping[str, float]] = {
        INFLUENCE: dict(steering.out_degree(experts, weight="influence")),
        AARV: dict(steering.out_degree(experts, weight="aarv")),
        DEGREE: dict(steering.out_degree(experts, weight="weight")),
        PAGERANK: ranks,
        RELATIVE: relative,
        BETWEENNESS: {node: value / pairs for node, value in between.items()},
        CORE: nx.core_number(strong.to_undirected()),
    }
    return {measure: {expert: float(measured[measure][expert]) for expert in experts} for measure in MEASURES}


def strong_edges(steering: "nx.DiGraph") -> "nx.DiGraph":
    """The edges into each router that are at least as heavy as the mean of those from senders of the same kind."""
    import networkx as nx

    kinds, strong = steering.nodes(data="kind"), nx.create_empty_copy(steering)
    for router, kind in kinds:
        edges = list(steering.in_edges(router, data=True)) if kind == "router" else []
        weights: dict[str, list[float]] = {}
        for sender, _, data in edges:
            weights.setdefault(kinds[sender], []).append(data["weight"])
        least = {name: fmean(own) * (1 - 1e-9) for name, own in weights.items()}
        strong.add_edges_from(edge for edge in edges if edge[2]["weight"] >= least[kinds[edge[0]]] > 0)
    return strong


def ranking(centrality: Centrality, measure: str) -> list[str]:
    """Experts above 0 by a measure, the most central first; equal ones by out-degree, then in model order."""
    experts = [*centrality[measure]]
    values, degrees = (
        rounded(torch.tensor([centrality[name][expert] for expert in experts], dtype=torch.float64)).tolist()
        for name in (measure, DEGREE)
    )
    order = sorted(range(len(experts)), key=lambda place: (-values[place], -degrees[place]))
    return [experts[place] for place in order if values[place] > 0]


def agreements(centrality: Centrality) -> list[dict[str, Any]]:
    """Of every two measures, how far they order the experts alike, and how many are among the `TOP` first by both.

    The correlation is Spearman's, None for fewer than 3 experts or where a measure is the same for all.
    """
    tops = {measure: set(ranking(centrality, measure)[:TOP]) for measure in centrality}
    return [
        {
            "first": one,
            "second": other,
            "correlation": spearman([*centrality[one].values()], [*centrality[other].values()]),
            "shared": len(tops[one] & tops[other]),
        }
        for one, other in combinations(centrality, 2)
    ]


def routing_graph(attribution: Attribution, seed: int = 0) -> "nx.DiGraph":
    """The graph of an attribution, nodes in model order; `seed` is for the communities of experts."""
    import networkx as nx

    graph = nx.DiGraph(model=one_line(attribution.model), tokens=attribution.tokens)
    senders, routers = attribution.parts(), router_labels(attribution.receivers)
    labels = dict(zip([sender.name for sender in senders], sender_labels(senders), strict=True))
    numbers = {receiver.module: number for number, receiver in enumerate(attribution.receivers)}
    experts = {
        (numbers[sender.module], sender.number or 0): sender
        for sender in senders
        if sender.kind == "expert" and sender.module in numbers
    }
    groups = communities(experts, attribution.together, seed)
    of = {sender.name: groups[expert] for expert, sender in experts.items()}
    for sender in senders:
        layer, label = BEFORE if sender.layer is None else sender.layer, labels[sender.name]
        more = _finite(share=sender.share, number=sender.number, community=of.get(sender.name))
        graph.add_node(label, label=label, kind=sender.kind, layer=layer, module=sender.module, **more)
    for label, receiver in zip(routers, attribution.receivers, strict=True):
        more = _finite(variance=receiver.variance, unexplained=receiver.unexplained)
        graph.add_node(label, label=label, kind="router", layer=receiver.layer, module=receiver.module, **more)
    for number, label in enumerate(routers):
        influences = [_finite(influence=sender.influence[number]) for sender in senders]
        total = math.fsum(each["influence"] for each in influences if each)
        for sender, each in zip(senders, influences, strict=True):
            if each:
                covariance = sender.covariance[number] if sender.covariance else None
                weight = each["influence"] / total if total else 0.0
                more = _finite(aarv=sender.rank_change[number], covariance=covariance)
                graph.add_edge(labels[sender.name], label, kind=STEERS, weight=weight, **each, **more)
        own = [sender for (router, _), sender in experts.items() if router == number and sender.share > 0]
        routed = math.fsum(sender.share for sender in own)
        for sender in own:
            graph.add_edge(label, labels[sender.name], kind=ROUTES, weight=sender.share / routed)
    for edge in attribution.score_edges:
        end = labels[experts[edge.receiver, edge.expert].name]
        graph.add_edge(labels[edge.sender], end, kind=SCORES, influence=edge.influence)
    return graph


def _finite(**figures: float | None) -> dict[str, Any]:
    return {name: value for name, value in figures.items() if value is not None and math.isfinite(value)}


def edges_of(graph: "nx.DiGraph", *kinds: str) -> "nx.DiGraph":
    """The graph with the edges of these kinds alone, and all nodes."""
    import networkx as nx

    return nx.subgraph_view(graph, filter_edge=lambda start, end: graph.edges[start, end]["kind"] in kinds).copy()


def measured_graph(attribution: Attribution) -> tuple["nx.DiGraph", Centrality]:
    """The graph of an attribution, with every measure of centrality as an attribute of its experts, and by itself."""
    import networkx as nx

    graph = routing_graph(attribution)
    centrality = centralities(graph)
    for measure, values in centrality.items():
        nx.set_node_attributes(graph, values, measure)
    return graph, centrality


def routed_together(chosen: Collection[Tensor], valid: Tensor, experts: int, tokens: int) -> tuple[Together, ...]:
    """Pairs of experts of consecutive routers that meet in more tokens than by chance, of batches [T, R, K].

    `chosen` are this rank's batches, and `tokens` those of all ranks. `valid` [R, K] marks the slots that a router
    uses. Of every expert those of the next router are kept with which the excess is greatest. Memory is that of two
    routers' choices and one table [E, E].
    """
    together: list[Together] = []
    for first, second in pairwise(range(len(valid))):
        table = torch.zeros(experts + 2, experts, dtype=torch.float64, device=float64_device(valid.device))
        for batch in chosen:
            one, other = (
                torch.zeros(len(batch), experts, device=batch.device).scatter_(1, batch[:, number, valid[number]], 1.0)
                for number in (first, second)
            )
            table += as_float64(torch.cat([one.T @ other, one.sum(0)[None], other.sum(0)[None]]))
        counts, routed = ranks().all_reduce(table).split([experts, 2])  # of tokens, so exact in any order
        expected = routed[0][:, None] * routed[1] / tokens
        excess = counts - expected
        excess[excess <= NOTABLE * expected.sqrt()] = 0
        values, following = excess.sort(descending=True, stable=True)
        for expert, (row, others) in enumerate(zip(values.tolist(), following.tolist(), strict=True)):
            kept = zip(row[:FOLLOWING], others, strict=False)
            together += [Together(first, expert, other, value / tokens) for value, other in kept if value > 0]
    return tuple(together)


def communities(experts: Iterable[Expert], together: Sequence[Together], seed: int = 0) -> dict[Expert, int]:
    """The number of each expert's community: Louvain's method on the excess over chance, the largest community first.

    An expert that goes with no other is a community of its own. Blondel et al. 2008, arXiv:0803.0476.
    """
    import networkx as nx

    order = {expert: number for number, expert in enumerate(experts)}
    graph = nx.Graph()
    graph.add_nodes_from(order.values())  # numbers: sets of them are walked through in the same order in every process
    for pair in together:
        ends = (pair.receiver, pair.expert), (pair.receiver + 1, pair.following)
        graph.add_edge(*(order[end] for end in ends), weight=pair.excess)
    groups = [sorted(members) for members in nx.community.louvain_communities(graph, seed=seed)] if order else []
    groups.sort(key=lambda members: (-len(members), members))
    place = {member: number for number, members in enumerate(groups) for member in members}
    return {expert: place[number] for expert, number in order.items()}
