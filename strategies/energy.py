"""Energy: keep the experts whose gated outputs weigh most in the hidden states that leave the layer.

The energy of expert e is sum over its tokens t of ||g_e(t) f_e(t)||^2 / ||h_t||^2, with gate weight g, output f, and h
the hidden state behind the decoder layer: squares, as the error of dropping experts is one, and relative, as the next
norm divides a hidden state by its size.
"""

from compressor.plugins import LayerPlan, LayerStatistics
from strategies.reap import keep_salient

NEEDS = frozenset({"stream_energy_sum"})


def plan(stats: LayerStatistics, keep: int, protected: frozenset[int] = frozenset()) -> LayerPlan:
    """Keep the `keep` experts of most energy; ties go to the lower expert, one that no token reached counts 0."""
    return keep_salient(stats, stats.stream_energy_sum, keep, protected, "energy")
