"""Auto: each layer's plan is the candidate's of least error on held-out tokens, computed plainly with stock modules."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from compressor.data.batches import Calibration
from compressor.errors import CompressionError
from compressor.model.moe_layer import MoeLayer
from compressor.model.opened import OpenModel
from compressor.progress import Silent
from compressor.recipe.plan import CompressionPlan, LayerPlan
from compressor.recipe.registry import Strategy, load_strategy
from compressor.statistics.statistics import LayerStatistics
from strategies import auto
from strategies.auto import Options
from tests import zoo
from tests.opened import batches, calibration, opened, plain_calls
from tests.plans import make_plan
from tests.stock import Small

SIZES = (3, 2, 2)
HELD = (1,)  # number of the batch that judges
CANDIDATES = "count-guided,reap,hc-smoe,model-centric"


def halves(parts: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Batches that plan, and those that judge."""
    return [part for n, part in enumerate(parts) if n not in HELD], [parts[n] for n in HELD]


def with_heldout(parts: Sequence[Tensor]) -> Calibration:
    return Calibration(tuple(parts), {"source": "random tokens"}, heldout=frozenset(HELD))


def planned(
    model: OpenModel, strategy: str, keep: int, data: Calibration | None, protected: Any = None, **options: Any
) -> CompressionPlan:
    return make_plan(model, load_strategy(strategy, options), keep, options, data, Silent(), protected=protected)


@torch.no_grad()
def errors(name: str, stock: Any, model: OpenModel, plan: CompressionPlan, parts: Sequence[Tensor]) -> dict[str, float]:
    """Each layer's error alone: a stock model of fewer experts, given what the original is given.

    A token's output is scaled by least squares, but not turned round, and weighted by its energy and their median.
    """
    calls, small, found = plain_calls(stock, model.architecture, parts), Small.of(name, stock), dict[str, float]()
    for layer, planned in zip(model.architecture.layers, plan.layers, strict=True):
        y = torch.cat(calls[layer.name].experts_outputs).double()
        other = small.run(layer, planned, calls[layer.name])[2].double()
        scales = torch.linalg.lstsq(other[:, :, None], y[:, :, None]).solution[:, 0].clamp(min=0)
        energies = y.square().sum(1)
        weights = 1 / (energies + energies.median())
        found[layer.name] = float(weights @ (y - scales * other).square().sum(1) / (weights @ energies))
    return found


@pytest.mark.parametrize("name", zoo.sweep(["mixtral", "gpt_oss", "deepseek_v3", "olmoe"]))
def test_the_candidate_of_least_heldout_error_wins_each_layer(name: str, tmp_path: Path) -> None:
    stock, model = opened(name, tmp_path)
    parts = batches(stock, SIZES)
    fit, held = halves(parts)
    made = planned(model, "auto", 4, with_heldout(parts), candidates=CANDIDATES)
    alone = {each: planned(model, each, 4, calibration(fit)) for each in CANDIDATES.split(",")}  # never sees `held`
    plain = {each: errors(name, stock, model, plan, held) for each, plan in alone.items()}
    seen = {each: errors(name, stock, model, plan, fit) for each, plan in alone.items()}
    for number, layer in enumerate(made.layers):
        expected = {each: found[layer.module] for each, found in plain.items()}
        shown = layer.figures["heldout_errors"]
        assert list(shown) == list(expected)
        assert shown == pytest.approx(expected, abs=2e-5)
        assert shown != pytest.approx({each: found[layer.module] for each, found in seen.items()}, abs=1e-3)
        least, *others = sorted(expected.values())
        won = layer.figures["won"]
        assert expected[won] == pytest.approx(least, abs=2e-5)
        assert layer.groups == alone[won].layers[number].groups
        assert layer.figures["ahead_by"] == pytest.approx(others[0] - least, abs=3e-5)
        assert layer.decided_by == "held-out reconstruction error"
        winner = alone[won].layers[number].figures
        assert {key: layer.figures[key] for key in winner} == winner


def test_equal_plans_share_an_error_and_the_earlier_wins(tmp_path: Path) -> None:
    stock, model = opened("mixtral", tmp_path)
    data = with_heldout(batches(stock, SIZES))
    for candidates in ("reap,gated-mass,count-guided", "count-guided,reap,gated-mass"):
        for layer in planned(model, "auto", 8, data, candidates=candidates).layers:
            assert layer.figures["won"] == candidates.split(",")[0]
            assert set(layer.figures["heldout_errors"].values()) == {0}
            assert "ahead_by" not in layer.figures


KEPT: Mapping[str, tuple[int, ...]] = {"one": (0, 1, 2), "two": (3, 4, 5), "three": (0, 1, 2), "four": (5, 6, 7)}


@pytest.mark.parametrize(
    ("error", "won", "ahead"),
    [
        ({0: 0.5, 3: 0.25, 5: 0.75}, "two", 0.25),
        ({0: 0.5, 3: 0.5, 5: 0.75}, "one", 0.0),
        ({0: 0.5, 3: 0.25, 5: 0.25}, "two", 0.0),
        ({0: 0.125, 3: 0.25, 5: 0.25}, "one", 0.125),  # not 0 ahead of "three", whose plan is the same
    ],
)
def test_ties_by_hand(error: dict[int, float], won: str, ahead: float, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = MoeLayer("experts", "block", "gate", "layers.0", 0, 8, 2, 1, 1)
    judged: list[Any] = []

    def keep(name: str) -> Strategy:
        return Strategy(name, lambda stats, keep, protected: LayerPlan.keep(layer, KEPT[name]), frozenset())

    def error_of(stats: Any, plan: LayerPlan) -> float:
        judged.append(stats)
        return error[plan.groups[0].members[0]]

    monkeypatch.setattr(auto, "load_strategy", keep)
    monkeypatch.setattr(auto, "rescaled_error", error_of)
    held = LayerStatistics(layer)
    made = auto.plan(LayerStatistics(layer, values={"heldout": held}), 3, options=Options(",".join(KEPT)))
    assert made.figures["won"] == won and made.figures["ahead_by"] == ahead
    assert [group.members[0] for group in made.groups] == list(KEPT[won])
    assert judged and all(stats is held for stats in judged)


def test_a_layer_that_no_token_reached_is_planned_by_the_first(tmp_path: Path) -> None:
    stock, model = opened("ernie4_5_vl_moe", tmp_path)
    data = with_heldout(batches(stock, SIZES))
    made = planned(model, "auto", 4, data, candidates="energy,reap")
    first = planned(model, "energy", 4, data)
    unreached = [(one, two) for one, two in zip(made.layers, first.layers, strict=True) if "vision" in one.module]
    assert len(unreached) == 2
    for one, two in unreached:
        assert one.groups == two.groups and one.figures["won"] == "energy"
        assert set(one.figures["heldout_errors"].values()) == {0}


def test_an_only_candidate_plans_every_layer(tmp_path: Path) -> None:
    stock, model = opened("mixtral", tmp_path)
    data = calibration(batches(stock, SIZES))
    made, alone = planned(model, "auto", 4, data), planned(model, auto.CANDIDATES, 4, data)
    for layer, own in zip(made.layers, alone.layers, strict=True):
        assert layer.groups == own.groups and layer.figures == {**own.figures, "won": auto.CANDIDATES}


def test_options_and_needs() -> None:
    assert load_strategy("auto").correction == "tune"
    assert load_strategy("auto").needs == load_strategy(auto.CANDIDATES).needs  # nothing is held out to judge one by
    for candidates in ("enumerate,energy", " reap , count-guided"):
        needs = {"heldout"}.union(*(load_strategy(name.strip()).needs for name in candidates.split(",")))
        assert load_strategy("auto", {"candidates": candidates}).needs == needs
    for candidates in ("reap,reap", "reap,,hc-smoe", "", "auto", "reap,auto"):
        with pytest.raises(CompressionError, match="should be different strategies other than auto"):
            Options(candidates)
    with pytest.raises(CompressionError, match="there is no strategy 'reep'; did you mean 'reap'"):
        load_strategy("auto", {"candidates": "count-guided,reep"})
