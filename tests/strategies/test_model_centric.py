"""Model-centric: distances by plain loops for every layout, planted twins, routing groups, protection, refusals."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from compressor.errors import CompressionError
from compressor.progress import Silent
from compressor.statistics.statistics import collect
from compressor.steps.prune.similarity import fast_squared_distances
from strategies import model_centric
from strategies.model_centric import surrogate_distances, vectorized_distances
from tests.support import zoo
from tests.support.opened_models import opened
from tests.support.strategy_runs import members, planned_layers

LAYOUTS = ["mixtral", "gpt_oss", "aria", "nemotron_h", "deepseek_v3", "muse_spark"]


def fake(count: int, hidden: int, inner: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
    """Experts of a made-up layer as `LayerWeights` shows them."""
    generator = torch.Generator().manual_seed(seed)
    gate_up = (torch.randn(count, 2 * inner, hidden, generator=generator) * 0.1).to(dtype)
    down = (torch.randn(count, hidden, inner, generator=generator) * 0.1).to(dtype)
    experts = SimpleNamespace(
        has_gate=True, is_transposed=False, is_concatenated=True, gate_up_proj=gate_up, down_proj=down,
        parameters=lambda: [gate_up, down],
    )  # fmt: skip
    return SimpleNamespace(experts=experts)


def naive_matrices(experts: Any, expert: int) -> tuple[Tensor | None, Tensor, Tensor]:
    """gate, up [I, H] and down [H, I] in float64, by the module's flags."""
    fused = (experts.gate_up_proj if experts.has_gate else experts.up_proj)[expert].detach().double()
    down = experts.down_proj[expert].detach().double()
    fused, down = (fused.T, down.T) if experts.is_transposed else (fused, down)
    if not experts.has_gate:
        return None, fused, down
    rows = len(fused) // 2
    first = range(0, 2 * rows, 2) if not experts.is_concatenated else range(rows)
    second = range(1, 2 * rows, 2) if not experts.is_concatenated else range(rows, 2 * rows)
    return fused[list(first)], fused[list(second)], down


def naive_surrogates(experts: Any, count: int) -> Tensor:
    found = []
    for expert in range(count):
        gate, up, down = naive_matrices(experts, expert)
        inner = up if gate is None else gate * up
        found.append(torch.einsum("hi,ij->hj", down, inner))
    return torch.stack(found)


def naive_distances(features: Tensor) -> Tensor:
    rows = [(feature.double() - features.double()).square().flatten(1).sum(1).sqrt() for feature in features]
    return torch.stack(rows)


@pytest.mark.parametrize("name", zoo.sweep(LAYOUTS))
def test_distances_equal_a_loop_over_every_layout(name: str, tmp_path: Path) -> None:
    _, model = opened(name, tmp_path)
    for stats in collect(model, frozenset({"weights"}), None, Silent()):
        experts, count = stats.weights.experts, stats.layer.experts
        with torch.no_grad():
            found, flat = surrogate_distances(stats.weights, count)[0], vectorized_distances(stats.weights, count)[0]
        torch.testing.assert_close(found, naive_distances(naive_surrogates(experts, count)), rtol=1e-5, atol=1e-9)
        whole = [[m.flatten() for m in naive_matrices(experts, e) if m is not None] for e in range(count)]
        vectors = torch.stack([torch.cat(parts) for parts in whole])
        torch.testing.assert_close(flat, naive_distances(vectors), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_of_rows_give_the_same_distances(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = fake(5, 33, 17, dtype)
    whole = surrogate_distances(weights, 5)[0]
    torch.testing.assert_close(whole, naive_distances(naive_surrogates(weights.experts, 5)), rtol=1e-5, atol=0)
    monkeypatch.setattr(model_centric, "LEAST_BLOCK", 7 * 4 * 5 * 33)  # seven rows at a time, the last block of five
    weights.experts.parameters = list
    torch.testing.assert_close(surrogate_distances(weights, 5)[0], whole, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal_experts_are_exactly_zero_apart_and_close_ones_keep_their_digits(dtype: torch.dtype) -> None:
    weights = fake(6, 40, 24, dtype)
    for tensor in (weights.experts.gate_up_proj, weights.experts.down_proj):
        tensor[4] = tensor[1]
        tensor[5] = tensor[2]
    weights.experts.down_proj[5, 3, 7] *= 1.01  # one weight in a thousand differs by a hundredth
    flat = torch.cat([weights.experts.gate_up_proj.flatten(1), weights.experts.down_proj.flatten(1)], 1)
    surrogates = naive_surrogates(weights.experts, 6)
    cases = ((surrogate_distances, surrogates), (vectorized_distances, flat))
    for distances, naive in ((measure(weights, 6)[0], naive) for measure, naive in cases):
        expected = naive_distances(naive)
        assert distances[1, 4] == distances[4, 1] == 0
        assert 0 < distances[2, 5] < 1e-2 * distances[0, 1]
        torch.testing.assert_close(distances[2, 5], expected[2, 5], rtol=2e-3, atol=0)
        torch.testing.assert_close(distances, expected, rtol=1e-4, atol=1e-7)
        assert torch.equal(distances, distances.T)


@given(
    experts=st.integers(1, 6), values=st.integers(1, 40), seed=st.integers(0, 99),
    common=st.sampled_from([0.0, 1.0, 1e3]), scale=st.sampled_from([1e-6, 1.0, 1e6]),
)  # fmt: skip
def test_fast_distances_equal_a_loop(experts: int, values: int, seed: int, common: float, scale: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    features = scale * (common + torch.randn(experts, values, generator=generator))
    features[-1] = features[0]
    found = fast_squared_distances(features).sqrt()
    expected = naive_distances(features)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-7 * scale * common)
    assert found[0, -1] == 0


def test_fast_distances_refuse_what_is_not_finite() -> None:
    features = torch.zeros(3, 4)
    features[1, 2] = torch.nan
    with pytest.raises(CompressionError, match="features are not finite"):
        fast_squared_distances(features)
    with pytest.raises(CompressionError, match="too large for float32"):
        fast_squared_distances(torch.tensor([[1e30], [-1e30]]))


@pytest.mark.parametrize("merge", ["max", "frequency", "learned"])
def test_every_merge_plans_the_groups_of_a_uniform_one(merge: str, tmp_path: Path) -> None:
    made, uniform = (
        planned_layers("mixtral", tmp_path / name, "model-centric", merge=name) for name in (merge, "uniform")
    )
    for layer, other in zip(made, uniform, strict=True):
        assert members(layer.plan) == members(other.plan)
        for group in layer.plan.groups:
            assert sum(group.coefficients) == pytest.approx(1, abs=1e-9)
            if merge == "max":
                assert sorted(group.coefficients) == [0.0] * (len(group.members) - 1) + [1.0]
