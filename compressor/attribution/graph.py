"""The routing graph of networkx: which component steers which router, and communities of experts
used together.

Nodes are the token's embedding, attention heads (or the whole attention where its heads cannot be
told apart), dense MLPs, shared experts, routed experts and routers; their id is a short label, such
as `token`, `L3 head 5`, `L1 E9`, `L2 router`. An edge is of one of three kinds:

- `steers`, sender -> later router: `influence`, `aarv` (where it is measured) and `covariance`, as
  the attribution has them. The covariances of all edges into a router add up to the variance of its
  logits. `weight` is the edge's part of the influence of all edges into that router, so that no
  router counts for more because its logits are larger.
- `routes`, router -> each expert of its layer: `weight` is the part of the router's choices that
  fall on that expert. It makes paths: whoever steers a router decides which experts write to later
  ones.
- `scores`, sender -> later expert, if requested: `influence` on that expert's score. The edges from
  one sender to all experts of a router add up to its influence on the router, so no centrality
  counts them again.

T tokens, R routers in model order, E experts, K top-k. Chance would send n_i * n_j / T tokens
through expert i of one router and expert j of the next one, of which n_i and n_j tokens are routed
to each."""

import math
from collections.abc import Collection, Mapping
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from compressor.attribution.figures import (
    Attribution,
    Together,
    equal_where_tied,
    is_measured,
    router_labels,
    sender_labels,
)
from compressor.devices import as_float64, float64_device
from compressor.distributed import ranks
from compressor.formatting import one_line

if TYPE_CHECKING:
    import networkx as nx

INFLUENCE = "influence"
AARV = "AARV"
DEGREE = "out-degree"
PAGERANK = "PageRank"
RELATIVE = "relative PageRank"
BETWEENNESS = "betweenness"
CORE = "core"
MEASURES = (INFLUENCE, AARV, DEGREE, PAGERANK, RELATIVE, BETWEENNESS, CORE)
TOP = 10
STEERS = "steers"
ROUTES = "routes"
SCORES = "scores"
BEFORE = -1  # the layer of the token's embedding
NOTABLE = 3.0  # standard deviations of a Poisson count by which two experts exceed chance
FOLLOWING = 8  # experts of the next router that are kept for each expert

Centrality = Mapping[str, Mapping[str, float]]  # by measure, of every expert by its label


def centralities(graph: "nx.DiGraph") -> Centrality:
    """Return the measures of `MEASURES` of every expert that comes before a router, in model order.

    - influence and AARV: summed over the later routers, as hubs are found by;
    - out-degree: the weights of the edges to later routers, added up;
    - PageRank of the reversed graph: where someone is found who starts at a router drawn by chance,
      goes back to who steers it as the weights say, from an expert to its own router, and starts
      again with a chance of 0.15;
    - relative PageRank: PageRank over the mean of the layer's experts, since early layers reach
      more routers and experts compete for a place with those of their own layer alone; `--protect
      graph:N` goes by it;
    - betweenness: the part of the pairs of routers whose strongest path passes the expert, over
      strong edges and those to each router's own experts; an edge is 1 / weight long (Brandes
      2008);
    - core: the largest k for which the expert is in a part of the graph of strong edges, directions
      aside, where all have k neighbours (Seidman 1983).
    """
    import networkx as nx

    kinds = dict(graph.nodes(data="kind"))
    modules = dict(graph.nodes(data="module"))
    steering = edges_of(graph, STEERS)
    routes = edges_of(graph, ROUTES)
    # edges into each router at least as heavy as the mean edge from the same kind of sender
    strong = nx.create_empty_copy(steering)
    weights: dict[tuple[str, str], list[float]] = {}
    for sender, router, weight in steering.edges(data="weight"):
        weights.setdefault((router, kinds[sender]), []).append(weight)
    least = {key: fmean(alike) * (1 - 1e-9) for key, alike in weights.items()}
    for sender, router, data in steering.edges(data=True):
        if data["weight"] >= least[router, kinds[sender]] > 0:
            strong.add_edge(sender, router, **data)
    experts = [
        node for node, kind in kinds.items() if kind == "expert" and steering.out_degree(node)
    ]
    routers = [node for node, kind in kinds.items() if kind == "router"]
    back = nx.compose(steering, routes).reverse()
    visited = nx.pagerank(
        back, personalization=dict.fromkeys(routers, 1.0), tol=1e-12, max_iter=1000
    )
    by_layer: dict[str, list[float]] = {}
    for expert in experts:
        by_layer.setdefault(modules[expert], []).append(visited[expert])
    paths = nx.compose(strong, routes)
    for _, _, data in paths.edges(data=True):
        data["length"] = 1 / data["weight"]
    between = nx.betweenness_centrality_subset(paths, routers, routers, weight="length")
    # a later router never comes before an earlier one
    pairs = max(1, len(routers) * (len(routers) - 1) // 2)
    measured: dict[str, Mapping[str, float]] = {
        INFLUENCE: dict(steering.out_degree(experts, weight="influence")),
        AARV: dict(steering.out_degree(experts, weight="aarv")),
        DEGREE: dict(steering.out_degree(experts, weight="weight")),
        PAGERANK: visited,
        RELATIVE: {
            expert: visited[expert] / (fmean(by_layer[modules[expert]]) or 1.0)
            for expert in experts
        },
        BETWEENNESS: {node: value / pairs for node, value in between.items()},
        CORE: nx.core_number(strong.to_undirected()),
    }
    centrality = {}
    for measure in MEASURES:
        centrality[measure] = {expert: float(measured[measure][expert]) for expert in experts}
    return centrality


def ranking(centrality: Centrality, measure: str) -> list[str]:
    """Experts above 0 by a measure, the most central first; equal ones by out-degree, then in model
    order."""
    experts = [*centrality[measure]]
    values = equal_where_tied(centrality[measure].values())
    degrees = equal_where_tied(centrality[DEGREE].values())
    order = sorted(range(len(experts)), key=lambda index: (-values[index], -degrees[index]))
    return [experts[index] for index in order if values[index] > 0]


def routing_graph(attribution: Attribution, seed: int = 0) -> "nx.DiGraph":
    """Return the graph of an attribution, nodes in model order; `seed` is for the communities of
    experts."""
    import networkx as nx

    graph = nx.DiGraph(model=one_line(attribution.model), tokens=attribution.tokens)
    senders = attribution.parts()
    routers = router_labels(attribution.receivers)
    receivers = {receiver.module: number for number, receiver in enumerate(attribution.receivers)}
    labels: dict[str, str] = {}  # by the sender's name
    experts = {}  # by the number of their router among the receivers, and their own
    for sender, label in zip(senders, sender_labels(senders), strict=True):
        labels[sender.name] = label
        if sender.number is not None and sender.module in receivers:
            experts[receivers[sender.module], sender.number] = sender
    # Louvain's method on the excess over chance (Blondel et al. 2008, arXiv:0803.0476), largest
    # first; an expert that goes with no other is a community of its own
    order = [*experts]
    numbers = {expert: number for number, expert in enumerate(order)}
    pairs = nx.Graph()
    # numbers: sets of them have the same order in every process
    pairs.add_nodes_from(range(len(order)))
    for pair in attribution.together:
        first = numbers[pair.receiver, pair.expert]
        second = numbers[pair.receiver + 1, pair.following]
        pairs.add_edge(first, second, weight=pair.excess)
    found = nx.community.louvain_communities(pairs, seed=seed) if order else []
    groups = sorted([sorted(members) for members in found], key=lambda group: (-len(group), group))
    community = {}
    for number, members in enumerate(groups):
        for member in members:
            community[experts[order[member]].name] = number
    for sender in senders:
        attributes = {
            "kind": sender.kind,
            "layer": BEFORE if sender.layer is None else sender.layer,
            "module": sender.module,
        }
        facts = _measured(
            share=sender.share, number=sender.number, community=community.get(sender.name)
        )
        graph.add_node(labels[sender.name], label=labels[sender.name], **attributes, **facts)
    for label, receiver in zip(routers, attribution.receivers, strict=True):
        attributes = {"kind": "router", "layer": receiver.layer, "module": receiver.module}
        facts = _measured(variance=receiver.variance, unexplained=receiver.unexplained)
        graph.add_node(label, label=label, **attributes, **facts)
    for number, router in enumerate(routers):
        reaching = [sender for sender in senders if is_measured(sender.influence[number])]
        total = math.fsum(sender.influence[number] or 0.0 for sender in reaching)
        for sender in reaching:
            influence = sender.influence[number] or 0.0
            weight = influence / total if total else 0.0
            facts = _measured(
                influence=influence,
                aarv=sender.rank_change[number],
                covariance=sender.covariance[number],
            )
            graph.add_edge(labels[sender.name], router, kind=STEERS, weight=weight, **facts)
        routed = [
            expert for (layer, _), expert in experts.items() if layer == number and expert.share > 0
        ]
        total = math.fsum(expert.share for expert in routed)
        for expert in routed:
            graph.add_edge(router, labels[expert.name], kind=ROUTES, weight=expert.share / total)
    for edge in attribution.score_edges:
        end = labels[experts[edge.receiver, edge.expert].name]
        graph.add_edge(labels[edge.sender], end, kind=SCORES, influence=edge.influence)
    return graph


def _measured(**figures: float | None) -> dict[str, Any]:
    return {name: value for name, value in figures.items() if is_measured(value)}


def edges_of(graph: "nx.DiGraph", kind: str) -> "nx.DiGraph":
    """Return the graph with the edges of this kind alone, and all nodes."""
    import networkx as nx

    return nx.subgraph_view(
        graph, filter_edge=lambda start, end: graph.edges[start, end]["kind"] == kind
    ).copy()


def measured_graph(attribution: Attribution) -> tuple["nx.DiGraph", Centrality]:
    """The graph of an attribution, with every measure of centrality as an attribute of its experts,
    and by itself."""
    import networkx as nx

    graph = routing_graph(attribution)
    centrality = centralities(graph)
    for measure, values in centrality.items():
        nx.set_node_attributes(graph, values, measure)
    return graph, centrality


def routed_together(
    chosen: Collection[Tensor], valid: Tensor, experts: int, tokens: int
) -> tuple[Together, ...]:
    """Pairs of experts of consecutive routers that meet in more tokens than by chance, of batches
    [T, R, K].

    `chosen` are this rank's batches, and `tokens` those of all ranks. `valid` [R, K] marks the
    slots that a router uses. Of every expert those of the next router are kept with which the
    excess is greatest. Memory is that of two routers' choices and one table [E, E]."""
    together = []
    for first in range(len(valid) - 1):
        table = torch.zeros(
            experts + 2, experts, dtype=torch.float64, device=float64_device(valid.device)
        )
        for batch in chosen:
            passed, following = (
                torch.zeros(len(batch), experts, device=batch.device).scatter_(
                    1, batch[:, router, valid[router]], 1.0
                )
                for router in (first, first + 1)
            )
            counts = [passed.T @ following, passed.sum(0)[None], following.sum(0)[None]]
            table += as_float64(torch.cat(counts))
        # of tokens, so exact in any order
        both, alone = ranks().all_reduce(table).split([experts, 2])
        expected = alone[0][:, None] * alone[1] / tokens
        excess = both - expected
        excess[excess <= NOTABLE * expected.sqrt()] = 0
        values, order = excess.sort(descending=True, stable=True)
        for expert in range(experts):
            strongest = zip(
                values[expert, :FOLLOWING].tolist(), order[expert].tolist(), strict=False
            )
            together += [
                Together(first, expert, other, value / tokens)
                for value, other in strongest
                if value > 0
            ]
    return tuple(together)
