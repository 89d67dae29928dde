"""Several plans from one pass: each is what a pass of its own gives, and so is the plan of each source alone."""

from pathlib import Path

import pytest
import torch

from compressor.data.batches import Calibration
from compressor.progress import Silent
from compressor.recipe.registry import load_strategy
from compressor.steps.prune.planning import Planner, PruneSpec
from tests.support.opened_models import batches, opened
from tests.support.plans import make_plan

NAMES = ("count-guided", "auto", "hc-smoe", "model-centric")


def spec(name: str, count: int = 4) -> PruneSpec:
    return PruneSpec(load_strategy(name), count)


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
    for asked, planned in zip(specs, Planner(model, data, Silent(), 3).plans(specs), strict=True):
        assert planned.seconds >= 0
        alone = make_plan(model, asked.strategy, asked.experts, {}, data, Silent(), 3)
        assert planned.plan == alone.expert_plan
