"""A fake layer to test a strategy on, and a check of the contract: neither a model nor calibration data is needed.

    from compressor.plugins.testing import check_strategy, fake_statistics

    def test_my_strategy() -> None:
        check_strategy(my_strategy)
        assert my_strategy.plan(fake_statistics(experts=8), keep=4).dropped == (1, 2, 5, 7)

The layer is that of a stock model with random weights, observed as calibration observes it, so that all statistics
agree: routed tokens sum to tokens times top-k. Only the effect on later routers is made up, for there are none.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from compressor.data.batches import sample_positions
from compressor.errors import CompressionError
from compressor.model.architecture import Architecture, discover
from compressor.recipe.plan import LayerPlan, touched
from compressor.recipe.registry import strategy_of
from compressor.statistics.statistics import ALL, RECONSTRUCTION, Collector, LayerStatistics, smaller_routers


def fake_statistics(
    experts: int = 8,
    top_k: int = 2,
    hidden: int = 16,
    intermediate: int = 12,
    tokens: int = 64,
    sampled: int = 32,
    routing_groups: int = 1,
    seed: int = 0,
) -> LayerStatistics:
    """Every statistic of a layer with random experts, on random tokens; the same for the same arguments.

    With no `tokens` sums are zero and samples empty. Of each of the `routing_groups` equally many experts have to stay.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        architecture, model = _model(experts, top_k, hidden, intermediate)
        (layer,) = architecture.layers
        layer = replace(layer, routing_groups=routing_groups, chosen_groups=routing_groups)

        def observed(needs: frozenset[str]) -> Collector:
            collector = Collector(layer, model, needs, seed)
            if tokens:
                collector.enter(tokens, sample_positions(tokens, sampled, seed))
                with torch.no_grad():
                    model.get_submodule(layer.block)(torch.randn(1, tokens, hidden))
                collector.detach()
            return collector

        routers = partial(smaller_routers(architecture), layer)
        heldout = observed(RECONSTRUCTION).finish(routers)
        stats = observed(ALL).finish(routers, heldout)
        return stats.adding(rank_change=torch.rand(experts) * stats.routed_count / max(tokens, 1))


def _model(experts: int, top_k: int, hidden: int, intermediate: int) -> tuple[Architecture, Any]:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        hidden_size=hidden,
        moe_intermediate_size=intermediate,
        num_experts=experts,
        num_experts_per_tok=top_k,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=8,
        vocab_size=16,
        initializer_range=0.2,
        norm_topk_prob=True,
        architectures=["Qwen3MoeForCausalLM"],
    )
    model = Qwen3MoeForCausalLM(config).float().eval()
    model.set_experts_implementation("eager")  # the others do not take every width
    return discover(config), model


def check_strategy(module: Any, settings: Mapping[str, Any] | None = None, name: str = "") -> None:
    """Hold a strategy's module to the contract, with these settings of its options; raises `CompressionError`.

    On layers with and without routing groups and tokens it must plan as many experts as it is asked to, leave protected
    ones as they are, read no statistic but those it needs, write to none, and plan alike twice, whatever the state of
    torch's random generator. Its likeness, if it has one, must be a label and a finite matrix [E, E].
    """
    strategy = strategy_of(module, name or getattr(module, "__name__", "strategy").rpartition(".")[2], settings)
    for groups, tokens in product((1, 2), (64, 0)):
        full = fake_statistics(routing_groups=groups, tokens=tokens)
        stats = replace(full, values={name: value for name, value in full.values.items() if name in strategy.needs})
        before = _contents(full)
        for keep, protected in product((4, 6, 8), (frozenset[int](), frozenset({1, 7}))):
            plans = list[LayerPlan]()
            for seed in range(2):
                with torch.random.fork_rng(devices=[]):
                    torch.manual_seed(seed)
                    plans.append(strategy.plan_layer(stats, keep, protected))
            if plans[0] != plans[1]:
                remedy = "draw from a torch.Generator with stats.seed"
                raise CompressionError(f"strategy {strategy.name!r} plans the same layer in two ways; {remedy}")
            if changed := touched(plans[0], protected):
                raise CompressionError(f"strategy {strategy.name!r} does not keep protected expert {changed[0]}")
        if strategy.likeness is not None and tokens:
            values = {name: value for name, value in full.values.items() if name in strategy.likeness_needs}
            label, table = strategy.likeness(replace(full, values=values), strategy.options)
            experts = full.layer.experts
            if not isinstance(label, str) or table.shape != (experts, experts) or not bool(table.isfinite().all()):
                wanted = f"a label and a matrix [{experts}, {experts}]"
                raise CompressionError(f"strategy {strategy.name!r}: likeness should return {wanted}")
        if any(not torch.equal(one, other) for one, other in zip(before, _contents(full), strict=True)):
            raise CompressionError(f"strategy {strategy.name!r} changed the layer; it is only to be read")


def _contents(stats: LayerStatistics) -> list[Tensor]:
    values = [stats.values[name] for name in sorted(stats.values)]
    tensors = [value for value in values if isinstance(value, Tensor)]
    return [tensor.clone() for tensor in (*tensors, *stats.weights.block.state_dict().values())]
