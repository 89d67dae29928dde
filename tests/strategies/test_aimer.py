"""AIMER: ratios in NumPy for every layout, which end is kept by hand, scale and ties, protection, routing groups."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from compressor.model.moe_layer import MoeLayer
from compressor.progress import Silent
from compressor.recipe.registry import load_strategy
from compressor.statistics.statistics import LayerStatistics
from strategies.ranked import Aimer, size_ratios
from tests.support.opened_models import batches, calibration, opened
from tests.support.plans import kept, make_plan


def stats(vectors: Tensor, **groups: Any) -> LayerStatistics:
    """Experts of one neuron whose gate, up and down projections are thirds of these vectors: [E, 3H]."""
    gate, up, down = vectors.chunk(3, dim=1)
    experts = SimpleNamespace(
        has_gate=True, is_transposed=False, is_concatenated=True,
        gate_up_proj=torch.stack([gate, up], dim=1), down_proj=down.unsqueeze(2),
    )  # fmt: skip
    layer = MoeLayer("m.experts", "m", "m.gate", "m", 0, len(vectors), 2, **groups)
    return LayerStatistics(layer, 0, {"weights": SimpleNamespace(experts=experts)})


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "deepseek_v3", "nemotron_h"])
def test_a_whole_model_against_numpy(name: str, tmp_path: Path) -> None:
    """All matrices of an expert end to end, biases left out: the order of weights does not matter to the ratio."""
    stock, model = opened(name, tmp_path)
    strategy = load_strategy("aimer")
    assert strategy.needs == {"weights"} and load_strategy("aimer").options is None
    made = make_plan(model, strategy, 4, {}, calibration(batches(stock)), Silent())
    for layer, planned in zip(model.architecture.layers, made.layers, strict=True):
        tensors = {n: p for n, p in stock.get_submodule(layer.name).named_parameters() if not n.endswith("bias")}
        found = []
        for expert in range(8):
            flat = np.concatenate([t[expert].detach().double().numpy().ravel() for t in tensors.values()])
            found.append(np.abs(flat).mean() / np.sqrt(np.square(flat).mean()))
        size = 8 // layer.routing_groups
        blocks = [range(begin, begin + size) for begin in range(0, 8, size)]
        lowest = [sorted(block, key=lambda e: found[e])[: 4 // len(blocks)] for block in blocks]
        assert kept(planned) == sorted(expert for block in lowest for expert in block)
        ends = {"least_ratio": min(found), "largest_ratio": max(found)}
        assert planned.figures == {key: pytest.approx(value, abs=2e-6) for key, value in ends.items()}


def test_the_distinct_experts_stay() -> None:
    """Ratios 1, 1/3 (one weight of nine), 5/9 over root of 17/9, and 2/3 over root of 2/3; even ones go first."""
    vectors = torch.ones(4, 9)
    vectors[1, 1:] = 0
    vectors[2, :] = torch.tensor([3.0, 1, 1, 0, 0, 0, 0, 0, 0]) * 10
    vectors[3, :3] = 0
    expected = [1.0, 1 / 3, 5 / 9 / (11 / 9) ** 0.5, (2 / 3) ** 0.5]
    assert size_ratios(stats(vectors).weights, 4).tolist() == pytest.approx(expected)
    assert kept(Aimer.plan(stats(vectors), 2)) == [1, 2]
    assert kept(Aimer.plan(stats(vectors), 3)) == [1, 2, 3]
    assert kept(Aimer.plan(stats(vectors), 2, frozenset({0}))) == [0, 1]
    groups = {"routing_groups": 2, "chosen_groups": 1, "experts_per_group": 2}
    assert kept(Aimer.plan(stats(vectors.repeat(2, 1), **groups), 4)) == [1, 2, 5, 6]


@given(seed=st.integers(0, 1000), power=st.integers(-40, 40), keep=st.integers(2, 5))
def test_scale_and_order_do_not_count(seed: int, power: int, keep: int) -> None:
    vectors = torch.randn(5, 12, generator=torch.Generator().manual_seed(seed)).double()
    made = Aimer.plan(stats(vectors), keep)
    scale = 2.0 ** (power * torch.arange(5)[:, None].double() / 5).round()
    assert kept(Aimer.plan(stats(vectors.flip(1).neg() * scale), keep)) == kept(made)


def test_gaussian_weights_even_ones_and_none() -> None:
    vectors = torch.zeros(4, 30_000, dtype=torch.bfloat16)
    vectors[0] = torch.randn(30_000, generator=torch.Generator().manual_seed(0)) * 0.02
    vectors[1] = -3.0
    found = size_ratios(stats(vectors).weights, 4)
    assert float(found[0]) == pytest.approx((2 / np.pi) ** 0.5, abs=0.01)
    assert found[1:].tolist() == [1, 1, 1]
    assert kept(Aimer.plan(stats(vectors), 2)) == [0, 1]  # ties go to the lower expert
