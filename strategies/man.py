"""MAN: keep the experts of largest mean activation norm, the mean of ||f_e(x)|| over the tokens x routed to expert e.

Liu et al. 2026, arXiv:2606.15716: neither gate weights nor how often an expert is asked count.
"""

from compressor.plugins import LayerPlan, LayerStatistics
from strategies.reap import keep_salient, mean_over_routed

NEEDS = frozenset({"norm_sum", "routed_count"})


def plan(stats: LayerStatistics, keep: int, protected: frozenset[int] = frozenset()) -> LayerPlan:
    """Keep the `keep` experts of largest mean norm; ties go to the lower expert, one that no token reached counts 0."""
    return keep_salient(stats, mean_over_routed(stats.norm_sum, stats.routed_count), keep, protected, "man")
