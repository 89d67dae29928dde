"""Model-centric: group experts whose surrogate weights are close, then merge them
(arXiv:2407.09590, section 3.4)."""

from typing import Any, Literal

import torch

from compressor.plugins import (
    CLOSENESS,
    LayerPlan,
    LayerStatistics,
    LayerWeights,
    MergeOptions,
    closeness,
    competing,
    fast_squared_distances,
    group_experts,
    noise,
    projections,
)

NEEDS = frozenset({"weights"})
# bytes of surrogate rows of all experts held at once: this, or half of the layer
LEAST_BLOCK = 32 * 2**20


@torch.no_grad()
def surrogate_distances(weights: LayerWeights, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Frobenius distances [E, E] and norms [E] of the surrogates down (gate * up), [H, I] x [I, H].

    They are made in blocks of their columns. Where experts have no gate, the surrogate is down x
    up."""
    views = [projections(weights.experts, expert) for expert in range(count)]
    hidden_out = views[0].down.shape[0]
    hidden_in = views[0].up.shape[1]
    layer_bytes = sum(parameter.nbytes for parameter in weights.experts.parameters())
    width = max(1, min(hidden_in, max(LEAST_BLOCK, layer_bytes // 2) // (4 * count * hidden_out)))
    squared = torch.zeros(count, count, dtype=torch.float64)
    energies = torch.zeros(count, dtype=torch.float64)
    down = torch.empty(views[0].down.shape, device=views[0].down.device)  # one expert's, in float32
    for begin in range(0, hidden_in, width):
        columns = slice(begin, min(begin + width, hidden_in))
        block = torch.empty(count, hidden_out, columns.stop - begin, device=down.device)
        for expert, view in enumerate(views):
            inner = view.up[:, columns].float()
            if view.gate is not None:
                inner = inner * view.gate[:, columns]
            torch.mm(down.copy_(view.down), inner, out=block[expert])
        squared += fast_squared_distances(block.flatten(1)).cpu()
        energies += torch.linalg.vector_norm(block.flatten(1), dim=1).cpu().double().square()
        del block  # before the next one is made
    return squared.sqrt(), energies.sqrt()


@torch.no_grad()
def vectorized_distances(weights: LayerWeights, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Euclidean distances [E, E] of the experts' weights, all matrices laid end to end, and their
    sums of norms [E]."""
    experts = weights.experts
    squared = torch.zeros(count, count)
    norms = torch.zeros(count, dtype=torch.float64)
    for tensor in (
        experts.gate_up_proj if experts.has_gate else experts.up_proj,
        experts.down_proj,
    ):
        squared = squared + fast_squared_distances(tensor.detach().flatten(1)).cpu()
        norms += torch.tensor([float(matrix.float().norm()) for matrix in tensor])
    return squared.sqrt(), norms.float()


# by representation
MEASURES = {"surrogate": surrogate_distances, "vectorized": vectorized_distances}


class Options(MergeOptions):
    """Comparing and merging experts."""

    representation: Literal["surrogate", "vectorized"] = "surrogate"
    """Form in which weights are compared."""


def similarity(stats: LayerStatistics, options: Options) -> tuple[str, torch.Tensor]:
    """Similarity of the experts for a report: a label, and [E, E] from 0 to 1."""
    table, _ = MEASURES[options.representation](stats.weights, stats.layer.experts)
    return f"closeness of {options.representation} weights ({CLOSENESS})", closeness(table)


def merge_alike(
    stats: LayerStatistics,
    table: torch.Tensor,
    noise: Any,
    keep: int,
    alone: frozenset[int],
    options: MergeOptions,
    by: str,
) -> LayerPlan:
    """Group by equation 5 on these distances [E, E], which `by` names, and merge by equation 6."""
    grouping = group_experts(
        table, keep, seed=stats.seed, blocks=competing(stats.layer), alone=alone, noise=noise
    )
    figures = {"within_group_distance": round(grouping.objective, 6), "proved_best": grouping.exact}
    return options.merged(stats, grouping.groups, decided_by=by, figures=figures)


@torch.no_grad()
def plan(
    stats: LayerStatistics,
    keep: int,
    protected: frozenset[int] = frozenset(),
    options: Options = Options(),
) -> LayerPlan:
    """Group by equation 5 on distances of the experts' weights, merge by equation 6; protected
    experts stay alone."""
    table, norms = MEASURES[options.representation](stats.weights, stats.layer.experts)
    return merge_alike(
        stats, table, noise(norms), keep, protected, options, f"{options.representation} weights"
    )
