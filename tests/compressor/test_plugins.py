"""The fake layer against loops over its own experts, and the check of the contract on modules that break it."""

from types import ModuleType
from typing import Any

import pytest
import torch

from compressor.entry_points import STRATEGIES, load, names
from compressor.errors import CompressionError
from compressor.plugins import (
    LayerPlan,
    LayerStatistics,
    apply_expert,
    check_strategy,
    expert_parameters,
    fake_statistics,
    keep_best,
)
from compressor.statistics.statistics import ALL


@pytest.mark.parametrize(("experts", "top_k"), [(8, 2), (6, 3)])
def test_every_statistic_is_there_and_they_agree(experts: int, top_k: int) -> None:
    stats = fake_statistics(experts=experts, top_k=top_k, hidden=10, tokens=40, sampled=40)
    assert set(stats.values) == ALL and stats.tokens == 40
    assert float(stats.routed_count.sum()) == 40 * top_k
    assert torch.equal(stats.routed_count, torch.bincount(stats.top_k_index.flatten(), minlength=experts).double())
    assert float(stats.gate_weight_sum.sum()) == pytest.approx(40, rel=1e-5)  # each token's weights sum to 1
    assert float(stats.probability_sum.sum()) == pytest.approx(40, rel=1e-5)
    logits = stats.inputs @ stats.weights.router.weight.detach().T
    torch.testing.assert_close(stats.router_logits, logits, rtol=1e-5, atol=1e-6)
    assert torch.equal(logits.topk(top_k).indices.sort().values, stats.top_k_index.sort().values)
    norms = torch.zeros(experts, dtype=torch.float64)
    for expert in range(experts):
        parameters = expert_parameters(stats.weights.experts, expert)
        with torch.no_grad():
            output = apply_expert(stats.weights.experts, parameters, stats.inputs)
        torch.testing.assert_close(stats.expert_outputs[expert], output, rtol=1e-5, atol=1e-6)
        visited = (stats.top_k_index == expert).any(1)
        norms[expert] = output[visited].double().norm(dim=1).sum()
    torch.testing.assert_close(stats.norm_sum, norms, rtol=1e-5, atol=1e-6)
    assert stats.mixed_outputs.shape == (experts, 40, 10)
    assert stats.weights.smaller_router(4).weight.shape == (4, 10)


def test_the_same_arguments_give_the_same_layer_and_keep_the_random_state() -> None:
    before = torch.get_rng_state()
    one, two, other = (fake_statistics(seed=seed) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(one.expert_outputs, two.expert_outputs)
    assert not torch.equal(one.expert_outputs, other.expert_outputs)


def test_a_layer_that_no_token_reached() -> None:
    stats = fake_statistics(tokens=0)
    assert stats.tokens == 0 and not bool(stats.gated_norm_sum.any())
    assert stats.expert_outputs.shape[:2] == (8, 0) and len(stats.top_k_index) == 0


@pytest.mark.parametrize("name", sorted({*names(STRATEGIES)} - {"listed"}))  # which has a list for one model
def test_the_built_in_strategies_keep_the_contract(name: str) -> None:
    check_strategy(load(STRATEGIES, name))


def module_of(plan: Any, **others: Any) -> ModuleType:
    made = ModuleType("theirs")
    vars(made).update({"NEEDS": frozenset({"routed_count", "weights"}), "plan": plan, **others})
    return made


def first(stats: LayerStatistics, keep: int, protected: frozenset[int] = frozenset()) -> LayerPlan:
    return keep_best(stats, -torch.arange(8.0), keep, protected)


def ungrouped(stats: LayerStatistics, keep: int, protected: frozenset[int] = frozenset()) -> LayerPlan:
    others = [expert for expert in range(8) if expert not in protected]
    return LayerPlan.keep(stats.layer, [*protected, *others][:keep])


@torch.no_grad()
def writing(stats: LayerStatistics, keep: int, protected: frozenset[int] = frozenset()) -> LayerPlan:
    stats.routed_count[0] += 1
    return first(stats, keep, protected)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (lambda stats, keep, protected: first(stats, keep), "'theirs' does not keep protected expert [17]"),
        (
            lambda stats, keep, protected: keep_best(stats, torch.rand(8), keep, protected),
            "'theirs' plans the same layer in two ways; draw from a torch.Generator",
        ),
        (lambda stats, keep, protected: first(stats, 8, protected), "no plan of this layer that keeps 4 experts"),
        (
            lambda stats, keep, protected: keep_best(stats, stats.norm_sum, keep, protected),
            "statistic 'norm_sum' was not collected",
        ),
        (ungrouped, "keep equally many experts of each routing group"),
        (writing, "'theirs' changed the statistic 'routed_count'"),
        (lambda stats: None, "takes 1 positional argument but 3 were given"),
    ],
)
def test_what_breaks_the_contract_is_reported(plan: Any, message: str) -> None:
    with pytest.raises(CompressionError, match=message):
        check_strategy(module_of(plan))


def test_a_likeness_has_to_be_a_matrix() -> None:
    check_strategy(module_of(first, similarity=lambda stats, options: ("all alike", torch.ones(8, 8))))
    with pytest.raises(CompressionError, match=r"should return a label and a matrix \[8, 8\]"):
        check_strategy(module_of(first, similarity=lambda stats, options: ("all alike", torch.ones(8))))


def test_a_score_has_to_be_what_the_plan_ranks_by() -> None:
    with pytest.raises(CompressionError, match=r"'theirs' does not keep experts by its score\(\); return what"):
        check_strategy(module_of(first, score=lambda stats: stats.routed_count))
