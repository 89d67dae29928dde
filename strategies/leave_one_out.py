"""Leave-one-out: keep the experts whose deletion, with the router taking its next one, costs most over all tokens.

The cost of an expert is sum of ||y - y'||^2 over its tokens, y' the layer's output without it, as in the hooks of
NVIDIA's Model Optimizer. `razor` asks for its mean: how much an expert matters where it is used.
"""

from compressor.plugins import LayerPlan, LayerStatistics
from strategies.reap import keep_salient

NEEDS = frozenset({"squared_deletion_sum"})


def plan(stats: LayerStatistics, keep: int, protected: frozenset[int] = frozenset()) -> LayerPlan:
    """Keep the `keep` experts of highest cost; ties go to the lower expert, one that no token reached counts 0."""
    return keep_salient(stats, stats.squared_deletion_sum, keep, protected, "leave-one-out")
