"""The grouping solver against every partition, planted answers and its own constraints."""

import itertools
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from compressor.steps.prune import partition as grouping
from compressor.steps.prune.partition import Grouping, group_experts
from compressor.tolerance import ROUNDING

Groups = tuple[tuple[int, ...], ...]


def partitions(experts: int, count: int) -> Iterator[Groups]:
    """Every partition of range(experts) into exactly `count` groups, by restricted growth strings."""

    def extend(labels: list[int], used: int) -> Iterator[list[int]]:
        if len(labels) == experts:
            if used == count:
                yield labels
            return
        for label in range(min(used + 1, count)):
            yield from extend([*labels, label], max(used, label + 1))

    for labels in extend([], 0):
        yield tuple(tuple(e for e in range(experts) if labels[e] == label) for label in range(count))


def naive_objective(distances: Tensor, groups: Groups) -> float:
    return sum(float(distances[i, j]) for group in groups for i, j in itertools.combinations(group, 2))


def random_distances(experts: int, seed: int, kind: str = "points") -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if kind == "points":
        points = torch.randn(experts, 5, generator=generator, dtype=torch.float64)
        return torch.cdist(points, points, compute_mode="donot_use_mm_for_euclid_dist")
    table = torch.rand(experts, experts, generator=generator, dtype=torch.float64)
    return (table + table.T).fill_diagonal_(0)


@st.composite
def matrices(draw: st.DrawFn, largest: int) -> tuple[Tensor, int]:
    """A symmetric matrix of few or many distinct values, ties and zeros included, and a group count."""
    experts = draw(st.integers(1, largest))
    value = draw(st.sampled_from([st.integers(0, 3).map(float), st.floats(0, 1e6), st.floats(0, 1)]))
    table = torch.zeros(experts, experts, dtype=torch.float64)
    for i, j in itertools.combinations(range(experts), 2):
        table[i, j] = table[j, i] = draw(value)
    return table, draw(st.integers(1, experts))


@given(matrices(largest=7))
def test_exact_matches_brute_force(case: tuple[Tensor, int]) -> None:
    distances, count = case
    found = group_experts(distances, count)
    assert found.exact and len(found.groups) == count
    assert found.groups == tuple(sorted(tuple(sorted(group)) for group in found.groups))
    assert found.objective == pytest.approx(naive_objective(distances, found.groups), rel=1e-12)
    best = min(naive_objective(distances, groups) for groups in partitions(len(distances), count))
    assert best * (1 - 1e-12) - 1e-300 <= found.objective <= best * (1 + 4 * ROUNDING)  # subnormal halves are 0


@pytest.mark.parametrize("kind", ["points", "uniform"])
@pytest.mark.parametrize(("experts", "count"), [(8, 6), (8, 4), (9, 4)])
def test_exact_and_search_against_brute_force(kind: str, experts: int, count: int) -> None:
    every = list(partitions(experts, count))
    labels = torch.zeros(len(every), experts, dtype=torch.long)
    for row, groups in zip(labels, every, strict=True):
        for label, group in enumerate(groups):
            row[list(group)] = label
    for seed in range(3):
        distances = random_distances(experts, seed, kind)
        best = float("inf")
        for part in torch.split(labels, 4096):
            together = part[:, :, None] == part[:, None, :]
            best = min(best, float((distances * together).sum(dim=(1, 2)).min()) / 2)
        assert group_experts(distances, count).objective == pytest.approx(best, rel=1e-12)
        searched = grouping.search_labels(distances, count, torch.Generator().manual_seed(0))
        assert sorted(set(searched.tolist())) == list(range(count))
        assert best * (1 - 1e-12) <= grouping.labels_cost(distances, searched) <= 1.01 * best


@pytest.mark.parametrize(("experts", "count"), [(64, 8), (128, 96), (256, 128), (512, 64)])
def test_planted_clusters_are_recovered(experts: int, count: int) -> None:
    generator = torch.Generator().manual_seed(experts)
    labels = torch.randperm(experts, generator=generator) % count
    centres = 100 * torch.eye(count, dtype=torch.float64)
    points = centres[labels] + 0.01 * torch.rand(experts, count, generator=generator, dtype=torch.float64)
    distances = torch.cdist(points, points, compute_mode="donot_use_mm_for_euclid_dist")
    found = group_experts(distances, count)
    assert set(found.groups) == {tuple((labels == label).nonzero().flatten().tolist()) for label in range(count)}
    assert found.objective == pytest.approx(naive_objective(distances, found.groups), rel=1e-12)


def test_no_single_move_or_swap_improves_a_searched_grouping() -> None:
    distances = random_distances(40, 0)
    groups = [set(group) for group in group_experts(distances, 12).groups]
    cost = [{e: float(distances[e, sorted(group)].sum()) for e in range(40)} for group in groups]
    for a, b in itertools.permutations(range(12), 2):
        for u in groups[a]:
            assert len(groups[a]) == 1 or cost[b][u] - cost[a][u] >= -1e-9
            for v in groups[b]:
                gain = cost[b][u] - cost[a][u] + cost[a][v] - cost[b][v] - 2 * float(distances[u, v])
                assert gain >= -1e-9


@pytest.mark.parametrize(("experts", "count"), [(12, 8), (48, 24), (128, 96)])
def test_blocks_and_protected_experts_are_respected(experts: int, count: int) -> None:
    blocks = [range(start, experts, 4) for start in range(4)]
    distances = random_distances(experts, 3)
    found = group_experts(distances, count, blocks=blocks, alone={0, 5})
    for block in blocks:
        assert sum(set(group) <= set(block) for group in found.groups) == count // 4
    assert {(0,), (5,)} <= set(found.groups)
    assert found.objective == pytest.approx(naive_objective(distances, found.groups), rel=1e-12)


@pytest.mark.parametrize("experts", [8, 40])
def test_protected_experts_may_take_all_groups_of_a_block(experts: int) -> None:
    """Its other experts are in no group; the other block is grouped as ever."""
    half, distances = experts // 2, random_distances(experts, 6)
    found = group_experts(distances, 6, blocks=[range(half), range(half, experts)], alone=[1, 2, half - 1])
    other = group_experts(distances[half:, half:], 3)
    expected = [tuple(half + expert for expert in group) for group in other.groups]
    assert found.groups == ((1,), (2,), (half - 1,), *expected)
    assert found.objective == pytest.approx(other.objective, rel=1e-12)


def test_constrained_optimum_matches_brute_force() -> None:
    distances, blocks = random_distances(8, 1, "uniform"), [{0, 3, 4, 7}, {1, 2, 5, 6}]

    def is_allowed(groups: Groups) -> bool:
        return (3,) in groups and all(sum(set(group) <= block for group in groups) == 2 for block in blocks)

    allowed = [groups for groups in partitions(8, 4) if is_allowed(groups)]
    found = group_experts(distances, 4, blocks=[sorted(block) for block in blocks], alone=[3])
    best = min(naive_objective(distances, groups) for groups in allowed)
    assert found.exact and found.groups in allowed
    assert found.objective == pytest.approx(best, rel=1e-12)


@pytest.mark.parametrize("experts", [8, 40])
def test_all_singletons_one_group_and_one_merge(experts: int) -> None:
    distances = random_distances(experts, 0)
    single = group_experts(distances, experts, alone=range(experts))
    assert single == Grouping(tuple((e,) for e in range(experts)), 0.0, True)
    assert group_experts(distances, experts) == single
    whole = group_experts(distances, 1)
    assert whole.groups == (tuple(range(experts)),) and whole.exact
    merged = group_experts(distances, experts - 1)
    closest = divmod(int(distances.clone().fill_diagonal_(torch.inf).argmin()), experts)
    assert closest in merged.groups and merged.exact
