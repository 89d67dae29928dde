"""RAZOR: keep the experts whose deletion moves the layer's output most where they are used.

Song and Zheng 2026, arXiv:2609.30465 (RCS-Refill). With c the mixture of a token's experts, of weights w that sum to 1
and a scale s, and r_j = f_j - c expert j's residual to that consensus, deleting expert i, in whose place the router
takes its next expert n, moves the output by exactly s ||w_i r_i - w_n r_n|| / (1 - w_i + w_n); by ||g_i f_i - g_n f_n||
where the router does not normalise its weights g over the chosen experts. An expert's score is the root mean square of
that over its tokens. One more expert is computed for each token, and the router once more.
"""

from compressor.plugins import LayerPlan, LayerStatistics
from strategies.reap import keep_salient, mean_over_routed

NEEDS = frozenset({"squared_deletion_sum", "routed_count"})


def plan(stats: LayerStatistics, keep: int, protected: frozenset[int] = frozenset()) -> LayerPlan:
    """Keep the `keep` experts of highest score; ties go to the lower expert, one that no token reached counts 0."""
    squares = mean_over_routed(stats.squared_deletion_sum, stats.routed_count)
    return keep_salient(stats, squares.sqrt(), keep, protected, "razor")
