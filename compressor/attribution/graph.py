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
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from compressor.attribution.communities import communities
from compressor.attribution.figures import Attribution, Sender
from compressor.attribution.summary import router_labels, sender_labels
from compressor.words import one_line

if TYPE_CHECKING:
    import networkx as nx

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
