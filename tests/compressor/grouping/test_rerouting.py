"""Re-routing: the stock router of the really smaller model, for kept and merged experts, on all tokens and on some."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from compressor.grouping.choose import merge_groups
from compressor.grouping.reconstruction import SmallerRouter
from compressor.progress import Silent
from compressor.recipe.plan import Group, LayerPlan
from compressor.statistics.statistics import RECONSTRUCTION, LayerStatistics, collect
from tests.opened import batches, calibration, opened, plain_calls
from tests.stock import Small, by_slot

NAMES = [
    "mixtral", "gpt_oss", "deepseek_v3", "minimax_m2", "zaya", "deepseek_v4", "gemma4", "granitemoe", "ernie4_5_moe",
    "hy_v3", "jamba", "olmoe", "qwen3_moe-norm_topk_false", "phimoe", "inkling",
]  # fmt: skip
SEVERAL = pytest.mark.parametrize("name", NAMES)


def layers(model: Any, parts: Any) -> Iterator[LayerStatistics]:
    yield from collect(model, RECONSTRUCTION, calibration(parts), Silent())


def some_kept(stats: LayerStatistics) -> list[list[int]]:
    """Kept sets that every router can take: of two routing groups, each half holds as many."""
    fewer = [] if stats.layer.routing_groups > 1 else [[2, 3, 7], [0, 1, 2, 3, 4, 6, 7]]
    return [[0, 2, 4, 5], [1, 3, 6, 7], [0, 1, 3, 5, 6, 7], *fewer]


def assert_same(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor], count: int) -> None:
    assert found[0].dtype == torch.float32 and found[1].dtype == torch.int64
    assert int(found[1].min()) >= 0 and int(found[1].max()) < count
    torch.testing.assert_close(by_slot(*found, count), by_slot(*expected, count), rtol=1e-4, atol=1e-5)


@SEVERAL
def test_with_all_experts_the_sampled_choices_come_back(name: str, tmp_path: Path) -> None:
    stock, model = opened(name, tmp_path)
    for stats in layers(model, batches(stock)):
        if len(stats.inputs):
            found = SmallerRouter(stats).kept(range(stats.layer.experts))
            assert_same(found, (stats.top_k_weights, stats.top_k_index), stats.layer.experts)


@SEVERAL
def test_kept_and_merged_experts_route_as_in_the_stock_smaller_model(name: str, tmp_path: Path) -> None:
    stock, model = opened(name, tmp_path)
    parts = batches(stock)
    calls, small = plain_calls(stock, model.architecture, parts), Small.of(name, stock)
    for stats in layers(model, parts):
        router, layer = SmallerRouter(stats), stats.layer
        for kept in some_kept(stats):
            plan = LayerPlan.keep(layer, kept)
            weights, slots, _ = small.run(layer, plan, calls[layer.name])
            assert_same(router.kept(kept), (weights, slots), len(kept))
            assert all(
                torch.equal(one, other) for one, other in zip(router.kept(kept), router.planned(plan), strict=True)
            )
        mixed = [Group((0, 3), (0.5, 0.5), (0.25, 0.75)), Group((1,), (1.0,), (1.0,)), Group.single(2)]
        plan = LayerPlan.of(layer, [*mixed, Group((4, 5), (0.5, 0.5), (0.4, 0.6)), Group.single(6), Group.single(7)])
        weights, slots, _ = small.run(layer, plan, calls[layer.name])
        assert_same(router.planned(plan), (weights, slots), 6)


@SEVERAL
def test_some_tokens_are_routed_as_among_all(name: str, tmp_path: Path) -> None:
    stock, model = opened(name, tmp_path)
    rows = torch.tensor([30, 2, 2, 17, 35])
    for stats in layers(model, batches(stock)):
        router = SmallerRouter(stats)
        plan = merge_groups(stats, [(0, 1), (2,), (3,), (4, 5), (6,), (7,)])
        for whole, part in (
            (router.kept([0, 2, 4, 5]), router.kept([0, 2, 4, 5], rows)),
            (router.planned(plan), router.planned(plan, rows=rows)),
        ):
            assert_same(part, (whole[0][rows], whole[1][rows]), 6)
        for nothing in router.kept([0, 2, 4, 5], rows[:0]):
            assert nothing.shape == (0, stats.layer.top_k)


def test_a_bias_as_long_as_the_sample_is_not_cut_by_tokens(tmp_path: Path) -> None:
    """minimax_m2's block hands its bias [E] on; here the sample has E tokens too."""
    stock, model = opened("minimax_m2", tmp_path)
    for stats in layers(model, batches(stock, (1,), length=8)):
        assert stats.router_arguments.dims == {0: 0, 1: None}
        router, kept = SmallerRouter(stats), [0, 2, 4, 5]
        rows = torch.tensor([7, 1])
        whole = router.kept(kept)
        assert_same(router.kept(kept, rows), (whole[0][rows], whole[1][rows]), 4)


def test_the_skip_expert_of_zaya_has_no_weight(tmp_path: Path) -> None:
    stock, model = opened("zaya", tmp_path)
    skipped = 0
    for stats in layers(model, batches(stock)):
        weights, slots = SmallerRouter(stats).kept([1, 3, 6, 7])
        skipped += int((weights == 0).sum())
        assert (slots[weights == 0] == 0).all()
    assert skipped > 0


def test_shares_carry_gradients_and_stand_in_for_the_plans_own(tmp_path: Path) -> None:
    stock, model = opened("mixtral", tmp_path)
    for stats in layers(model, batches(stock)):
        plan = merge_groups(stats, [(0, 1), *((expert,) for expert in range(2, 8))])
        shares = [torch.ones(1) for _ in plan.groups]
        shares[0] = torch.tensor([0.2, 0.8], requires_grad=True)
        with torch.enable_grad():
            weights, slots = SmallerRouter(stats).planned(plan, shares)
            (slope,) = torch.autograd.grad(weights.square().sum(), shares[0])
        assert (slope != 0).all()
        own = LayerPlan.of(stats.layer, [Group((0, 1), (0.5, 0.5), (0.2, 0.8)), *plan.groups[1:]])
        assert_same((weights.detach(), slots), SmallerRouter(stats).planned(own), 7)


def test_a_layer_that_no_token_reached_routes_nothing(tmp_path: Path) -> None:
    stock, model = opened("ernie4_5_vl_moe", tmp_path)
    unreached = [stats for stats in layers(model, batches(stock)) if len(stats.inputs) == 0]
    assert len(unreached) == 2
    for stats in unreached:
        router = SmallerRouter(stats)
        for weights, slots in (router.kept([0, 1, 2]), router.planned(LayerPlan.keep(stats.layer, [0, 1, 2]))):
            assert weights.shape == slots.shape == (0, stats.layer.top_k)


@SEVERAL
def test_weights_and_samples_are_not_touched(name: str, tmp_path: Path) -> None:
    stock, model = opened(name, tmp_path)
    for stats in layers(model, batches(stock)):
        positional, by_keyword = stats.router_arguments
        arguments = [value for value in (*positional, *by_keyword.values()) if isinstance(value, Tensor)]
        tensors = [*stats.weights.block.state_dict().values(), *arguments]
        before = [tensor.clone() for tensor in tensors]
        SmallerRouter(stats).kept([0, 2, 4, 5], torch.tensor([3, 4]))
        SmallerRouter(stats).planned(LayerPlan.keep(stats.layer, [0, 2, 4, 5]))
        assert all(torch.equal(one, other) for one, other in zip(before, tensors, strict=True))
