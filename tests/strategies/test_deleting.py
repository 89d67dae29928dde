"""What deleting experts costs: razor, leave-one-out and hope against the stock modules, loops and every subset."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from compressor.model.moe_layer import MoeLayer
from compressor.progress import Silent
from compressor.recipe.registry import load_strategy
from compressor.statistics import statistics as collecting
from compressor.statistics.statistics import LayerStatistics
from compressor.steps.prune.reconstruction import KeptErrors
from strategies import hope
from tests.support import zoo
from tests.support.opened_models import batches, calibration, one_expert, opened, plain_calls, statistics
from tests.support.plans import kept, make_plan
from tests.support.sequential_runs import opened_wide
from tests.support.strategy_runs import layer_statistics

NORMALISING = ["mixtral", "gpt_oss", "minimax_m2", "qwen3_moe"]
FROZEN = ["qwen3_moe-norm_topk_false", "olmoe"]
PAIRS = frozenset({"pair_count", "pair_norm_sum", "pair_product_sum"})


@pytest.mark.parametrize("name", zoo.sweep(NORMALISING))
def test_deleting_is_what_a_layer_without_the_expert_puts_out(name: str, tmp_path: Path) -> None:
    """The stock router of one expert fewer, on the same inputs."""
    stock, model = opened(name, tmp_path)
    needs = collecting.RECONSTRUCTION | {"squared_deletion_sum"}
    errors = dict[str, list[float]]()
    for stats in collecting.collect(model, needs, calibration(batches(stock), None), Silent()):
        measured, experts = KeptErrors(stats), range(stats.layer.experts)
        errors[stats.layer.name] = []
        for expert in experts:
            rows = (stats.top_k_index == expert).any(1).nonzero().flatten()
            left = measured.kept([other for other in experts if other != expert], rows)
            errors[stats.layer.name].append(float(left.errors.sum()))
        expected = torch.tensor(errors[stats.layer.name], dtype=torch.float64)
        torch.testing.assert_close(stats.squared_deletion_sum, expected, rtol=1e-3, atol=1e-6)
    assert any(sum(own) > 0 for own in errors.values())


def frozen_damage(stock: Any, layer: MoeLayer, hidden: Tensor, weights: Tensor, index: Tensor) -> list[float]:
    """By loops: the chosen expert's gated output less that of the next by the router's probabilities."""
    logits = hidden.float() @ stock.get_parameter(f"{layer.router}.weight").float().T
    outputs = [one_expert(stock.get_submodule(layer.name), expert, hidden) for expert in range(layer.experts)]
    damage = [0.0] * layer.experts
    for token, probabilities in enumerate(logits.softmax(-1)):
        chosen = index[token].tolist()
        following = max(set(range(layer.experts)) - {*chosen}, key=lambda expert: float(probabilities[expert]))
        for expert, weight in zip(chosen, weights[token].tolist(), strict=True):
            gap = weight * outputs[expert][token] - probabilities[following] * outputs[following][token]
            damage[expert] += float(gap.double().square().sum())
    return damage


@pytest.mark.parametrize("name", zoo.sweep(FROZEN))
def test_weights_that_are_not_normalised_stay(name: str, tmp_path: Path) -> None:
    stock, model = opened(name, tmp_path)
    parts = batches(stock)
    found, calls = statistics(model, {"squared_deletion_sum"}, parts), plain_calls(stock, model.architecture, parts)
    for layer in model.architecture.layers:
        hidden, index, weights = calls[layer.name].joined()
        expected = frozen_damage(stock, layer, hidden, weights, index)
        torch.testing.assert_close(
            found[layer.name].squared_deletion_sum, torch.tensor(expected).double(), rtol=1e-4, atol=1e-6
        )


def test_a_router_of_groups_takes_the_next_within_its_groups(tmp_path: Path) -> None:
    """Groups are chosen by what they hold, so the next expert is the next of theirs: by a loop over all scores."""
    stock, model = opened("deepseek_v3-n_group4", tmp_path)
    parts = batches(stock)
    found, calls = statistics(model, {"squared_deletion_sum"}, parts), plain_calls(stock, model.architecture, parts)
    for layer in model.architecture.layers:
        hidden, index, weights = calls[layer.name].joined()
        router = stock.get_submodule(layer.router)
        scores = (hidden.float() @ router.weight.float().T).sigmoid()
        biased, size = scores + router.e_score_correction_bias, layer.experts // layer.routing_groups
        outputs = [
            one_expert(stock.get_submodule(layer.name), expert, hidden).double() for expert in range(layer.experts)
        ]
        damage = torch.zeros(layer.experts, dtype=torch.float64)
        for token in range(len(hidden)):
            groups = biased[token].split(size)
            best = sorted(range(len(groups)), key=lambda g: -float(groups[g].topk(2).values.sum()))
            inside = {e for g in best[: layer.chosen_groups] for e in range(g * size, (g + 1) * size)}
            chosen, own = index[token].tolist(), weights[token].double()
            total, rest = own.sum(), inside - {*chosen}
            output = sum(w * outputs[e][token] for e, w in zip(chosen, own, strict=True))
            extra = max(rest, key=lambda e: float(biased[token, e])) if rest else None
            scale = total / sum(scores[token, e].double() for e in chosen)
            for expert, weight in zip(chosen, own, strict=True):
                more = 0.0 if extra is None else scale * scores[token, extra].double()
                moved = output - weight * outputs[expert][token]
                moved = moved if extra is None else moved + more * outputs[extra][token]
                damage[expert] += (output - moved * total / (total - weight + more)).square().sum()
        torch.testing.assert_close(found[layer.name].squared_deletion_sum, damage, rtol=1e-3, atol=1e-6)


def test_pairs_by_loops(tmp_path: Path) -> None:
    stock, model = opened("deepseek_v3", tmp_path)
    parts = batches(stock)
    found, calls = statistics(model, PAIRS, parts), plain_calls(stock, model.architecture, parts)
    for layer in model.architecture.layers:
        hidden, index, weights = calls[layer.name].joined()
        expected = {key: torch.zeros(layer.experts, layer.experts, dtype=torch.float64) for key in PAIRS}
        outputs = [
            one_expert(stock.get_submodule(layer.name), expert, hidden).double() for expert in range(layer.experts)
        ]
        for token, chosen in enumerate(index.tolist()):
            gated = [w * outputs[e][token] for e, w in zip(chosen, weights[token].tolist(), strict=True)]
            for (one, left), (other, right) in itertools.product(zip(chosen, gated, strict=True), repeat=2):
                expected["pair_count"][one, other] += 1
                expected["pair_norm_sum"][one, other] += left.norm() * right.norm()
                expected["pair_product_sum"][one, other] += left @ right
        for key, value in expected.items():
            torch.testing.assert_close(getattr(found[layer.name], key), value, rtol=1e-5, atol=1e-5)


def scored(table: Tensor, groups: int = 1, counts: Tensor | None = None) -> LayerStatistics:
    values = {"pair_product_sum": table, "pair_norm_sum": table, "pair_count": torch.ones_like(table)}
    if counts is not None:
        values["pair_count"] = counts
    blocks = {"routing_groups": groups, "chosen_groups": groups}
    return layer_statistics(values, experts=len(table), top_k=1, **blocks)


def least(table: Tensor, groups: int, keep: int, protected: frozenset[int]) -> float:
    """The least cost of all sets that may be deleted."""
    experts, size = range(len(table)), len(table) // groups
    costs = []
    for left in itertools.combinations(experts, keep):
        even = all(sum(e // size == g for e in left) == keep // groups for g in range(groups))
        if even and protected <= {*left}:
            gone = [expert for expert in experts if expert not in left]
            costs.append(sum(float(table[e, f]) for e in gone for f in gone))
    return min(costs)


@pytest.mark.parametrize(("groups", "keep"), [(1, 2), (1, 3), (1, 5), (2, 2), (2, 4)])
@pytest.mark.parametrize("protected", [frozenset[int](), frozenset({1})])
def test_hope_deletes_the_cheapest_set_of_six(groups: int, keep: int, protected: frozenset[int]) -> None:
    for seed in range(20):
        outputs = torch.randn(6, 9, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        table = outputs @ outputs.T
        left = kept(hope.plan(scored(table, groups), keep, protected))
        assert protected <= {*left} and len(left) == keep
        gone = [expert for expert in range(6) if expert not in left]
        best = least(table, groups, keep, protected)
        assert float(table[gone][:, gone].sum()) == pytest.approx(best, rel=1e-9, abs=1e-9)


def test_two_that_stand_in_for_each_other_do_not_both_go() -> None:
    table = torch.diag(torch.tensor([1.0, 1.1, 2.0, 9.0])).double()
    table[0, 1] = table[1, 0] = 50.0
    assert kept(hope.plan(scored(table), 2)) == [1, 3]
    norms = hope.Options(interaction="norms")
    assert kept(hope.plan(scored(table, counts=torch.zeros(4, 4)), 2, options=norms)) == [0, 1]
    counts = torch.full((4, 4), 1000.0).double().fill_diagonal_(1.0)  # on average little, as they seldom are alone
    assert kept(hope.plan(scored(table, counts=counts), 2, options=norms)) == [2, 3]


@pytest.mark.parametrize("strategy", ["razor", "leave-one-out", "hope", "energy", "ranked-choice"])
@pytest.mark.parametrize(
    "name", ["mixtral", zoo.full("deepseek_v3-n_group4"), zoo.full("zaya"), zoo.full("deepseek_v4")]
)
def test_every_criterion_plans_every_kind_of_router(name: str, strategy: str, tmp_path: Path) -> None:
    """Protected experts stay, groups keep alike, and a text of one sequence that reaches few experts is enough."""
    stock, model = opened_wide(name, tmp_path)
    text, first = calibration(batches(stock, (1,), 4)), model.architecture.layers[0]
    keep = first.experts - first.routing_groups
    guarded = {layer.name: frozenset({5}) for layer in model.architecture.layers}
    made = make_plan(model, load_strategy(strategy, {}), keep, {}, text, Silent(), protected=guarded)
    for plan, layer in zip(made.layers, model.architecture.layers, strict=True):
        assert len(kept(plan)) == keep and 5 in kept(plan)
        size = layer.experts // layer.routing_groups
        own = [sum(e // size == g for e in kept(plan)) for g in range(layer.routing_groups)]
        assert len({*own}) == 1
