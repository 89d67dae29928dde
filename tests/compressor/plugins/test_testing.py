"""The fake layer against loops over its own experts, and the check of the contract on modules that break it."""

import importlib
from types import ModuleType
from typing import Any

import pytest
import torch

from compressor.errors import CompressionError
from compressor.plugins import LayerPlan, LayerStatistics, apply_expert, expert_parameters, keep_best
from compressor.plugins.testing import check_strategy, fake_statistics
from compressor.statistics.statistics import ALL

BUILT_IN = [
    "aimer", "auto", "count_guided", "data_centric", "enumerate_subsets", "gated_mass", "hc_smoe", "hub_guided",
    "model_centric", "reap", "ream", "router_guided",
]  # fmt: skip


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
    assert not torch.equal(stats.heldout.inputs, stats.inputs)
    assert stats.weights.smaller_router(4).weight.shape == (4, 10)


def test_the_same_arguments_give_the_same_layer_and_keep_the_random_state() -> None:
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    one, two, other = (fake_statistics(seed=seed) for seed in (1, 1, 2))
    assert torch.equal(torch.rand(1), expected)
    assert torch.equal(one.expert_outputs, two.expert_outputs)
    assert not torch.equal(one.expert_outputs, other.expert_outputs)


def test_a_layer_that_no_token_reached() -> None:
    stats = fake_statistics(tokens=0)
    assert stats.tokens == 0 and not bool(stats.gated_norm_sum.any())
    assert stats.expert_outputs.shape[:2] == (8, 0) and len(stats.top_k_index) == len(stats.heldout.inputs) == 0


@pytest.mark.parametrize("name", BUILT_IN)
def test_the_built_in_strategies_keep_the_contract(name: str) -> None:
    check_strategy(importlib.import_module(f"strategies.{name}"))


def module_of(plan: Any, **others: Any) -> ModuleType:
    made = ModuleType("theirs")
    vars(made).update({"NEEDS": frozenset({"routed_count", "weights"}), "plan": plan, **others})
    return made


def first(stats: LayerStatistics, keep: int, protected: frozenset[int] = frozenset()) -> LayerPlan:
    """The first experts of each routing group, protected ones before."""
    return keep_best(stats, -torch.arange(8.0), keep, protected)


def unprotecting(stats: LayerStatistics, keep: int, protected: frozenset[int] = frozenset()) -> LayerPlan:
    return first(stats, keep)


def drawn(stats: LayerStatistics, keep: int, protected: frozenset[int] = frozenset()) -> LayerPlan:
    return keep_best(stats, torch.rand(8), keep, protected)


def too_many(stats: LayerStatistics, keep: int, protected: frozenset[int] = frozenset()) -> LayerPlan:
    return first(stats, 8, protected)


def undeclared(stats: LayerStatistics, keep: int, protected: frozenset[int] = frozenset()) -> LayerPlan:
    return keep_best(stats, stats.norm_sum, keep, protected)


def ungrouped(stats: LayerStatistics, keep: int, protected: frozenset[int] = frozenset()) -> LayerPlan:
    others = [expert for expert in range(8) if expert not in protected]
    return LayerPlan.keep(stats.layer, [*protected, *others][:keep])


def writing(stats: LayerStatistics, keep: int, protected: frozenset[int] = frozenset()) -> LayerPlan:
    stats.weights.experts.down_proj.data[0] += 1
    return first(stats, keep, protected)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (unprotecting, "'theirs' does not keep protected expert [17]"),
        (drawn, "'theirs' plans the same layer in two ways; draw from a torch.Generator"),
        (too_many, "'theirs' planned 8 experts instead of 4"),
        (undeclared, "statistic 'norm_sum' was not collected"),
        (ungrouped, "routing groups would keep unequal numbers"),
        (writing, "'theirs' changed the layer"),
        (lambda stats: None, "its plan should take"),
    ],
)
def test_what_breaks_the_contract_is_told(plan: Any, message: str) -> None:
    check_strategy(module_of(first))
    with pytest.raises(CompressionError, match=message):
        check_strategy(module_of(plan))


def test_a_likeness_that_is_no_matrix_is_told() -> None:
    check_strategy(module_of(first, likeness=lambda stats, options: ("all alike", torch.ones(8, 8))))
    with pytest.raises(CompressionError, match=r"should return a label and a matrix \[8, 8\]"):
        check_strategy(module_of(first, likeness=lambda stats, options: ("all alike", torch.ones(8))))
