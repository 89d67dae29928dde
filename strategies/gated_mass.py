"""Gated mass: keep the experts whose gated outputs are largest in sum over all tokens.

The mass of expert e is the sum over its routed tokens of gate weight times ||output||, a bound on how far the layer's
outputs move in total if e contributed nothing. REAP (Lasby et al. 2026, arXiv:2510.13999) ranks by the mean of the
same terms, mass / visits. The mean asks how much an expert matters where it is used, so that a rare specialist may
stay; the mass multiplies that by how often it is used, and weighs every calibration token alike.
"""

from compressor.plugins import LayerPlan, LayerStatistics
from strategies.reap import keep_salient

NEEDS = frozenset({"gated_norm_sum"})


def plan(stats: LayerStatistics, keep: int, protected: frozenset[int] = frozenset()) -> LayerPlan:
    """Keep the `keep` experts of largest mass; ties go to the lower expert, one that no token reached counts 0."""
    return keep_salient(stats, stats.gated_norm_sum, keep, protected, "gated_norm_sum")
