"""REAM: a whole model and made-up layers against plain loops, protection, room, refusals."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from compressor.errors import CompressionError
from compressor.plugins import check_strategy
from compressor.recipe.registry import load_strategy
from compressor.statistics.statistics import LayerStatistics
from strategies import ream
from strategies.ranked import reap
from strategies.ream import Options
from tests.support.strategy_runs import GROUPED, layer_statistics, members, planned_layers


def stats(sums: Any, counts: Any, logits: Tensor, outputs: Tensor, **groups: Any) -> LayerStatistics:
    values = {"gated_norm_sum": sums, "routed_count": counts, "expert_outputs": outputs, "router_logits": logits}
    return layer_statistics(values, len(logits), experts=len(sums), top_k=1, **groups)


def naive_table(logits: list[list[float]], outputs: list[list[list[float]]]) -> list[list[float]]:
    """The similarity of every two experts by loops over tokens: logits [S][E], outputs [E][S][H]."""
    tokens, experts = len(logits), len(outputs)

    def unit(vector: list[float]) -> list[float]:
        size = math.sqrt(sum(value * value for value in vector))
        return [value / size for value in vector] if size else vector

    columns = [unit([logits[token][expert] for token in range(tokens)]) for expert in range(experts)]
    apart = [[math.dist(one, other) for other in columns] for one in columns]
    farthest = max(max(row) for row in apart) or 1.0
    means = []
    for expert in range(experts):
        mean = [0.0] * len(outputs[expert][0])
        for token in range(tokens):
            gate = math.exp(logits[token][expert]) / sum(math.exp(logit) for logit in logits[token])
            mean = [m + gate * value / tokens for m, value in zip(mean, outputs[expert][token], strict=True)]
        means.append(unit(mean))
    table = []
    for one in range(experts):
        row = []
        for other in range(experts):
            router = 1 - apart[one][other] / farthest
            gated = (1 + sum(a * b for a, b in zip(means[one], means[other], strict=True))) / 2
            row.append((router + gated) / 2)
        table.append(row)
    return table


def naive_groups(saliency: list[float], table: Any, keep: int, alone: set[int], size: int) -> dict[int, list[int]]:
    """Members by centroid: repeated choice of the nearest free expert, the most salient centroid first."""
    ranked = sorted(range(len(saliency)), key=lambda e: (e not in alone, -saliency[e], e))
    centroids, free = ranked[:keep], sorted(ranked[keep:])
    groups = {head: [head] for head in centroids}
    choosing = sorted((head for head in centroids if head not in alone), key=lambda e: (-saliency[e], e))
    if not size:
        for expert in free:
            if choosing:
                groups[max(sorted(choosing), key=lambda head: table[head][expert])].append(expert)
        return groups
    for head in choosing:
        while free and len(groups[head]) < size:
            best = max(free, key=lambda expert: (table[head][expert], -expert))
            groups[head].append(best)
            free.remove(best)
    return groups


def check(made: Any, groups: dict[int, list[int]], saliency: list[float]) -> None:
    """Members, coefficients by saliency, router rows and heads of a plan."""
    by_members = {group.members: group for group in made.groups}
    assert set(by_members) == {tuple(sorted(experts)) for experts in groups.values()}
    least = min((value for value in saliency if value > 0), default=1.0)
    for head, experts in groups.items():
        group = by_members[tuple(sorted(experts))]
        weights = [saliency[member] or least for member in group.members]
        assert group.coefficients == pytest.approx([weight / sum(weights) for weight in weights], abs=1e-5)
        assert group.router_coefficients == tuple(float(member == head) for member in group.members)
        assert group.head == (head if len(experts) > 1 else None) and group.scale == 1


@pytest.mark.parametrize(("name", "size"), [("mixtral", 16), ("mixtral", 2), ("gpt_oss", 3), ("nemotron_h", 0)])
def test_a_whole_model_against_loops(name: str, size: int, tmp_path: Path) -> None:
    """Saliency, logits and outputs of a plain forward of the stock model's tokens, all of which are sampled."""
    for made in planned_layers(name, tmp_path, "ream", group_size=size):
        _, index, weights = made.calls.joined()
        logits = torch.cat([output[0] for output in made.calls.router_outputs]).reshape(-1, 8).double()
        outputs = made.outputs()
        saliency = []
        for expert, output in enumerate(outputs):
            gated = [float(weights[t, k] * output[t].norm()) for t, k in (index == expert).nonzero().tolist()]
            saliency.append(sum(gated) / max(1, len(gated)))
        table = naive_table(logits.tolist(), torch.stack(outputs).tolist())
        groups = dict[int, list[int]]()
        for block in made.blocks():
            inside = [[table[one][other] for other in block] for one in block]
            kept = 4 // len(made.blocks())
            for head, found in naive_groups([saliency[e] for e in block], inside, kept, set(), size).items():
                groups[block[head]] = [block[member] for member in found]
        check(made.plan, groups, saliency)
        assert made.plan.decided_by == "REAP's saliency, gated outputs and router logits"


@given(data=st.data())
def test_made_up_layers_against_loops(data: st.DataObject) -> None:
    experts, tokens = data.draw(st.integers(3, 9)), data.draw(st.integers(1, 5))
    keep = data.draw(st.integers(1, experts))
    protected = data.draw(st.sets(st.integers(0, experts - 1), max_size=keep))
    room = keep - len(protected)
    least = math.ceil((experts - keep) / room) + 1 if room else 2
    size = data.draw(st.sampled_from([0, max(2, least), max(2, least) + 1, 16]))
    random = np.random.default_rng(data.draw(st.integers(0, 10_000)))
    counts = random.integers(0, 4, experts).tolist()
    sums = [float(value) * count for value, count in zip(random.integers(1, 9, experts), counts, strict=True)]
    logits, outputs = random.normal(size=(tokens, experts)), random.normal(size=(experts, tokens, 3))
    saliency = [total / count if count else 0.0 for total, count in zip(sums, counts, strict=True)]
    found = stats(sums, counts, torch.from_numpy(logits), torch.from_numpy(outputs))
    made = ream.plan(found, keep, frozenset(protected), Options(group_size=size))
    table = naive_table(logits.tolist(), outputs.tolist())
    groups = naive_groups(saliency, table, keep, protected, size)
    check(made, groups, saliency)
    kept = reap.plan(found, keep, frozenset(protected))
    assert {group.members[0] for group in kept.groups} == set(groups)  # REAP's choice are the centroids


LOGITS = torch.tensor([[1.0, 0, 1, 0, 1, 0]])  # experts 0, 2 and 4 are scored alike
OUTPUTS = torch.tensor([[1.0, 0], [0, 1], [1, 0], [0, 1], [1, 0.1], [-1, 0]])[:, None]  # [E, 1, H]
SUMS = [4.0, 6.0, 3.0, 2.0, 0.0, 1.0]
COUNTS = [1.0, 2, 3, 2, 0, 1]  # saliencies 4, 3, 1, 1, 0 and 1


def test_options_and_few_groups_by_hand() -> None:
    found = stats(SUMS, COUNTS, LOGITS, OUTPUTS)
    near = ream.plan(found, 2, options=Options(group_size=0, align=False, merge_routers=True))
    assert members(near) == [(0, 2, 4), (1, 3, 5)]
    assert [group.head for group in near.groups] == [None, None]
    assert all(group.router_coefficients == group.coefficients for group in near.groups)
    assert near.figures["largest_group"] == 3
    assert ream.plan(found, 6).is_drop


def test_protected_experts_stay_alone_and_may_leave_no_home_for_others() -> None:
    found = stats(SUMS, COUNTS, LOGITS, OUTPUTS)
    made = ream.plan(found, 3, frozenset({0, 5}))
    assert members(made) == [(0,), (1, 2, 3, 4), (5,)]
    full = ream.plan(found, 2, frozenset({3, 5}))
    assert members(full) == [(3,), (5,)] and full.dropped == (0, 1, 2, 4)
    twice = stats(SUMS[:4] * 2, COUNTS[:4] * 2, LOGITS[:, :4].repeat(1, 2), OUTPUTS[:4].repeat(2, 1, 1), **GROUPED)
    inside = members(ream.plan(twice, 4, options=Options(group_size=3)))
    assert inside == [(0, 2, 3), (1,), (4, 6, 7), (5,)]


def test_a_layer_without_tokens_is_planned_by_its_lowest_experts() -> None:
    silent = stats([0.0] * 6, [0] * 6, torch.zeros(0, 6), torch.zeros(6, 0, 2))
    assert members(ream.plan(silent, 3, options=Options(group_size=3))) == [(0, 3, 4), (1, 5), (2,)]
    assert ream.plan(silent, 3).groups[0].coefficients == pytest.approx((0.25,) * 4)


def test_the_contract_options_and_refusals() -> None:
    for settings_of in ({"group_size": 0}, {"align": False, "merge_routers": True}):
        check_strategy(ream, settings_of)
    assert load_strategy("ream").options.model_dump() == {"group_size": 16, "align": True, "merge_routers": False}
    with pytest.raises(CompressionError, match="2 groups of at most 2 have no room for 6 experts; raise group_size"):
        ream.plan(stats(SUMS, COUNTS, LOGITS, OUTPUTS), 2, options=Options(group_size=2))
    with pytest.raises(CompressionError, match="the outputs of expert 1 are not finite"):
        ream.plan(stats([1.0, float("nan"), 3.0], [1.0, 1.0, 1.0], LOGITS[:, :3], OUTPUTS[:3]), 2)
