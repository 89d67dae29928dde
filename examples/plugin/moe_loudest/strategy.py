"""Loudest: keep the experts whose outputs are largest on average."""

from pydantic import Field
from torch import Tensor

from compressor.plugins import LayerPlan, LayerStatistics, NamedOptions, keep_best

NEEDS = frozenset({"norm_sum", "routed_count"})


class Options(NamedOptions):
    """How much the number of routed tokens counts."""

    count_power: float = Field(0.0, ge=0)
    """Power of the routed tokens by which the mean norm is multiplied."""


def loudness(norm_sum: Tensor, routed_count: Tensor, count_power: float) -> Tensor:
    """Mean norm times a power of the routed tokens: [E], [E] -> [E]; 0 for an expert that no token reached."""
    return norm_sum / routed_count.clamp(min=1) * routed_count**count_power


def plan(
    stats: LayerStatistics,
    keep: int,
    protected: frozenset[int] = frozenset(),
    options: Options = Options(),
) -> LayerPlan:
    """Keep the `keep` loudest experts; ties go to the lower expert."""
    scores = loudness(stats.norm_sum, stats.routed_count, options.count_power)
    return keep_best(stats, scores, keep, protected, decided_by="mean norm")


def similarity(stats: LayerStatistics, options: Options) -> tuple[str, Tensor]:
    """The quieter of two experts' loudness over the louder's: a label and [E, E]."""
    scores = loudness(stats.norm_sum, stats.routed_count, options.count_power).clamp(min=1e-12)
    ratios = scores[:, None] / scores
    return "ratio of mean norms", ratios.minimum(ratios.T)
