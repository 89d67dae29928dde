"""Measure the strategy `enumerate` on synthetic layers of 512 sampled tokens; every ratio is within one run.

    python -m scripts.benchmarks.enumerate [--subsets-only]

Prints: running the smaller layer's router and experts once for each of the 70 subsets of 8 experts to 4, over the
cached evaluation; seconds for a layer of 64 experts to 32 and of 128 experts to 64, top-8, hidden 1024, with a router
that normalises the chosen shares and with one that does not, so that every token is routed anew for every set.
"""

from functools import partial
from itertools import combinations

import torch

from compressor.model.architecture import discover
from compressor.model.experts import apply_expert, expert_parameters
from compressor.statistics.statistics import RECONSTRUCTION, Collector, LayerStatistics, smaller_routers
from compressor.steps.prune.reconstruction import SmallerRouter
from scripts.benchmarks.frame import options, qwen3_moe, random_model, timed
from strategies.enumerate_subsets import plan

HIDDEN, TOKENS, VOCABULARY = 1024, 512, 1000


def synthetic(experts: int, top_k: int, intermediate: int, normalised: bool = True) -> LayerStatistics:
    """Statistics of the only layer of a Qwen3-MoE with random weights, on random tokens."""
    more = {"num_attention_heads": 8, "norm_topk_prob": normalised, "initializer_range": 0.05}
    config = qwen3_moe(HIDDEN, intermediate, 1, experts, top_k, VOCABULARY, **more)
    model = random_model(config)
    architecture = discover(config)
    (layer,) = architecture.layers
    collector = Collector(layer, model, RECONSTRUCTION, 0, partial(smaller_routers(architecture), layer))
    collector.enter(TOKENS, torch.arange(TOKENS))
    with torch.no_grad():
        model(torch.randint(VOCABULARY, (1, TOKENS)))
    return collector.finish()


@torch.no_grad()
def dense_outputs(stats: LayerStatistics) -> torch.Tensor:
    """Every expert's output on every token, as the statistics compute it once."""
    experts = stats.weights.experts
    parameters = (expert_parameters(experts, expert) for expert in range(stats.layer.experts))
    return torch.stack([apply_expert(experts, own, stats.inputs) for own in parameters])


@torch.no_grad()
def run_every_subset(stats: LayerStatistics, keep: int) -> tuple[int, ...]:
    """The best subset, running router and experts once per subset."""
    router, target = SmallerRouter(stats), stats.weights.experts(stats.inputs, stats.top_k_index, stats.top_k_weights)

    def error(kept: tuple[int, ...]) -> float:
        weights, slots = router.kept(kept)
        return float((stats.weights.experts(stats.inputs, torch.tensor(kept)[slots], weights) - target).square().sum())

    return min(combinations(range(stats.layer.experts), keep), key=error)


def main() -> None:
    """Print the figures."""
    given = options(__doc__, subsets_only=False).parse_args()
    stats = synthetic(8, 2, 2048)
    plan(stats, 4)  # the first call builds the smaller router
    once, _ = timed(lambda: dense_outputs(stats))
    cached, made = timed(lambda: plan(stats, 4))
    plain, best = timed(lambda: run_every_subset(stats, 4))
    same = best == tuple(group.members[0] for group in made.groups)
    print(f"8 experts to 4, all 70 subsets: outputs once {once:.2f} s, search {cached:.2f} s; ", end="")
    print(f"running the layer once per subset {plain:.2f} s, {'the same' if same else 'another'} subset;", end=" ")
    print(f"{plain / cached:.0f} times as long as the search, {plain / (once + cached):.0f} times as long as both")
    if given.subsets_only:
        return
    for experts, keep, normalised in ((64, 32, True), (128, 64, True), (64, 32, False), (128, 64, False)):
        stats = synthetic(experts, 8, 128, normalised)
        seconds, made = timed(lambda stats=stats, keep=keep: plan(stats, keep))
        router = "normalised" if normalised else "not normalised"
        print(f"{experts} experts to {keep}, top-8, {router}: {seconds:.1f} s, {dict(made.figures)}", flush=True)


if __name__ == "__main__":
    main()
