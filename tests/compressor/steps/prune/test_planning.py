"""Several plans from one pass: each is what a pass of its own gives, and so is the plan of each source alone."""

from pathlib import Path

import pytest
import torch

from compressor.data.batches import Calibration
from compressor.model.opened import OpenModel
from compressor.progress import Silent
from compressor.recipe.registry import load_strategy
from compressor.steps.prune.planning import Planner, PruneSpec
from tests.opened import batches, opened
from tests.plans import make_plan

NAMES = ("count-guided", "auto", "hc-smoe", "model-centric")


def spec(name: str, count: int = 4) -> PruneSpec:
    return PruneSpec(load_strategy(name), count, {})


def sourced(parts: tuple[torch.Tensor, ...], sources: tuple[int, ...], heldout: tuple[int, ...]) -> Calibration:
    """Calibration data whose batches are of these sources."""
    count = max(sources) + 1
    named = [{"source": f"source {number}"} for number in range(count)]
    identity = {"source": "several", "sources": named}
    return Calibration(parts, identity, sources, (1 / count,) * count, frozenset(heldout))


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3"])
def test_plans_of_one_pass_are_those_of_a_pass_each(family: str, tmp_path: Path) -> None:
    stock, model = opened(family, tmp_path)
    data = sourced(batches(stock, (2, 1, 1)), (0, 0, 0), (1,))
    specs = [spec(name, count) for name in NAMES for count in (4, 6)]
    for number, planned in enumerate(Planner(model, data, Silent(), 3).plans(specs)):
        asked = specs[planned.spec]
        assert planned.spec == number and planned.source is None and planned.seconds >= 0
        alone = make_plan(model, asked.strategy, asked.experts, {}, data, Silent(), 3)
        assert planned.plan == alone.expert_plan


def same_layers(model: OpenModel, name: str, data: Calibration, count: int) -> bool:
    """Whether the plan of each source alone is what its batches alone give."""
    found = Planner(model, data, Silent()).plans([spec(name)], per_source=True)
    assert [planned.source for planned in found] == [None, *(f"source {number}" for number in range(count))]
    asked = load_strategy(name)
    assert found[0].plan == make_plan(model, asked, 4, {}, data, Silent()).expert_plan
    own = [make_plan(model, asked, 4, {}, data.only(number), Silent()) for number in range(count)]
    texts = [planned.calibration for planned in found[1:]]
    assert [text and text.identity for text in texts] == [plan.calibration for plan in own]
    return all(planned.plan.layers == plan.layers for planned, plan in zip(found[1:], own, strict=True))


@pytest.mark.parametrize("name", ["count-guided", "auto", "reap"])
def test_a_sources_plan_is_made_and_judged_on_its_own_tokens_alone(name: str, tmp_path: Path) -> None:
    stock, model = opened("mixtral", tmp_path)
    parts = batches(stock, (2, 1, 2, 1, 1))
    assert same_layers(model, name, sourced(parts, (0, 0, 1, 1, 1), (1, 3)), 2)
