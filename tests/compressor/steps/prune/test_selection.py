"""Scores and coefficients, learned ones too: by hand, as a stock module computes them, slopes as the loss has them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from compressor.errors import CompressionError
from compressor.model.moe_layer import MoeLayer
from compressor.model.opened import OpenModel
from compressor.progress import Silent
from compressor.recipe.plan import LayerPlan
from compressor.statistics import statistics as collecting
from compressor.statistics.statistics import LayerStatistics
from compressor.steps.prune.reconstruction import SmallerRouter
from compressor.steps.prune.selection import (
    _Merge,
    coefficients,
    keep_best,
    learn_coefficients,
    merge_groups,
    merge_needs,
)
from tests.support.opened_models import batches, calibration, opened, plain_calls
from tests.support.stock_models import Small
from tests.support.strategy_runs import GROUPED, moe_layer

LAYER = moe_layer(index=3)
GROUPED_LAYER = moe_layer(index=3, **GROUPED)
COUNTS = torch.tensor([3.0, 1, 0, 0, 5, 5, 2, 0], dtype=torch.float64)


def stats(layer: MoeLayer = LAYER, **values: Any) -> LayerStatistics:
    return LayerStatistics(layer, 16, values)


@pytest.mark.parametrize(
    ("members", "method", "expected"),
    [
        ((0, 1, 6), "uniform", (1 / 3, 1 / 3, 1 / 3)),
        ((0, 1, 6), "frequency", (3 / 6, 1 / 6, 2 / 6)),
        ((0, 1, 6), "max", (1, 0, 0)),
        ((0, 2), "frequency", (1, 0)),  # a member without visits weighs nothing
        ((2, 3, 7), "frequency", (1 / 3, 1 / 3, 1 / 3)),  # no visits at all: uniform
        ((2, 3, 7), "max", (1, 0, 0)),  # a tie goes to the lower expert
        ((1, 4, 5), "max", (0, 1, 0)),
        ((6,), "uniform", (1,)),
        ((2,), "frequency", (1,)),
        ((2,), "max", (1,)),
    ],
)
def test_coefficients_by_hand(members: tuple[int, ...], method: str, expected: tuple[float, ...]) -> None:
    found = coefficients(members, method, COUNTS)
    assert found == pytest.approx(expected, abs=1e-15)
    assert abs(sum(found) - 1) < 1e-12


def test_visits_must_have_been_counted() -> None:
    with pytest.raises(CompressionError, match="merge 'max' needs counts of routed tokens"):
        coefficients((0, 1), "max", None)
    assert coefficients((0, 1), "uniform", None) == (0.5, 0.5)


def test_merged_groups_are_put_in_order_and_singles_stay() -> None:
    plan = merge_groups(stats(routed_count=COUNTS), [(7,), (6, 0, 1), (5, 4), (2,), (3,)], "frequency", decided_by="x")
    assert [group.members for group in plan.groups] == [(0, 1, 6), (2,), (3,), (4, 5), (7,)]
    assert plan.groups[0].coefficients == pytest.approx((3 / 6, 1 / 6, 2 / 6))
    assert plan.groups[3].coefficients == plan.groups[3].router_coefficients == (0.5, 0.5)
    assert all(group.coefficients == group.router_coefficients for group in plan.groups)
    assert [group.untouched for group in plan.groups] == [False, True, True, False, True]
    assert all(group.scale == 1.0 for group in plan.groups)
    assert (plan.module, plan.layer, plan.decided_by, plan.dropped) == (LAYER.name, 3, "x", ())


def test_routers_that_are_not_merged_stay_the_most_visited_members() -> None:
    groups = [(0, 1, 6), (2, 3), (4, 5), (7,)]
    plan = merge_groups(stats(routed_count=COUNTS), groups, "uniform", merge_routers=False)
    assert [group.router_coefficients for group in plan.groups] == [(1, 0, 0), (1, 0), (1, 0), (1,)]
    assert plan.groups[0].coefficients == pytest.approx((1 / 3,) * 3)
    swapped = merge_groups(stats(routed_count=COUNTS.flip(0)), groups, "uniform", merge_routers=False)
    # visits are now 0 2 5 5 0 0 1 3
    assert [group.router_coefficients for group in swapped.groups] == [(0, 1, 0), (1, 0), (1, 0), (1,)]
    blind = merge_groups(stats(), groups, "uniform", merge_routers=False)  # nobody counted: the lowest member
    assert [group.router_coefficients for group in blind.groups] == [(1, 0, 0), (1, 0), (1, 0), (1,)]


def test_scores_that_rank_nothing_are_refused() -> None:
    scores = COUNTS.clone()
    scores[[2, 5]] = torch.nan
    with pytest.raises(
        CompressionError, match=r"^model\.layers\.3\.mlp\.experts: the score of expert 2 is not a number"
    ):
        keep_best(stats(LAYER), scores, 4, frozenset())
    infinite = torch.tensor([0.0, -torch.inf, torch.inf, 1, 2, 3, 4, 5])
    assert keep_best(stats(LAYER), infinite, 7, frozenset()).dropped == (1,)


def test_keep_best_by_hand() -> None:
    def kept(scores: torch.Tensor, keep: int, protected: set[int], layer: MoeLayer = LAYER) -> list[int]:
        before = scores.clone()
        plan = keep_best(stats(layer), scores, keep, frozenset(protected))
        assert torch.equal(scores, before)
        assert plan.is_drop
        return [group.members[0] for group in plan.groups]

    assert kept(COUNTS, 4, set()) == [0, 4, 5, 6]
    assert kept(COUNTS, 6, set()) == [0, 1, 2, 4, 5, 6]  # 2, 3 and 7 tie at none: the lowest stays
    assert kept(COUNTS, 4, {7, 3}) == [3, 4, 5, 7]
    assert kept(COUNTS, 4, set(), GROUPED_LAYER) == [0, 1, 4, 5]
    assert kept(COUNTS, 4, {2, 3}, GROUPED_LAYER) == [2, 3, 4, 5]
    assert kept(torch.full((8,), torch.inf), 2, {6, 7}) == [6, 7]  # no score is above being protected
    with pytest.raises(
        CompressionError, match="3 protected experts do not fit into the 2 places when 2 are kept; protect"
    ):
        kept(COUNTS, 2, {0, 1, 2})
    with pytest.raises(CompressionError, match="3 protected experts do not fit into the 2 places of experts 0 to 3"):
        kept(COUNTS, 4, {0, 1, 2}, GROUPED_LAYER)  # all in one routing group, which keeps two
    with pytest.raises(CompressionError, match="1 experts are fewer than the top-k of 2"):
        kept(COUNTS, 1, set())


NEEDS = merge_needs("learned", False)
NAMES = ["mixtral", "gpt_oss", "deepseek_v3", "minimax_m2", "zaya", "deepseek_v4"]


def pairs(stats: LayerStatistics) -> list[tuple[int, ...]]:
    """Neighbours merge: {0, 1}, {2, 3}, ...; of routing groups with two experts each, nothing can."""
    layer = stats.layer
    if layer.experts // layer.routing_groups // 2 < layer.experts_per_group:
        return [(expert,) for expert in range(layer.experts)]
    return [(expert, expert + 1) for expert in range(0, layer.experts, 2)]


def learn(model: OpenModel, parts: Any, handle: Callable[[LayerStatistics, LayerPlan], Any]) -> list[Any]:
    """`handle` what each layer's statistics and uniform plan give, while its weights are loaded."""
    found = []
    for stats in collecting.collect(model, NEEDS, calibration(parts), Silent()):
        found.append(handle(stats, merge_groups(stats, pairs(stats))))
    return found


def check(plan: LayerPlan) -> None:
    for group in plan.groups:
        assert abs(sum(group.coefficients) - 1) < 1e-9
        assert abs(sum(group.router_coefficients) - 1) < 1e-9
        assert min(group.coefficients) >= 0
        assert group.scale > 0
    if "error_learned" in plan.figures:
        assert plan.figures["error_learned"] <= plan.figures["error_uniform"]


@pytest.mark.parametrize("merge_routers", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_reported_errors_are_those_of_the_stock_modules(name: str, merge_routers: bool, tmp_path: Path) -> None:
    stock, model = opened(name, tmp_path)
    parts = batches(stock)
    calls, small = plain_calls(stock, model.architecture, parts), Small.of(name, stock)

    def both(stats: LayerStatistics, _: LayerPlan) -> tuple[MoeLayer, LayerPlan, LayerPlan]:
        start = merge_groups(stats, pairs(stats), "uniform", merge_routers)
        return stats.layer, start, learn_coefficients(stats, start, merge_routers, steps=15)

    for layer, start, plan in learn(model, parts, both):
        check(plan)
        before, after = (small.error(layer, it, calls[layer.name]) for it in (start, plan))
        assert plan.figures["error_uniform"] == pytest.approx(before, abs=1e-4)
        assert plan.figures["error_learned"] == pytest.approx(after, abs=1e-4)
        assert after < before  # these all have something to gain
        if not merge_routers:
            assert [g.router_coefficients for g in plan.groups] == [g.router_coefficients for g in start.groups]


def loss(stats: LayerStatistics, plan: LayerPlan, made: _Merge, router: Any, merge: bool) -> tuple[float, Tensor]:
    target = stats.weights.experts(stats.inputs, stats.top_k_index, stats.top_k_weights)
    fixed = [torch.tensor(group.router_coefficients) for group in plan.groups]
    alphas = [logits.softmax(0) for logits in made.logits] if merge else fixed
    weights, index = router.planned(plan, alphas)
    output, _ = made.forward(weights.detach(), index)
    return float((output - target).double().square().sum() / target.double().square().sum()), index


@pytest.mark.parametrize("merge_routers", [True, False])
@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "deepseek_v3"])
def test_slopes_are_finite_differences_of_the_loss(name: str, merge_routers: bool, tmp_path: Path) -> None:
    stock, model = opened(name, tmp_path)

    def slopes(stats: LayerStatistics, plan: LayerPlan) -> int:
        made, router = _Merge(stats, plan), SmallerRouter(stats)
        target = stats.weights.experts(stats.inputs, stats.top_k_index, stats.top_k_weights).detach()
        size = target.square().sum()
        fixed = [torch.tensor(group.router_coefficients) for group in plan.groups]
        with torch.enable_grad():
            alphas = [logits.softmax(0) for logits in made.logits] if merge_routers else fixed
            weights, index = router.planned(plan, alphas)
            output, chosen = made.forward(weights.detach(), index)
            slope = 2 * (output - target) / size
            made.backward(weights, index, slope)
            if weights.requires_grad:
                weights.backward((chosen * slope[:, None]).sum(-1))  # type: ignore[no-untyped-call]
        compared = 0
        for parameter in (each for each in (*made.logits, *made.log_scales) if each.requires_grad):
            gradient = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
            for place in range(parameter.numel()):
                values, chosen_now = [], []
                for step in (1e-2, -1e-2):
                    with torch.no_grad():
                        parameter.view(-1)[place] += step
                        value, picked = loss(stats, plan, made, router, merge_routers)
                        parameter.view(-1)[place] -= step
                    values.append(value)
                    chosen_now.append(torch.equal(picked, index))
                if all(chosen_now):  # a token that changes its choice makes the loss jump
                    difference = (values[0] - values[1]) / 2e-2
                    assert float(gradient.view(-1)[place]) == pytest.approx(difference, rel=2e-2, abs=2e-4)
                    compared += abs(difference) > 1e-3
        return compared

    assert sum(learn(model, batches(stock), slopes)) >= 8


def test_nothing_to_learn_leaves_the_plan_as_it_is(tmp_path: Path) -> None:
    stock, model = opened("mixtral", tmp_path)
    single = learn(model, batches(stock), lambda stats, _: merge_groups(stats, [(e,) for e in range(8)], "learned"))
    assert all(plan.is_drop and "error_learned" not in plan.figures for plan in single)
    stock, model = opened("ernie4_5_vl_moe", tmp_path / "vision")
    plans = learn(model, batches(stock), lambda stats, start: (start, learn_coefficients(stats, start, steps=2)))
    unused = [(start, plan) for start, plan in plans if "vision" in plan.module]
    assert len(unused) == 2 and all(start == plan for start, plan in unused)  # no token reached them
