"""HC-SMoE: against scikit-learn and SciPy on a stock model's outputs, by hand, protection, routing groups, refusals."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.spatial.distance import pdist

from compressor.model.moe_layer import MoeLayer
from compressor.progress import Silent
from compressor.recipe.registry import load_strategy
from compressor.statistics.statistics import LayerStatistics
from strategies.data_centric import distances
from strategies.hc_smoe import cluster, plan
from tests.support.opened_models import batches, calibration, one_expert, opened, plain_calls
from tests.support.plans import by_hand, make_plan

GROUPS = {"routing_groups": 2, "chosen_groups": 1, "experts_per_group": 2}
PLACES = [0.0, 1, 10, 12, 30, 31.5, 60, 90]  # mean outputs of eight experts on a line


def stats(places: Any, counts: list[float] | None = None, tokens: int = 3, **groups: Any) -> LayerStatistics:
    """Experts whose outputs scatter over the tokens, with these means: [E] or [E, H]."""
    means = torch.as_tensor(places, dtype=torch.float32).reshape(len(places), -1)
    swing = torch.linspace(-1, 1, tokens)[:, None] if tokens else torch.zeros(0, 1)
    layer = MoeLayer("layers.1.experts", "layers.1", "layers.1.gate", "layers.1", 1, len(means), 2, **groups)
    visits = torch.tensor(counts or [1.0] * len(means), dtype=torch.float64)
    return LayerStatistics(layer, tokens, {"expert_outputs": means[:, None] + swing, "routed_count": visits})


def members(made: Any) -> list[tuple[int, ...]]:
    return [group.members for group in made.groups]


def partition(labels: Any, experts: Any = None) -> list[tuple[int, ...]]:
    """Labels as groups, in the order of their smallest member."""
    experts = range(len(labels)) if experts is None else experts
    found: dict[int, list[int]] = {}
    for expert, label in zip(experts, np.asarray(labels).tolist(), strict=True):
        found.setdefault(label, []).append(expert)
    return sorted(tuple(group) for group in found.values())


def by_scipy(means: Any, count: int, experts: Any = None) -> list[tuple[int, ...]]:
    tree = linkage(pdist(np.asarray(means, dtype=np.float64)), method="average")
    return partition(fcluster(tree, count, criterion="maxclust"), experts)


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "deepseek_v3", "nemotron_h"])
def test_a_whole_model_against_scipy(name: str, tmp_path: Path) -> None:
    """Means of a plain forward's tokens, clustered within each routing group."""
    stock, model = opened(name, tmp_path)
    parts, strategy = batches(stock), load_strategy("hc-smoe")
    first, second = (make_plan(model, strategy, 4, {}, calibration(parts), Silent()) for _ in range(2))
    assert by_hand(first).to_json() == by_hand(second).to_json()
    calls = plain_calls(stock, model.architecture, parts)
    for layer, made in zip(model.architecture.layers, first.layers, strict=True):
        hidden, index, _ = calls[layer.name].joined()
        module = stock.get_submodule(layer.name)
        means = np.stack([one_expert(module, e, hidden).double().mean(0).numpy() for e in range(8)])
        size = 8 // layer.routing_groups
        expected = []
        for begin in range(0, 8, size):
            block = range(begin, begin + size)
            expected += by_scipy(means[block], 4 // layer.routing_groups, block)
        assert members(made) == expected
        assert made.decided_by == "mean outputs, average linkage"
        for group in made.groups:
            visits = [int((index == member).sum()) for member in group.members]
            shares = [v / sum(visits) for v in visits] if sum(visits) else [1 / len(visits)] * len(visits)
            assert group.coefficients == group.router_coefficients == pytest.approx(shares)


@given(data=st.data())
def test_clusters_equal_scipys(data: st.DataObject) -> None:
    count = data.draw(st.integers(2, 24))
    keep = data.draw(st.integers(1, count))
    points = np.random.default_rng(data.draw(st.integers(0, 10_000))).normal(size=(count, 3))
    outputs = torch.from_numpy(points)[:, None]
    found = cluster(distances(outputs, "mean-output")[0], keep)
    assert sorted(map(tuple, found)) == by_scipy(points, keep)
    assert [group[0] for group in found] == sorted(group[0] for group in found)


def test_a_case_by_hand() -> None:
    made = plan(stats(PLACES, [3.0, 1, 0, 0, 0, 5, 2, 7]), 4)
    assert members(made) == [(0, 1, 2, 3), (4, 5), (6,), (7,)]
    assert [group.coefficients for group in made.groups] == [(0.75, 0.25, 0, 0), (0, 1), (1,), (1,)]
    assert [group.untouched for group in made.groups] == [False, False, True, True]
    assert made.dropped == ()
    # pairs of 0, 1, 10, 12: 1 + 10 + 12 + 9 + 11 + 2 = 45; and 1.5
    assert made.figures == {"within_group_distance": 46.5, "largest_group": 4}
    assert members(plan(stats(PLACES), 6)) == [(0, 1), (2,), (3,), (4, 5), (6,), (7,)]


def test_only_means_matter_and_ties_are_broken_alike_every_time() -> None:
    same = torch.zeros(6, 4)
    for keep in range(2, 6):  # all equally near: the lowest become one
        expected = [tuple(range(7 - keep)), *((expert,) for expert in range(7 - keep, 6))]
        assert members(plan(stats(same), keep)) == expected
        assert members(plan(stats(torch.eye(6)), keep)) == expected
    assert members(plan(stats(PLACES, tokens=1), 4)) == members(plan(stats(PLACES, tokens=50), 4))


def test_protected_experts_are_taken_out_before_clustering() -> None:
    """The others are clustered as if the protected ones were not there."""
    protected = frozenset({1, 4})
    others = [0, 2, 3, 5, 6, 7]
    for keep in (3, 4, 6):
        made = plan(stats(PLACES), keep, protected)
        alone = plan(stats([PLACES[expert] for expert in others]), keep - 2) if keep > 3 else None
        rest = [group for group in members(made) if group not in ((1,), (4,))]
        assert (1,) in members(made) and (4,) in members(made)
        expected = [tuple(others[e] for e in group) for group in members(alone)] if alone else [tuple(others)]
        assert rest == expected
    assert plan(stats(PLACES), 8, frozenset(range(8))).is_drop


def test_where_protected_experts_take_every_place_the_others_are_dropped() -> None:
    made = plan(stats(PLACES), 3, frozenset({1, 2, 6}))
    assert made.is_drop and members(made) == [(1,), (2,), (6,)]
    one = plan(stats(PLACES, **GROUPS), 4, frozenset({4, 5}))
    assert members(one)[2:] == [(4,), (5,)] and one.dropped == (6, 7)
    assert members(one)[:2] == members(plan(stats(PLACES, **GROUPS), 4))[:2]


def test_routing_groups_are_clustered_by_themselves() -> None:
    near = [0.0, 50, 1, 51, 0, 50, 1, 51]  # the twins are across the groups' border
    assert members(plan(stats(near, **GROUPS), 4)) == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert members(plan(stats(near, **GROUPS), 4, frozenset({0}))) == [(0,), (1, 2, 3), (4, 6), (5, 7)]
