import json
import math
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compressor.attribution.figures import Attribution, ScoreEdge, Together
from compressor.attribution.graph import (
    MEASURES,
    ROUTES,
    SCORES,
    STEERS,
    centralities,
    edges_of,
    measured_graph,
    ranking,
    routed_together,
    routing_graph,
)
from compressor.attribution.pictures import EDGES_DRAWN, graph_figure
from compressor.attribution.report import findings, write_attribution
from tests.support.attribution_results import attribution, module
from tests.support.rendered_figures import axes_of

HUB = "L1 E3"
MADE = attribution()  # L1 E3 is 400 times as strong as the others of its layer


def weights(graph: Any) -> dict[tuple[str, str], float]:
    return {(start, end): data["weight"] for start, end, data in graph.edges(data=True)}


def random_attribution(seed: int, layers: int = 4, experts: int = 4) -> Attribution:
    random = np.random.default_rng(seed)
    made = attribution(layers=layers, experts=experts, heads=1, shared=False)

    def drawn(row: tuple[float | None, ...]) -> tuple[float | None, ...]:
        return tuple(None if value is None else float(random.lognormal(sigma=2)) for value in row)

    senders = tuple(
        replace(each, influence=drawn(each.influence), share=float(random.random()) if each.kind == "expert" else 1.0)
        for each in made.senders
    )
    return replace(made, senders=senders)


def test_nodes_are_the_parts_and_the_routers() -> None:
    graph = routing_graph(MADE)
    kinds = [kind for _, kind in graph.nodes(data="kind")]
    assert {kind: kinds.count(kind) for kind in kinds} == {
        "token": 1, "head": 16, "mlp": 1, "shared": 3, "expert": 24, "router": 3,
    }  # fmt: skip
    assert graph.nodes[HUB] == {
        "label": HUB, "kind": "expert", "layer": 1, "module": module(1), "number": 3, "share": 0.25,
        "community": graph.nodes[HUB]["community"],
    }  # fmt: skip
    assert graph.nodes["token"]["layer"] == -1 and graph.nodes["L2 router"]["variance"] == 3.5
    bare = replace(MADE, senders=tuple(each for each in MADE.senders if each.kind != "head"))
    assert [node for node, kind in routing_graph(bare).nodes(data="kind") if kind == "attention"] == [
        f"L{layer} attention" for layer in range(4)
    ]  # an attention whose heads cannot be told apart stays whole


def test_score_edges_change_no_centrality() -> None:
    name = next(each.name for each in MADE.of_kind("expert") if (each.layer, each.number) == (1, 3))
    edges = (ScoreEdge(name, 1, 6, 0.5), ScoreEdge(name, 2, 0, 0.25))
    graph = routing_graph(replace(MADE, score_edges=edges))
    assert graph[HUB]["L2 E6"] == {"kind": SCORES, "influence": 0.5}
    assert graph[HUB]["L3 E0"] == {"kind": SCORES, "influence": 0.25}
    assert centralities(graph) == centralities(routing_graph(MADE))


@settings(max_examples=20)
@given(st.integers(0, 999))
def test_measures_are_those_of_brute_force(seed: int) -> None:
    graph = routing_graph(random_attribution(seed))
    found = centralities(graph)
    steering, routes = weights(edges_of(graph, STEERS)), weights(edges_of(graph, ROUTES))
    strong = {edge for edge in steering if is_strong(edge, steering, dict(graph.nodes(data="kind")))}
    nodes, routers = list(graph), [node for node in graph if graph.nodes[node]["kind"] == "router"]
    experts = [node for node in graph if graph.nodes[node]["kind"] == "expert" and any(e[0] == node for e in steering)]
    assert all(list(values) == experts for values in found.values()) and list(found) == list(MEASURES)
    for expert in experts:
        out = [graph.edges[edge] for edge in steering if edge[0] == expert]
        for measure, name in (("influence", "influence"), ("AARV", "aarv"), ("out-degree", "weight")):
            assert found[measure][expert] == pytest.approx(sum(data[name] for data in out))
    assert found["PageRank"] == pytest.approx(pagerank(nodes, routers, steering, routes, experts), rel=1e-6)
    for expert in experts:
        beside = [found["PageRank"][other] for other in experts if other.split()[0] == expert.split()[0]]
        assert found["relative PageRank"][expert] == pytest.approx(
            found["PageRank"][expert] / (sum(beside) / len(beside))
        )
    lengths = {edge: 1 / weight for edge, weight in {**routes, **{e: steering[e] for e in strong}}.items()}
    assert found["betweenness"] == pytest.approx(betweenness(routers, lengths, experts))
    assert found["core"] == {expert: float(core(strong, expert)) for expert in experts}


def is_strong(edge: tuple[str, str], steering: dict[tuple[str, str], float], kinds: dict[str, str]) -> bool:
    """An edge at least as heavy as the mean one into its router from senders of its kind."""
    alike = [w for (start, end), w in steering.items() if end == edge[1] and kinds[start] == kinds[edge[0]]]
    return len(alike) == 1 or steering[edge] >= sum(alike) / len(alike)


def pagerank(nodes: list[str], routers: list[str], steering: Any, routes: Any, experts: list[str]) -> dict[str, float]:
    """The stationary distribution by a linear system, instead of by iteration."""
    place = {node: number for number, node in enumerate(nodes)}
    step, start = np.zeros((len(nodes), len(nodes))), np.zeros(len(nodes))
    start[[place[router] for router in routers]] = 1 / len(routers)
    for (sender_, router), weight in steering.items():
        step[place[router], place[sender_]] = weight
    for router, expert in routes:
        step[place[expert], place[router]] = 1.0
    step[step.sum(1) == 0] = start
    values = np.linalg.solve(np.eye(len(nodes)) - 0.85 * step.T / step.sum(1), 0.15 * start)
    return {expert: float(values[place[expert]]) for expert in experts}


def betweenness(routers: list[str], lengths: dict[tuple[str, str], float], experts: list[str]) -> dict[str, float]:
    """Every path from router to router written out; there are no ties among random lengths."""
    found, after = dict.fromkeys(experts, 0.0), dict[str, list[str]]()
    for start, end in lengths:
        after.setdefault(start, []).append(end)

    def paths(path: list[str]) -> list[list[str]]:
        return [path, *(longer for node in after.get(path[-1], ()) for longer in paths([*path, node]))]

    for start in routers:
        every = paths([start])
        for end in routers:
            own = [path for path in every if path[-1] == end and len(path) > 1]
            if own:
                best = min(own, key=lambda path: sum(lengths[edge] for edge in pairwise(path)))
                for node in best[1:-1]:
                    if node in found:
                        found[node] += 2 / (len(routers) * (len(routers) - 1))
    return found


def core(edges: set[tuple[str, str]], node: str) -> int:
    """By definition: for each k, take away whatever has fewer than k neighbours until nothing changes."""
    best = 0
    for k in range(1, len(edges)):
        left = {end for edge in edges for end in edge}
        while weak := [one for one in left if sum(one in edge and {*edge} <= left for edge in edges) < k]:
            left -= {*weak}
        if node not in left:
            return best
        best = k
    return best


def test_ranking() -> None:
    found = {
        "out-degree": {"a": 4.0, "b": 3.0, "c": 2.0, "d": 0.0},
        "core": {"a": 1.0, "b": 2.0, "c": 2.0, "d": 0.0},
        "flat": {"a": 1.0, "b": 1.0, "c": 1.0, "d": 1.0},
    }
    assert ranking(found, "core") == ["b", "c", "a"]  # equal ones by out-degree; 0 is not central


def together(experts: int = 8, routers: int = 3) -> tuple[Together, ...]:
    """Even experts are followed by even ones, odd ones by odd ones; the last of each router goes alone."""
    return tuple(
        Together(router, one, other, 0.01)
        for router in range(routers - 1)
        for one in range(experts - 1)
        for other in range(experts - 1)
        if one % 2 == other % 2
    )


def test_communities_are_the_experts_that_go_together() -> None:
    graph = routing_graph(replace(MADE, together=together()))
    groups: dict[int, set[tuple[int, int]]] = {}
    for _, data in graph.nodes(data=True):
        if data["kind"] == "expert":
            groups.setdefault(data["community"], set()).add((data["layer"], data["number"]))
    assert groups[0] == {(layer, expert) for layer in (1, 2, 3) for expert in (0, 2, 4, 6)}
    assert groups[1] == {(layer, expert) for layer in (1, 2, 3) for expert in (1, 3, 5)}
    assert sorted(map(len, groups.values())) == [1, 1, 1, 9, 12]


@settings(max_examples=30)
@given(st.integers(0, 999), st.integers(1, 3))
def test_pairs_beyond_chance_are_those_of_a_plain_count(seed: int, parts: int) -> None:
    random, tokens, routers, experts = torch.Generator().manual_seed(seed), 90, 3, 6
    chosen = torch.rand(tokens, routers, experts, generator=random).argsort(-1)[..., :2]
    chosen[:60, 1] = (chosen[:60, 0] + 1) % experts  # the second router follows the first one for most tokens
    valid = torch.tensor([[True, True], [True, True], [True, False]])  # the last router uses one slot of two
    found = routed_together(chosen.split(math.ceil(tokens / parts)), valid, experts, tokens)
    routes = [[{*row[: int(used.sum())].tolist()} for row, used in zip(token, valid, strict=True)] for token in chosen]
    expected = {}
    for router in range(routers - 1):
        for one, other in product(range(experts), range(experts)):
            both = sum(one in token[router] and other in token[router + 1] for token in routes)
            first, second = (sum(e in t[r] for t in routes) for e, r in ((one, router), (other, router + 1)))
            chance = first * second / tokens
            if both - chance > 3 * math.sqrt(chance):
                expected[router, one, other] = (both - chance) / tokens
    assert {(e.receiver, e.expert, e.following): e.excess for e in found} == pytest.approx(expected)
    assert len(expected) >= 3
    for first, second in pairwise(found):
        assert first.excess >= second.excess or (first.receiver, first.expert) != (second.receiver, second.expert)


EDGES = tuple(ScoreEdge(each.name, 2, 5, 0.1 * each.total_influence) for each in MADE.of_kind("expert")[:8])
WHOLE = replace(MADE, together=together(), score_edges=EDGES, model="org/<tiny> & \x00 moe")


def test_files_open_in_networkx_as_they_were(tmp_path: Path) -> None:
    graph, centrality = measured_graph(WHOLE)
    write_attribution(findings(WHOLE), tmp_path / "out", False)
    text = (tmp_path / "out" / "graph.json").read_text()
    content = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    for read in (nx.read_graphml(tmp_path / "out" / "graph.graphml"), nx.node_link_graph(content, edges="edges")):
        assert read.is_directed() and not read.is_multigraph()
        assert dict(read.nodes(data=True)) == dict(graph.nodes(data=True))
        assert {edge: read.edges[edge] for edge in read.edges} == {e: graph.edges[e] for e in graph.edges}
        for measure, values in centralities(read).items():
            assert values == pytest.approx(dict(centrality[measure]))
    assert graph.nodes[HUB]["PageRank"] == centrality["PageRank"][HUB]


def test_the_picture_names_hubs_and_draws_the_heaviest_edges() -> None:
    graph, centrality = measured_graph(MADE)
    (axes,) = axes_of(graph_figure(graph, centrality))
    texts = {text.get_text() for text in axes.texts}
    assert HUB in texts and {*ranking(centrality, "relative PageRank")[:8]} == texts
    assert len(axes.patches) == EDGES_DRAWN
    assert [label.get_text() for label in axes.get_xticklabels()] == ["token", "L0", "L1", "L2", "L3"]
    routers = next(nodes for nodes in axes.collections if nodes.get_label() == "router")
    assert sorted(x for x, _ in np.asarray(routers.get_offsets())) == pytest.approx([1.4, 2.4, 3.4])  # left to right
