"""REAP: keep the experts with the largest mean gated output (Lasby et al. 2026, arXiv:2510.13999).

With gate weight g_e(x) and output f_e(x) of expert e, and its routed tokens x in X_e, the saliencies are
reap: mean of g_e(x) ||f_e(x)||; frequency: |X_e| (He et al. 2024, arXiv:2406.02500); ean, the expert activation norm:
sum of ||f_e(x)|| (Jaiswal et al. 2025, arXiv:2504.05586).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from compressor.plugins import CompressionError, LayerPlan, LayerStatistics, keep_best, kept_share, option

NEEDS = frozenset({"gated_norm_sum", "routed_count"})

SALIENCIES: Mapping[str, tuple[str, bool]] = {  # the statistic, and whether it is averaged over the routed tokens
    "reap": ("gated_norm_sum", True),
    "frequency": ("routed_count", False),
    "ean": ("norm_sum", False),
}


@dataclass(frozen=True, slots=True)
class Options:
    """By what experts are ranked."""

    saliency: str = option(
        "reap",
        help="by what experts are ranked: reap, frequency or ean",
        choices=SALIENCIES,
    )


def needs(options: Options) -> frozenset[str]:
    """The saliency's sum, and the counts of routed tokens where it is a mean."""
    statistic, averaged = SALIENCIES[options.saliency]
    return frozenset({statistic, "routed_count"} if averaged else {statistic})


def mean_over_routed(sums: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Sums over their routed tokens by the numbers of those: [E], [E] -> [E]; 0 for an expert no token reached."""
    reached = counts > 0  # counts of weighted calibration sources may lie between 0 and 1
    return torch.where(reached, sums / counts.where(reached, 1), 0)


def keep_salient(
    stats: LayerStatistics, saliency: torch.Tensor, keep: int, protected: frozenset[int], decided_by: str
) -> LayerPlan:
    """Keep the experts of highest saliency [E], and note what share of the layer's total they hold."""
    if wrong := (~saliency.isfinite()).nonzero().flatten().tolist():
        raise CompressionError(
            f"{stats.layer.name}: the outputs of expert {wrong[0]} are not finite on the calibration data; "
            "try --dtype float32"
        )
    kept = keep_best(stats, saliency, keep, protected, decided_by=decided_by)
    return replace(kept, figures={"kept_share_of_saliency": kept_share(kept, saliency)})


def plan(
    stats: LayerStatistics, keep: int, protected: frozenset[int] = frozenset(), options: Options = Options()
) -> LayerPlan:
    """Keep the `keep` most salient experts; ties go to the lower expert, one that no token reached counts 0."""
    statistic, averaged = SALIENCIES[options.saliency]
    sums = getattr(stats, statistic)
    saliency = mean_over_routed(sums, stats.routed_count) if averaged else sums
    return keep_salient(stats, saliency, keep, protected, options.saliency)
