"""Router-guided: groups by plain loops and by hand, protected experts, unreached layers."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from compressor.model.moe_layer import MoeLayer
from compressor.recipe.plan import Group
from compressor.statistics.statistics import LayerStatistics
from strategies import router_guided
from strategies.router_guided import Options


def statistics(counts: Any, logits: Tensor, blocks: int = 1) -> LayerStatistics:
    layer = MoeLayer("m.experts", "m", "m.gate", "m", 0, len(counts), 1, blocks, blocks)
    values = {"routed_count": torch.tensor(counts, dtype=torch.float64), "router_logits": logits}
    return LayerStatistics(layer, 9, values)


def naive(counts: list[int], logits: list[list[float]], keep: int, protected: set[int], blocks: int) -> list[list[int]]:
    """Dominant experts by repeated choice, the others one by one to the largest cosine."""

    def cosine(one: int, other: int) -> float:
        inner = sum(token[one] * token[other] for token in logits)
        sizes = [math.sqrt(sum(token[expert] ** 2 for token in logits)) for expert in (one, other)]
        return inner / (sizes[0] * sizes[1]) if min(sizes) > 0 else 0.0

    found, size = [], len(counts) // blocks
    for begin in range(0, len(counts), size):
        dominant = [expert for expert in range(begin, begin + size) if expert in protected]
        while len(dominant) < keep // blocks:
            rest = [expert for expert in range(begin, begin + size) if expert not in dominant]
            dominant.append(max(rest, key=lambda expert: (counts[expert], -expert)))
        groups = {head: [head] for head in dominant}
        free = sorted(set(dominant) - protected)
        for expert in range(begin, begin + size):
            if expert in dominant or not free:
                continue
            best = free[0]
            for head in free:
                if cosine(expert, head) > cosine(expert, best) + 1e-10:
                    best = head
            groups[best].append(expert)
        found += [sorted(group) for group in groups.values()]
    return sorted(found)


@given(st.data())
def test_groups_equal_plain_loops(data: st.DataObject) -> None:
    blocks = data.draw(st.sampled_from([1, 2]))
    counts = data.draw(st.lists(st.integers(0, 5), min_size=8, max_size=8))
    values = st.integers(-3, 3).map(float)
    logits = data.draw(st.lists(st.lists(values, min_size=8, max_size=8), max_size=4))
    keep = data.draw(st.sampled_from([2, 4, 6, 8]))
    protected: set[int] = set()
    for begin in range(0, 8, 8 // blocks):
        protected |= data.draw(st.sets(st.integers(begin, begin + 8 // blocks - 1), max_size=keep // blocks))
    table = torch.tensor(logits).reshape(len(logits), 8)
    made = router_guided.plan(statistics(counts, table, blocks), keep, frozenset(protected))
    assert sorted(list(group.members) for group in made.groups) == naive(counts, logits, keep, protected, blocks)
    for group in made.groups:
        visits = [counts[member] for member in group.members]
        shares = [visit / sum(visits) for visit in visits] if sum(visits) else [1 / len(visits)] * len(visits)
        assert group.coefficients == pytest.approx(shares)
        (router,) = [m for m, share in zip(group.members, group.router_coefficients, strict=True) if share]
        assert counts[router] == max(visits)
        assert group.head == (router if sum(share > 0 for share in shares) > 1 else None)


def test_by_hand() -> None:
    """Visits 9, 5, 7, 1: experts 0 and 2 stay; 1 is scored like 2, 3 against both, less so against 0."""
    logits = torch.tensor([[1.0, 0.0, 0.0, -1.0], [0.0, 3.0, 1.0, -2.0]])
    made = router_guided.plan(statistics([9, 5, 7, 1], logits), 2)
    assert made.groups == (
        Group((0, 3), (0.9, 0.1), (1.0, 0.0), head=0),
        Group((1, 2), (5 / 12, 7 / 12), (0.0, 1.0), head=2),
    )
    assert made.decided_by == "router_logits"
    assert made.figures["mean_similarity"] == pytest.approx((1 - 1 / 5**0.5) / 2, abs=1e-6)
    plain = router_guided.plan(statistics([9, 5, 7, 1], logits), 2, options=Options(align=False, merge_routers=True))
    assert [group.head for group in plain.groups] == [None, None]
    assert plain.groups[1].router_coefficients == plain.groups[1].coefficients
    largest = router_guided.plan(statistics([9, 5, 7, 1], logits), 2, options=Options(merge="max"))
    assert [(g.coefficients, g.head) for g in largest.groups] == [((1.0, 0.0), None), ((0.0, 1.0), None)]
    uniform = router_guided.plan(statistics([9, 5, 7, 1], logits), 2, options=Options(merge="uniform"))
    assert [(g.coefficients, g.head) for g in uniform.groups] == [((0.5, 0.5), 0), ((0.5, 0.5), 2)]


def test_experts_and_layers_that_no_token_reached() -> None:
    made = router_guided.plan(statistics([0, 0, 0, 0], torch.zeros(0, 4)), 2)
    assert [group.members for group in made.groups] == [(0, 2, 3), (1,)]
    assert made.groups[0].coefficients == pytest.approx((1 / 3,) * 3)
    visited = router_guided.plan(statistics([5, 0, 3, 0], torch.eye(4)[:2]), 2)
    assert [group.members for group in visited.groups] == [(0, 1, 3), (2,)]
    assert visited.groups[0].coefficients == (1.0, 0.0, 0.0) and visited.groups[0].head is None
