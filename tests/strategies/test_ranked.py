"""Strategies that rank experts by one score: scores by loops over a plain forward's tokens, or over weights.

How many stay of each routing group, and that protected ones do, is `keep_best`'s (tests/compressor/steps/prune).
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from compressor.errors import CompressionError
from compressor.model.moe_layer import MoeLayer
from compressor.recipe.registry import load_strategy
from compressor.statistics.statistics import LayerStatistics
from strategies.ranked import Aimer, Ranked, count_guided, ean, gated_mass, reap, size_ratios
from tests.support import zoo
from tests.support.opened_models import Calls, one_expert
from tests.support.plans import kept
from tests.support.strategy_runs import layer_statistics, planned_layers

NAMES = ("reap", "ean", "gated-mass", "count-guided", "man", "msan")
SUMS: dict[str, list[float]] = {  # of three experts that are like no other, two alike and one that no token reached
    "routed_count": [4, 0, 1, 2, 3, 2],
    "norm_sum": [8, 0, 5, 6, 3, 6],
    "squared_norm_sum": [20, 0, 25, 18, 99, 18],
    "gated_norm_sum": [2, 0, 2, 3, 1.5, 3],
}


def stats(sums: dict[str, list[float]] = SUMS) -> LayerStatistics:
    return layer_statistics(sums, experts=6)


def naive_scores(experts: Any, layer: MoeLayer, calls: Calls) -> dict[str, list[float]]:
    """Each saliency of each expert, over lists of its visits: (gate weight, output norm) one by one."""
    visits: list[list[tuple[float, float]]] = [[] for _ in range(layer.experts)]
    if not calls.experts_arguments:
        return dict.fromkeys(NAMES, [0.0] * layer.experts)
    hidden, index, weights = calls.joined()
    for expert, seen in enumerate(visits):
        norms = one_expert(experts, expert, hidden).double().norm(dim=-1)
        for token, place in (index == expert).nonzero().tolist():
            seen.append((float(weights[token, place]), float(norms[token])))
    sums = {
        "count-guided": [float(len(seen)) for seen in visits],
        "ean": [sum(norm for _, norm in seen) for seen in visits],
        "msan": [sum(norm * norm for _, norm in seen) for seen in visits],
        "gated-mass": [sum(gate * norm for gate, norm in seen) for seen in visits],
    }
    means = {
        name: [total / max(1, len(seen)) for total, seen in zip(sums[source], visits, strict=True)]
        for name, source in (("reap", "gated-mass"), ("man", "ean"), ("msan", "msan"))
    }
    return {**sums, **means}


@pytest.mark.parametrize("saliency", NAMES)
@pytest.mark.parametrize("name", ["gpt_oss", "deepseek_v3", zoo.full("mixtral"), zoo.full("ernie4_5_vl_moe")])
def test_a_whole_model_against_a_loop_over_its_tokens(name: str, saliency: str, tmp_path: Path) -> None:
    """Protected experts are kept first, then by score, then by number; equally many of each routing group."""
    protected: int | None = 5
    for made in planned_layers(name, tmp_path, saliency, protect=protected):
        scores = naive_scores(made.experts, made.layer, made.calls)[saliency]
        expected = list[int]()
        for block in made.blocks():
            best = sorted(block, key=lambda e: (e != protected, -scores[e], e))
            expected += best[: 4 // made.layer.routing_groups]
        assert kept(made.plan) == sorted(expected)
        share = sum(scores[expert] for expert in expected) / (sum(scores) or 1)
        assert next(iter(made.plan.figures.values())) == pytest.approx(share, abs=2e-6)
        decided = {"gated-mass": "gated_norm_sum", "count-guided": "routed_count"}.get(saliency, saliency)
        assert made.plan.decided_by == decided
        protected = None  # in the first layer alone


@pytest.mark.parametrize("strategy", [reap, count_guided, ean])
def test_unreached_experts_go_first_and_unreached_layers_keep_the_lowest(strategy: Ranked) -> None:
    assert kept(strategy.plan(stats(), 5)) == [0, 2, 3, 4, 5]
    silent = strategy.plan(stats({key: [0.0] * 6 for key in SUMS}), 3)
    assert kept(silent) == [0, 1, 2]
    assert silent.figures == {strategy.share: 0.0}


def test_outputs_that_are_not_finite_are_refused() -> None:
    overflowed = {**SUMS, "gated_norm_sum": [2, 0, float("inf"), 3, 1, 3]}
    for strategy in (reap.plan, gated_mass.plan):
        with pytest.raises(CompressionError, match=r"mlp\.experts: the outputs of expert 2 are not finite .*float32"):
            strategy(stats(overflowed), 3)


def test_needs_are_what_the_saliency_reads() -> None:
    for name, needs in (("ean", {"norm_sum"}), ("gated-mass", {"gated_norm_sum"}), ("count-guided", {"routed_count"})):
        assert load_strategy(name).needs == needs


def weighted(vectors: Tensor) -> LayerStatistics:
    """Experts of one neuron whose gate, up and down projections are thirds of these vectors: [E, 3H]."""
    gate, up, down = vectors.chunk(3, dim=1)
    fused = torch.stack([gate, up], dim=1)
    flags = {"has_gate": True, "is_transposed": False, "is_concatenated": True}
    experts = SimpleNamespace(**flags, gate_up_proj=fused, down_proj=down.unsqueeze(2))
    return layer_statistics({"weights": SimpleNamespace(experts=experts)}, experts=len(vectors))


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "deepseek_v3", "nemotron_h"])
def test_aimer_on_a_whole_model_against_numpy(name: str, tmp_path: Path) -> None:
    """All matrices of an expert end to end, biases left out: the order of weights does not matter to the ratio."""
    strategy = load_strategy("aimer")
    assert strategy.needs == {"weights"} and strategy.options is None
    for made in planned_layers(name, tmp_path, "aimer"):
        matrices = [value for key, value in made.experts.named_parameters() if not key.endswith("bias")]
        ratios = []
        for expert in range(8):
            flat = np.concatenate([matrix[expert].detach().double().numpy().ravel() for matrix in matrices])
            ratios.append(np.abs(flat).mean() / np.sqrt(np.square(flat).mean()))
        lowest = list[int]()
        for block in made.blocks():
            lowest += sorted(block, key=ratios.__getitem__)[: 4 // len(made.blocks())]
        assert kept(made.plan) == sorted(lowest)
        ends = {"least_ratio": min(ratios), "largest_ratio": max(ratios)}
        assert made.plan.figures == {key: pytest.approx(value, abs=2e-6) for key, value in ends.items()}


@given(seed=st.integers(0, 1000), power=st.integers(-40, 40), keep=st.integers(2, 5))
def test_scale_and_order_do_not_count(seed: int, power: int, keep: int) -> None:
    vectors = torch.randn(5, 12, generator=torch.Generator().manual_seed(seed)).double()
    made = Aimer.plan(weighted(vectors), keep)
    scale = 2.0 ** (power * torch.arange(5)[:, None].double() / 5).round()
    assert kept(Aimer.plan(weighted(vectors.flip(1).neg() * scale), keep)) == kept(made)


def test_even_weights_and_none_have_the_ratio_1() -> None:
    vectors = torch.zeros(4, 30_000, dtype=torch.bfloat16)
    vectors[0] = torch.randn(30_000, generator=torch.Generator().manual_seed(0)) * 0.02
    vectors[1] = -3.0
    ratios = size_ratios(weighted(vectors).weights, 4)
    assert float(ratios[0]) == pytest.approx((2 / np.pi) ** 0.5, abs=0.01)
    assert ratios[1:].tolist() == [1, 1, 1]
