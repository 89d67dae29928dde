"""Reconstruction: routing, outputs and errors of the stock modules of the really smaller model."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from compressor.checkpoint.source import locate
from compressor.model.opened import open_model
from compressor.progress import Silent
from compressor.recipe.plan import Group, LayerPlan
from compressor.statistics.statistics import RECONSTRUCTION, LayerStatistics, collect
from compressor.steps.prune.reconstruction import KeptErrors, SmallerRouter, original, reconstruct, relative_error
from compressor.steps.prune.selection import merge_groups
from tests.support import zoo
from tests.support.opened_models import batches, calibration, opened, plain_calls
from tests.support.stock_models import Small, by_slot

NAMES = [
    "mixtral", "gpt_oss", "deepseek_v3", "minimax_m2", "zaya", "deepseek_v4", "gemma4", "granitemoe", "ernie4_5_moe",
    "hy_v3", "jamba", "olmoe", "nemotron_h",
]  # fmt: skip
SEVERAL = pytest.mark.parametrize("name", NAMES)


def layers(model: Any, parts: Any) -> Iterator[LayerStatistics]:
    yield from collect(model, RECONSTRUCTION, calibration(parts), Silent())


def close(found: Tensor, expected: Tensor) -> None:
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def plans(stats: LayerStatistics) -> list[LayerPlan]:
    """Drops and merges, with shares that differ between experts and routers and a scale, and dropped experts beside."""
    merged = [
        Group((0, 3), (0.75, 0.25), (0.25, 0.75), 1.5),
        Group((4, 6), (-0.5, 1.5), (1.0, 0.0)),
        Group((5,), (1.0,), (1.0,), 0.5),
    ]
    return [
        LayerPlan.keep(stats.layer, [0, 2, 4, 5]),
        LayerPlan.keep(stats.layer, range(8)),
        LayerPlan.of(stats.layer, [*merged, Group.single(1)]),
        merge_groups(stats, [(0, 1), (2, 3), (4, 5), (6, 7)]),
    ]


@SEVERAL
def test_outputs_and_errors_are_those_of_the_stock_smaller_model(name: str, tmp_path: Path) -> None:
    stock, model = opened(name, tmp_path)
    parts = batches(stock)
    calls, small = plain_calls(stock, model.architecture, parts), Small.of(name, stock)
    for stats in layers(model, parts):
        seen = calls[stats.layer.name]
        close(original(stats), torch.cat(seen.experts_outputs))
        for plan in plans(stats):
            _, _, outputs = small.run(stats.layer, plan, seen)
            close(reconstruct(stats, plan), outputs)
            expected = small.error(stats.layer, plan, seen)
            assert relative_error(stats, plan) == pytest.approx(expected, rel=1e-4, abs=1e-9)
            assert (expected > 1e-3) == (len(plan.groups) < 8)  # keeping everything costs nothing


@SEVERAL
def test_errors_of_kept_sets_are_squared_distances_of_outputs(name: str, tmp_path: Path) -> None:
    stock, model = opened(name, tmp_path)
    rows = torch.tensor([30, 2, 2, 17])
    for stats in layers(model, batches(stock)):
        errors = KeptErrors(stats)
        for kept in ([0, 2, 4, 5], [1, 3, 6, 7], [0, 1, 3, 4, 5, 6]):
            gap = original(stats).double() - reconstruct(stats, LayerPlan.keep(stats.layer, kept)).double()
            expected = gap.square().sum(1)
            found = errors.kept(kept)
            assert found.errors.dtype == torch.float64
            torch.testing.assert_close(found.errors, expected, rtol=1e-3, atol=1e-6)
            torch.testing.assert_close(errors.kept(kept, rows).errors, expected[rows], rtol=1e-3, atol=1e-6)
            assert set(found.experts.unique().tolist()) <= set(kept)
        assert float(errors.kept(range(8)).errors.max()) < 1e-9


def test_a_layer_that_no_token_reached_has_no_error_and_routes_nothing(tmp_path: Path) -> None:
    stock, model = opened("ernie4_5_vl_moe", tmp_path)
    unreached = [stats for stats in layers(model, batches(stock)) if len(stats.inputs) == 0]
    assert len(unreached) == 2
    for stats in unreached:
        for plan in plans(stats):
            assert relative_error(stats, plan) == 0
        router = SmallerRouter(stats)
        for weights, slots in (router.kept([0, 1, 2]), router.planned(LayerPlan.keep(stats.layer, [0, 1, 2]))):
            assert weights.shape == slots.shape == (0, stats.layer.top_k)
        assert len(KeptErrors(stats).kept([0, 1, 2]).errors) == 0


def test_samples_in_a_lower_precision_are_reconstructed_in_float32(tmp_path: Path) -> None:
    stock = zoo.build("mixtral").bfloat16()
    stock.save_pretrained(tmp_path)
    model = open_model(locate(str(tmp_path)), "bfloat16", "cpu")
    for stats in layers(model, batches(stock)):
        everything, pairs = LayerPlan.keep(stats.layer, range(8)), merge_groups(stats, [(0, 1), (2, 3), (4, 5), (6, 7)])
        assert reconstruct(stats, pairs).dtype == torch.float32
        # the model routed by bfloat16 logits, which are often tied: there float32 may choose another expert
        again = SmallerRouter(stats).planned(everything)[1].sort(1).values
        alike = (again == stats.top_k_index.sort(1).values).all(1)
        assert alike.float().mean() > 0.9
        wanted, found = (values[alike].double() for values in (original(stats), reconstruct(stats, everything)))
        assert (wanted - found).square().sum() < 1e-3 * wanted.square().sum()
        assert relative_error(stats, pairs) > 1e-3


def some_kept(stats: LayerStatistics) -> list[list[int]]:
    """Kept sets that every router can take: of two routing groups, each half holds as many."""
    fewer = [] if stats.layer.routing_groups > 1 else [[2, 3, 7], [0, 1, 2, 3, 4, 6, 7]]
    return [[0, 2, 4, 5], [1, 3, 6, 7], [0, 1, 3, 5, 6, 7], *fewer]


def assert_same(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor], count: int) -> None:
    assert found[0].dtype == torch.float32 and found[1].dtype == torch.int64
    assert int(found[1].min()) >= 0 and int(found[1].max()) < count
    torch.testing.assert_close(by_slot(*found, count), by_slot(*expected, count), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", [*NAMES[:-1], "qwen3_moe-norm_topk_false", "phimoe", "inkling"])
def test_kept_and_merged_experts_route_as_in_the_stock_smaller_model(name: str, tmp_path: Path) -> None:
    stock, model = opened(name, tmp_path)
    parts, some = batches(stock), torch.tensor([30, 2, 2, 17, 35])
    calls, small = plain_calls(stock, model.architecture, parts), Small.of(name, stock)
    for stats in layers(model, parts):
        router, layer = SmallerRouter(stats), stats.layer
        for kept in some_kept(stats):
            plan = LayerPlan.keep(layer, kept)
            weights, slots, _ = small.run(layer, plan, calls[layer.name])
            whole = router.kept(kept)
            assert_same(whole, (weights, slots), len(kept))
            assert all(map(torch.equal, whole, router.planned(plan)))
            assert_same(router.kept(kept, some), (whole[0][some], whole[1][some]), len(kept))
            assert all(nothing.shape == (0, layer.top_k) for nothing in router.kept(kept, some[:0]))
        mixed = [Group((0, 3), (0.5, 0.5), (0.25, 0.75)), Group((1,), (1.0,), (1.0,)), Group.single(2)]
        plan = LayerPlan.of(layer, [*mixed, Group((4, 5), (0.5, 0.5), (0.4, 0.6)), Group.single(6), Group.single(7)])
        weights, slots, _ = small.run(layer, plan, calls[layer.name])
        assert_same(router.planned(plan), (weights, slots), 6)


def test_a_bias_as_long_as_the_sample_is_not_cut_by_tokens(tmp_path: Path) -> None:
    """minimax_m2's block hands its bias [E] on; here the sample has E tokens too."""
    stock, model = opened("minimax_m2", tmp_path)
    for stats in layers(model, batches(stock, (1,), length=8)):
        assert stats.router_arguments.dims == {0: 0, 1: None}
        router, kept = SmallerRouter(stats), [0, 2, 4, 5]
        rows = torch.tensor([7, 1])
        whole = router.kept(kept)
        assert_same(router.kept(kept, rows), (whole[0][rows], whole[1][rows]), 4)
