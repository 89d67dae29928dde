"""Data-centric: group experts with alike outputs on mixed calibration tokens, then merge them (arXiv:2407.09590)."""

from dataclasses import dataclass

import torch

from compressor.calibration.statistics import LayerStatistics
from compressor.errors import CompressionError
from compressor.grouping.choose import merge_groups, merge_needs, routing_blocks
from compressor.grouping.partition import group_experts
from compressor.grouping.similarity import linear_cka, mean_output_distances, mean_output_noise, rbf_cka
from compressor.plans.plan import LayerPlan
from compressor.ties import SQUARED

NEEDS = frozenset({"mixed_outputs"})
SIMILARITIES = ("linear-cka", "rbf-cka", "mean-output")


@dataclass(frozen=True, slots=True)
class Options:
    """How experts are compared and merged; `mix_tokens` augments the tokens by random mixtures."""

    similarity: str = "linear-cka"
    mix_tokens: bool = True
    merge: str = "uniform"
    merge_routers: bool = True
    align: bool = False

    def __post_init__(self) -> None:
        if self.similarity not in SIMILARITIES:
            raise CompressionError(f"there is no similarity {self.similarity!r}; known are {', '.join(SIMILARITIES)}")
        merge_needs(self.merge, self.merge_routers)


def needs(options: Options) -> frozenset[str]:
    """Outputs of all experts, on mixtures or on the tokens themselves, and what the merging needs."""
    outputs = frozenset({"mixed_outputs" if options.mix_tokens else "expert_outputs"})
    return outputs | merge_needs(options.merge, options.merge_routers)


def distances(outputs: torch.Tensor, similarity: str) -> torch.Tensor:
    """Distances of experts by their outputs: [E, S, H] -> [E, E]; 1 - CKA, or between mean outputs.

    An expert layer that no calibration token reached has no outputs; all its experts count as equally far apart.
    """
    if outputs.shape[1] == 0:
        return 1 - torch.eye(len(outputs), dtype=torch.float64)
    if similarity == "mean-output":
        return mean_output_distances(outputs)
    return 1 - (linear_cka if similarity == "linear-cka" else rbf_cka)(outputs)


@torch.no_grad()
def plan(
    stats: LayerStatistics, keep: int, protected: frozenset[int] = frozenset(), options: Options | None = None
) -> LayerPlan:
    """Group by equation 5 on distances of the experts' outputs, merge by equation 6; protected experts stay alone."""
    options = options or Options()
    outputs = stats.mixed_outputs if options.mix_tokens else stats.expert_outputs
    table = distances(outputs, options.similarity).clamp(min=0).cpu()
    noise = mean_output_noise(outputs).cpu() if options.similarity == "mean-output" else SQUARED
    grouping = group_experts(table, keep, seed=stats.seed, blocks=routing_blocks(stats), alone=protected, noise=noise)
    figures = {"within_group_distance": round(grouping.objective, 6), "proved_best": grouping.exact}
    return merge_groups(
        stats,
        grouping.groups,
        options.merge,
        options.merge_routers,
        options.align,
        decided_by=options.similarity,
        figures=figures,
    )
