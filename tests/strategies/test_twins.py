"""Planted twins: every strategy that compares experts merges the equal ones, whatever they are compared by."""

from pathlib import Path
from typing import Any

import pytest
import torch

from compressor.checkpoint.source import locate
from compressor.model.opened import open_model
from compressor.progress import Silent
from compressor.recipe.registry import load_strategy
from strategies import data_centric
from tests import zoo
from tests.opened import batches, calibration
from tests.plans import by_hand, make_plan

TWINS = {0: 2, 1: 3, 4: 6, 5: 7}  # within routing groups too


@pytest.mark.parametrize(
    ("names", "strategy", "options"),
    [
        *(
            (("mixtral", "gpt_oss", "nemotron_h"), "model-centric", {"representation": representation})
            for representation in ("surrogate", "vectorized")
        ),
        *(
            (("mixtral", "deepseek_v3"), "data-centric", {"similarity": similarity, "mix_tokens": mix})
            for similarity in data_centric.SIMILARITIES
            for mix in (True, False)
        ),
        (("deepseek_v3",), "hc-smoe", {}),
    ],
)
@torch.no_grad()
def test_planted_twins_are_grouped(
    names: tuple[str, ...], strategy: str, options: dict[str, Any], tmp_path: Path
) -> None:
    for name in names:
        stock = zoo.build(name)
        for experts in zoo.experts(stock).values():
            for parameter in experts.parameters():
                parameter[[*TWINS.values()]] = parameter[[*TWINS]]
        stock.save_pretrained(tmp_path / name)
        model, data = open_model(locate(str(tmp_path / name)), "float32", "cpu"), calibration(batches(stock))
        loaded = load_strategy(strategy, options)
        first, second = (make_plan(model, loaded, 4, options, data, Silent(), seed=4) for _ in range(2))
        assert by_hand(first).to_json() == by_hand(second).to_json()
        for layer in first.layers:
            assert [group.members for group in layer.groups] == [*TWINS.items()]
            assert layer.figures["within_group_distance"] == pytest.approx(0, abs=1e-6)
            if strategy != "hc-smoe":  # which merges by routed tokens
                assert all(group.coefficients == (0.5, 0.5) for group in layer.groups)
