"""Router-guided: groups by plain loops and by hand, protected experts."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from compressor.recipe.plan import Group
from compressor.statistics.statistics import LayerStatistics
from strategies import router_guided
from strategies.router_guided import Options
from tests.support.strategy_runs import layer_statistics, shares


def statistics(counts: list[float], logits: Tensor, blocks: int = 1) -> LayerStatistics:
    values = {"routed_count": counts, "router_logits": logits}
    return layer_statistics(values, experts=len(counts), top_k=1, routing_groups=blocks, chosen_groups=blocks)


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
        expected = shares(visits)
        assert group.coefficients == pytest.approx(expected)
        (router,) = [m for m, share in zip(group.members, group.router_coefficients, strict=True) if share]
        assert counts[router] == max(visits)
        assert group.head == (router if sum(share > 0 for share in expected) > 1 else None)


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
