"""HC-SMoE: against scikit-learn and SciPy on a stock model's outputs, by hand, protection and routing groups."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.spatial.distance import pdist

from compressor.plugins import agglomerate
from compressor.statistics.statistics import LayerStatistics
from strategies.data_centric import distances
from strategies.hc_smoe import plan
from tests.support.strategy_runs import GROUPED, layer_statistics, members, planned_layers, shares

PLACES = [0.0, 1, 10, 12, 30, 31.5, 60, 90]  # mean outputs of eight experts on a line


def stats(places: Any, counts: list[float] | None = None, tokens: int = 3, **groups: Any) -> LayerStatistics:
    """Experts whose outputs scatter over the tokens, with these means: [E] or [E, H]."""
    means = torch.as_tensor(places, dtype=torch.float32).reshape(len(places), -1)
    outputs = means[:, None] + torch.linspace(-1, 1, tokens)[:, None]
    values = {"expert_outputs": outputs, "routed_count": counts or [1.0] * len(means)}
    return layer_statistics(values, tokens, experts=len(means), **groups)


def by_scipy(means: Any, count: int, experts: Any) -> list[tuple[int, ...]]:
    """The clusters of experts, in the order of their smallest member."""
    tree = linkage(pdist(np.asarray(means, dtype=np.float64)), method="average")
    clusters = dict[int, list[int]]()
    for expert, label in zip(experts, fcluster(tree, count, criterion="maxclust").tolist(), strict=True):
        clusters.setdefault(label, []).append(expert)
    return sorted(map(tuple, clusters.values()))


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "deepseek_v3", "nemotron_h"])
def test_a_whole_model_against_scipy(name: str, tmp_path: Path) -> None:
    """Means of a plain forward's tokens, clustered within each routing group."""
    for made in planned_layers(name, tmp_path, "hc-smoe"):
        means = torch.stack(made.outputs()).mean(1).numpy()
        expected = list[tuple[int, ...]]()
        for block in made.blocks():
            expected += by_scipy(means[block], 4 // len(made.blocks()), block)
        assert members(made.plan) == expected
        assert made.plan.decided_by == "mean outputs, average linkage"
        index = made.calls.joined()[1]
        for group in made.plan.groups:
            visits = [int((index == member).sum()) for member in group.members]
            assert group.coefficients == group.router_coefficients == pytest.approx(shares(visits))


@given(data=st.data())
def test_clusters_equal_scipys(data: st.DataObject) -> None:
    count = data.draw(st.integers(2, 24))
    keep = data.draw(st.integers(1, count))
    points = np.random.default_rng(data.draw(st.integers(0, 10_000))).normal(size=(count, 3))
    labels = agglomerate(distances(torch.from_numpy(points)[:, None], "mean-output")[0], keep, "average")
    found = [tuple((labels == label).nonzero().flatten().tolist()) for label in range(keep)]
    assert found == by_scipy(points, keep, range(count))


def test_a_case_by_hand() -> None:
    made = plan(stats(PLACES, [3.0, 1, 0, 0, 0, 5, 2, 7]), 4)
    assert members(made) == [(0, 1, 2, 3), (4, 5), (6,), (7,)]
    assert [group.coefficients for group in made.groups] == [(0.75, 0.25, 0, 0), (0, 1), (1,), (1,)]
    # pairs of 0, 1, 10, 12: 1 + 10 + 12 + 9 + 11 + 2 = 45; and 1.5
    assert made.figures == {"within_group_distance": 46.5, "largest_group": 4}
    assert members(plan(stats(PLACES, tokens=1), 4)) == members(plan(stats(PLACES, tokens=50), 4))


def test_of_equally_near_experts_the_lowest_become_one() -> None:
    for keep in range(2, 6):
        expected = [tuple(range(7 - keep)), *((expert,) for expert in range(7 - keep, 6))]
        assert members(plan(stats(torch.zeros(6, 4)), keep)) == expected
        assert members(plan(stats(torch.eye(6)), keep)) == expected


def test_protected_experts_are_taken_out_before_clustering() -> None:
    others = [0, 2, 3, 5, 6, 7]
    for keep in (3, 4, 6):
        made = members(plan(stats(PLACES), keep, frozenset({1, 4})))
        expected = [tuple(others)]
        if keep > 3:
            alone = plan(stats([PLACES[expert] for expert in others]), keep - 2)
            expected = [tuple(others[e] for e in group) for group in members(alone)]
        assert sorted(made) == sorted([(1,), (4,), *expected])
    assert plan(stats(PLACES), 8, frozenset(range(8))).is_drop


def test_where_protected_experts_take_every_place_the_others_are_dropped() -> None:
    made = plan(stats(PLACES), 3, frozenset({1, 2, 6}))
    assert made.is_drop and members(made) == [(1,), (2,), (6,)]
    one = plan(stats(PLACES, **GROUPED), 4, frozenset({4, 5}))
    assert members(one)[2:] == [(4,), (5,)] and one.dropped == (6, 7)
    assert members(one)[:2] == members(plan(stats(PLACES, **GROUPED), 4))[:2]
