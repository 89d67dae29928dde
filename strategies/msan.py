"""MSAN: keep the experts of largest mean squared activation norm, the mean of ||f_e(x)||^2 over the routed tokens x.

Liu et al. 2026, arXiv:2606.15716, as `man`; a few large outputs count more.
"""

from compressor.plugins import LayerPlan, LayerStatistics
from strategies.reap import keep_salient, mean_over_routed

NEEDS = frozenset({"squared_norm_sum", "routed_count"})


def plan(stats: LayerStatistics, keep: int, protected: frozenset[int] = frozenset()) -> LayerPlan:
    """Keep the `keep` experts of largest mean square; ties go to the lower expert, one no token reached counts 0."""
    return keep_salient(stats, mean_over_routed(stats.squared_norm_sum, stats.routed_count), keep, protected, "msan")
