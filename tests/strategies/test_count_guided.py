"""Count-guided: by hand, with ties, protection, routing groups and experts that no token reached."""

from pathlib import Path
from typing import Any

import pytest
import torch

from compressor.errors import CompressionError
from compressor.model.architecture import MoeLayer
from compressor.progress import Silent
from compressor.recipe.registry import load_strategy
from compressor.statistics.statistics import LayerStatistics
from strategies.count_guided import plan
from tests.opened import batches, calibration, opened, plain_calls
from tests.plans import by_hand, make_plan


def stats(counts: list[float], top_k: int = 2, **groups: Any) -> LayerStatistics:
    layer = MoeLayer("layers.1.experts", "layers.1", "layers.1.gate", "layers.1", 1, len(counts), top_k, **groups)
    return LayerStatistics(layer, int(sum(counts)), {"routed_count": torch.tensor(counts, dtype=torch.float64)})


def kept(made: Any) -> list[int]:
    assert made.is_drop
    return [group.members[0] for group in made.groups]


def test_a_case_by_hand() -> None:
    made = plan(stats([5, 0, 9, 2, 5, 0]), 3)
    assert kept(made) == [0, 2, 4]
    assert made.dropped == (1, 3, 5)
    assert made.decided_by == "routed_count"
    assert made.figures == {"kept_share_of_visits": round(19 / 21, 6)}


def test_ties_go_to_the_lower_expert_and_unreached_experts_go_first() -> None:
    assert kept(plan(stats([5, 0, 9, 2, 5, 0]), 5)) == [0, 1, 2, 3, 4]
    assert kept(plan(stats([1, 1, 1, 1]), 2)) == [0, 1]
    silent = plan(stats([0, 0, 0, 0]), 2)  # a layer that no token reached
    assert kept(silent) == [0, 1]
    assert silent.figures == {"kept_share_of_visits": 0.0}


def test_protected_experts_stay() -> None:
    assert kept(plan(stats([5, 0, 9, 2, 5, 0]), 3, frozenset({5, 1}))) == [1, 2, 5]
    with pytest.raises(CompressionError, match=r"layers\.1\.experts: 3 protected experts do not fit into 2"):
        plan(stats([5, 0, 9, 2]), 2, frozenset({0, 1, 3}))


def test_routing_groups_keep_equally_many() -> None:
    groups = {"routing_groups": 2, "chosen_groups": 1, "experts_per_group": 2}
    assert kept(plan(stats([9, 8, 7, 6, 0, 0, 1, 0], **groups), 4)) == [0, 1, 4, 6]
    with pytest.raises(CompressionError, match="do not divide into its 2 routing groups"):
        plan(stats([9, 8, 7, 6, 0, 0, 1, 0], **groups), 5)


def test_too_few_experts_are_refused() -> None:
    with pytest.raises(CompressionError, match="1 experts are fewer than the top-k of 2; keep at least 2"):
        plan(stats([1, 2, 3]), 1)
    with pytest.raises(CompressionError, match="4 experts asked for, it has 3"):
        plan(stats([1, 2, 3]), 4)


@pytest.mark.parametrize("name", ["mixtral", "deepseek_v3", "ernie4_5_vl_moe"])
def test_a_whole_model_against_counts_of_a_plain_forward(name: str, tmp_path: Path) -> None:
    stock, model = opened(name, tmp_path)
    parts = batches(stock)
    strategy = load_strategy("count-guided")
    first, second = (make_plan(model, strategy, 4, {}, calibration(parts), Silent()) for _ in range(2))
    assert by_hand(first).to_json() == by_hand(second).to_json()
    calls = plain_calls(stock, model.architecture, parts)
    for layer, made in zip(model.architecture.layers, first.layers, strict=True):
        counts = [0] * layer.experts
        for _, index, _ in calls[layer.name].experts_arguments:
            for expert in index.flatten().tolist():
                counts[expert] += 1
        blocks = [range(8)] if layer.routing_groups == 1 else [range(4), range(4, 8)]
        best = [sorted(block, key=lambda expert: (-counts[expert], expert))[: 4 // len(blocks)] for block in blocks]
        assert kept(made) == sorted(expert for block in best for expert in block)
