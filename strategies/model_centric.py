"""Model-centric: group experts whose surrogate weights are close, then merge them (arXiv:2407.09590, section 3.4)."""

from dataclasses import dataclass

import torch

from compressor.plugins import (
    CLOSENESS,
    CompressionError,
    LayerPlan,
    LayerStatistics,
    LayerWeights,
    closeness,
    fast_squared_distances,
    group_experts,
    merge_groups,
    merge_needs,
    noise,
    option,
    projections,
    routing_blocks,
)

NEEDS = frozenset({"weights"})
REPRESENTATIONS = ("surrogate", "vectorized")
LEAST_BLOCK = 32 * 2**20  # bytes of surrogate rows of all experts held at once: this, or half of the layer


@dataclass(frozen=True, slots=True)
class Options:
    """How experts are compared and merged."""

    representation: str = option("surrogate", help="of the weights that are compared: surrogate or vectorized")
    merge: str = option("uniform", help="how a group becomes one expert: uniform, max, frequency or learned")
    merge_routers: bool = option(True, help="whether router rows are merged alike, or the leading expert's stays")
    align: bool = option(False, help="whether neurons are first put in the order of the leading expert's")

    def __post_init__(self) -> None:
        if self.representation not in REPRESENTATIONS:
            raise CompressionError(
                f"there is no representation {self.representation!r}; known are {', '.join(REPRESENTATIONS)}"
            )
        merge_needs(self.merge, self.merge_routers)


def needs(options: Options) -> frozenset[str]:
    """Weights, and what the merging needs."""
    return NEEDS | merge_needs(options.merge, options.merge_routers)


def likeness_needs(options: Options) -> frozenset[str]:
    """The weights alone."""
    return NEEDS


@torch.no_grad()
def surrogate_distances(weights: LayerWeights, count: int) -> torch.Tensor:
    """Frobenius distances [E, E] of the surrogates down (gate * up), [H, I] x [I, H], in blocks of their columns.

    Where experts have no gate, the surrogate is down x up.
    """
    return _surrogates(weights, count)[0]


def _surrogates(weights: LayerWeights, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Distances [E, E] and norms [E] of the surrogates."""
    views = [projections(weights.experts, expert) for expert in range(count)]
    hidden_out, hidden_in = views[0].down.shape[0], views[0].up.shape[1]
    layer_bytes = sum(parameter.nbytes for parameter in weights.experts.parameters())
    width = max(1, min(hidden_in, max(LEAST_BLOCK, layer_bytes // 2) // (4 * count * hidden_out)))
    squared, energies = torch.zeros(count, count, dtype=torch.float64), torch.zeros(count, dtype=torch.float64)
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
        energies += torch.linalg.vector_norm(block.flatten(1), dim=1).double().square().cpu()
        del block  # before the next one is made
    return squared.sqrt(), energies.sqrt()


def _fused(weights: LayerWeights) -> tuple[torch.Tensor, torch.Tensor]:
    """The two parameters that hold all experts' matrices."""
    experts = weights.experts
    return experts.gate_up_proj if experts.has_gate else experts.up_proj, experts.down_proj


@torch.no_grad()
def vectorized_distances(weights: LayerWeights, count: int) -> torch.Tensor:
    """Euclidean distances [E, E] of the experts' weights, all matrices laid end to end."""
    squared = [fast_squared_distances(tensor.detach().flatten(1)).cpu() for tensor in _fused(weights)]
    return (squared[0] + squared[1]).sqrt()


def distances(stats: LayerStatistics, options: Options) -> torch.Tensor:
    """Distances [E, E] of the experts in the representation that the options name."""
    measure = surrogate_distances if options.representation == "surrogate" else vectorized_distances
    return measure(stats.weights, stats.layer.experts)


def likeness(stats: LayerStatistics, options: Options) -> tuple[str, torch.Tensor]:
    """How alike the experts are, for a report: a label, and [E, E] from 0 to 1."""
    return f"closeness of {options.representation} weights ({CLOSENESS})", closeness(distances(stats, options))


@torch.no_grad()
def plan(
    stats: LayerStatistics, keep: int, protected: frozenset[int] = frozenset(), options: Options | None = None
) -> LayerPlan:
    """Group by equation 5 on distances of the experts' weights, merge by equation 6; protected experts stay alone."""
    options = options or Options()
    if options.representation == "surrogate":
        table, norms = _surrogates(stats.weights, stats.layer.experts)
    else:
        table = vectorized_distances(stats.weights, stats.layer.experts)
        pairs = zip(*_fused(stats.weights), strict=True)
        norms = torch.tensor([sum(float(part.float().norm()) for part in pair) for pair in pairs])
    grouping = group_experts(
        table, keep, seed=stats.seed, blocks=routing_blocks(stats), alone=protected, noise=noise(norms)
    )
    figures = {"within_group_distance": round(grouping.objective, 6), "proved_best": grouping.exact}
    return merge_groups(
        stats,
        grouping.groups,
        options.merge,
        options.merge_routers,
        options.align,
        decided_by=f"{options.representation} weights",
        figures=figures,
    )
