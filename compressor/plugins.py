"""Public API for authors of plugins: everything imported here, and nothing else need be.

A step of a recipe is a class of options that derives from `StepOptions`, with behaviour that
derives from `Step`; a strategy is a module with `NEEDS` and `plan(stats, keep, protected[,
options])`, an exporter one with `export(checkpoint, output, options, progress)`. Entry points
announce them. docs/plugins.md has the contract, and the built-in strategies are written with this.

A strategy is tested on a fake layer, without a model and calibration data:

    def test_my_strategy() -> None:
        check_strategy(my_strategy)
        assert my_strategy.plan(fake_statistics(experts=8), keep=4).dropped == (1, 2, 5, 7)
"""

import dataclasses
import functools
import inspect
import typing

import torch

from compressor.data.sources import TextPart
from compressor.devices import as_float64, float64_device
from compressor.errors import CompressionError
from compressor.model.experts import Projections, apply_expert, expert_parameters, projections
from compressor.model.moe_layer import MoeLayer
from compressor.options import NamedOptions
from compressor.progress import Progress
from compressor.recipe.plan import ExpertPlan, Group, LayerPlan
from compressor.recipe.registry import Strategy, load_strategy
from compressor.recipe.step import StepOptions
from compressor.statistics.meters import LayerWeights, RouterArguments
from compressor.statistics.statistics import RECONSTRUCTION, LayerStatistics
from compressor.steps.job import OutputSize, copy_job, make_job, rewritten, rewritten_size
from compressor.steps.prune.partition import agglomerate, group_experts
from compressor.steps.prune.reconstruction import (
    KeptErrors,
    Routed,
    original,
    reconstruct,
    relative_error,
)
from compressor.steps.prune.selection import (
    Block,
    MergeMethod,
    MergeOptions,
    blocks_of,
    competing,
    keep_best,
    kept_share,
    merge_groups,
    merge_needs,
)
from compressor.steps.prune.similarity import (
    CLOSENESS,
    closeness,
    fast_squared_distances,
    linear_cka,
    mean_output_distances,
    noise,
    pairwise_distances,
    rbf_cka,
)
from compressor.steps.section import Section
from compressor.steps.step import Requirements, Result, State, Step
from compressor.steps.tensors import OutputJob
from compressor.tolerance import FLOAT32, ROUNDING, SQUARED, exceeds, rounded, stable_argmin


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
    """Return every statistic of a stock layer with random weights on random tokens; the same for
    the same arguments.

    They are collected as calibration does; only the effect on later routers is made up. With no
    `tokens` sums are zero and samples empty. Of each of the `routing_groups` equally many experts
    have to stay."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    from compressor.data.batches import sample_positions
    from compressor.model.architecture import discover
    from compressor.statistics.statistics import ALL, Collector, smaller_routers

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
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: typing.Any = Qwen3MoeForCausalLM(config).float().eval()
        model.set_experts_implementation("eager")  # the others do not take every width
        architecture = discover(config)
        layer = dataclasses.replace(
            architecture.layers[0], routing_groups=routing_groups, chosen_groups=routing_groups
        )

        routers = functools.partial(smaller_routers(architecture), layer)

        collector = Collector(layer, model, ALL, seed, routers)
        if tokens:
            collector.observe(torch.zeros(1, tokens), sample_positions(tokens, sampled, seed))
            with torch.no_grad():
                model.get_submodule(layer.block)(torch.randn(1, tokens, hidden))
        stats = collector.finish()
        return stats.adding(rank_change=torch.rand(experts) * stats.routed_count / max(tokens, 1))


def check_strategy(
    module: typing.Any, settings: typing.Mapping[str, typing.Any] | None = None, name: str = ""
) -> None:
    """Hold a strategy's module to the contract, with these settings of its options; raises
    `CompressionError`.

    On layers with and without routing groups and tokens it must plan as many experts as it is asked
    to, leave protected ones as they are, read no statistic but those it needs, write to none, and
    plan alike twice, whatever the state of torch's random generator. Its similarity, if it has one,
    must be a label and a finite matrix [E, E]."""
    from compressor.recipe.plan import touched
    from compressor.recipe.registry import strategy_of

    strategy = strategy_of(
        module, name or getattr(module, "__name__", "strategy").rpartition(".")[2], settings
    )
    who = f"strategy {strategy.name!r}"

    def only(stats: LayerStatistics, needs: frozenset[str]) -> LayerStatistics:
        return dataclasses.replace(
            stats, values={name: stats.values[name] for name in stats.values.keys() & needs}
        )

    for groups, tokens in ((1, 64), (1, 0), (2, 64), (2, 0)):
        full = fake_statistics(routing_groups=groups, tokens=tokens)
        before = {
            name: value.clone()
            for name, value in full.values.items()
            if isinstance(value, torch.Tensor)
        }
        stats = only(full, strategy.needs)
        for keep in (4, 6, 8):
            for protected in (frozenset[int](), frozenset({1, 7})):
                plans = list[LayerPlan]()
                for seed in range(2):
                    with torch.random.fork_rng(devices=[]):
                        torch.manual_seed(seed)
                        plans.append(strategy.plan_layer(stats, keep, protected))
                if plans[0] != plans[1]:
                    raise CompressionError(
                        f"{who} plans the same layer in two ways; draw from a torch.Generator "
                        "with stats.seed"
                    )
                if strategy.score is not None:
                    # of a single source, so the plan is the same
                    alone = dataclasses.replace(stats, sources=(stats,))
                    balanced = strategy.balancing("worst").plan_layer(alone, keep, protected)
                    if balanced.groups != plans[0].groups:
                        raise CompressionError(
                            f"{who} does not keep experts by its score(); return what plan() "
                            "ranks by"
                        )
                changed = touched(plans[0], protected)
                if changed:
                    raise CompressionError(f"{who} does not keep protected expert {changed[0]}")
        for name, value in before.items():
            if not torch.equal(value, full.values[name]):
                raise CompressionError(
                    f"{who} changed the statistic {name!r}; clone() it before writing to it"
                )
        if strategy.similarity is not None and tokens:
            label, table = strategy.similarity(
                only(full, strategy.similarity_needs), strategy.options
            )
            if (
                not isinstance(label, str)
                or table.shape != (8, 8)
                or not bool(table.isfinite().all())
            ):
                raise CompressionError(
                    f"{who}: similarity should return a label and a matrix [8, 8]"
                )


__all__ = [
    name
    for name, value in globals().items()
    if not (name.startswith("_") or inspect.ismodule(value))
]
