"""Enumerate: brute force by the stock smaller block, a greedy that re-evaluates everything, refusals, no tokens."""

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch

from compressor.checkpoint.source import locate
from compressor.model.opened import open_model
from compressor.progress import Silent
from compressor.recipe.plan import LayerPlan
from compressor.statistics.statistics import LayerStatistics, collect
from strategies.enumerate_subsets import NEEDS, Options, plan
from tests.support import zoo
from tests.support.opened_models import batches, calibration, opened, plain_calls
from tests.support.plans import kept
from tests.support.stock_models import Small

NAMES = ["mixtral", "qwen3_moe-norm_topk_false", "gpt_oss", "minimax_m2", "zaya", "deepseek_v4"]
GREEDY = Options(most_subsets=0)
Kept = tuple[int, ...]


def layers(model: Any, parts: Any) -> Iterator[LayerStatistics]:
    yield from collect(model, NEEDS, calibration(parts), Silent())


def judge(name: str, stock: Any, model: Any, parts: Any) -> Callable[[LayerStatistics, Sequence[int]], float]:
    """The relative error of a kept set, by the stock modules of the smaller model."""
    calls, small = plain_calls(stock, model.architecture, parts), Small.of(name, stock)
    known: dict[tuple[str, Kept], float] = {}

    def error(stats: LayerStatistics, chosen: Sequence[int]) -> float:
        key = stats.layer.name, tuple(chosen)
        if key not in known:
            known[key] = small.error(stats.layer, LayerPlan.keep(stats.layer, chosen), calls[stats.layer.name])
        return known[key]

    return error


def even(chosen: Sequence[int], groups: int) -> bool:
    return len({sum(expert // (8 // groups) == group for expert in chosen) for group in range(groups)}) == 1


@pytest.mark.parametrize("name", zoo.sweep([*NAMES, "deepseek_v3", "nemotron_h"]))
def test_the_best_of_all_subsets_is_kept(name: str, tmp_path: Path) -> None:
    stock, model = opened(name, tmp_path)
    parts = batches(stock)
    error = judge(name, stock, model, parts)
    for stats in layers(model, parts):
        legal = [chosen for chosen in combinations(range(8), 6) if even(chosen, stats.layer.routing_groups)]
        best = min(legal, key=lambda chosen: (error(stats, chosen), chosen))
        made = plan(stats, 6)
        assert tuple(kept(made)) == best
        assert made.decided_by == "reconstruction error"
        assert made.figures["search"] == f"all {len(legal)} subsets"
        assert made.figures["reconstruction_error"] == pytest.approx(error(stats, best), rel=1e-3, abs=1e-6)


def naive_greedy(error: Any, stats: LayerStatistics, keep: int, protected: frozenset[int] = frozenset()) -> Kept:
    left = tuple(range(8))
    while len(left) > keep:
        smaller = [tuple(e for e in left if e != gone) for gone in left if gone not in protected]
        left = min(smaller, key=lambda chosen: (error(stats, chosen), chosen))
    return left


@pytest.mark.parametrize(
    "name",
    zoo.sweep(["mixtral", "qwen3_moe-norm_topk_false", "zaya", "deepseek_v4", "deepseek_v3-n_group1", "gpt_oss-top4"]),
)
def test_greedy_is_a_greedy_that_evaluates_everything_anew(name: str, tmp_path: Path) -> None:
    stock, model = opened(name, tmp_path)
    parts = batches(stock)
    error = judge(name, stock, model, parts)
    for stats in layers(model, parts):
        made = plan(stats, 4, options=GREEDY)
        assert tuple(kept(made)) == naive_greedy(error, stats, 4)
        assert made.figures["search"] == "greedy backward"
        assert made.figures["subsets_tried"] == 8 + 7 + 6 + 5
        assert made.figures["reconstruction_error"] == pytest.approx(error(stats, kept(made)), rel=1e-3, abs=1e-6)
        protected = frozenset({1, 6})
        guarded = kept(plan(stats, 5, protected, GREEDY))
        assert tuple(guarded) == naive_greedy(error, stats, 5, protected)


@pytest.mark.parametrize("name", ["deepseek_v3", "nemotron_h"])
def test_greedy_takes_one_of_every_routing_group_at_once(name: str, tmp_path: Path) -> None:
    """No other expert of one group could have gone instead for less; and the whole search is legal."""
    stock, model = opened(name, tmp_path)
    parts = batches(stock)
    error = judge(name, stock, model, parts)
    for stats in layers(model, parts):
        made = plan(stats, 6, options=GREEDY)
        gone = made.dropped
        assert [expert // 4 for expert in gone] == [0, 1]
        for group in (0, 1):
            for other in range(4 * group, 4 * group + 4):
                swapped = [expert for expert in range(8) if expert not in (gone[1 - group], other)]
                assert error(stats, kept(made)) <= error(stats, swapped) * (1 + 1e-5)
        assert even(kept(plan(stats, 4, options=GREEDY)), 2)
        guarded = kept(plan(stats, 4, frozenset({0, 3, 5}), GREEDY))
        assert {0, 3, 5} < set(guarded) and even(guarded, 2)


def test_more_subsets_than_most_are_not_tried(tmp_path: Path) -> None:
    stock, model = opened("mixtral", tmp_path)
    for stats in layers(model, batches(stock)):
        assert plan(stats, 4, options=Options(most_subsets=69)).figures["search"] == "greedy backward"
        assert plan(stats, 4, options=Options(most_subsets=70)).figures["search"] == "all 70 subsets"


def test_a_layer_that_no_token_reached_keeps_its_lowest_experts(tmp_path: Path) -> None:
    stock, model = opened("ernie4_5_vl_moe", tmp_path)
    unreached = [stats for stats in layers(model, batches(stock)) if len(stats.inputs) == 0]
    assert len(unreached) == 2
    for stats in unreached:
        for options in (Options(), GREEDY):
            made = plan(stats, 4, frozenset({6}), options)
            assert kept(made) == [0, 1, 2, 6]
            assert made.figures == {"reconstruction_error": 0.0, "search": "none: no token reached the layer"}


@pytest.mark.parametrize("options", [Options(), GREEDY])
def test_ties_go_to_the_lowest_experts(options: Options, tmp_path: Path) -> None:
    stock = zoo.build("mixtral")
    with torch.no_grad():
        for experts in zoo.experts(stock).values():
            experts.down_proj.zero_()  # type: ignore[operator]
    stock.save_pretrained(tmp_path)
    for stats in layers(open_model(locate(str(tmp_path)), "float32", "cpu"), batches(stock)):
        made = plan(stats, 4, frozenset({5}), options)
        assert kept(made) == [0, 1, 2, 5]
        assert made.figures["reconstruction_error"] == 0
