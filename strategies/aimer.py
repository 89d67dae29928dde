"""AIMER: keep the experts whose weights are least alike in size; no data (Liu et al. 2026, arXiv:2603.18492).

An expert's ratio is the mean |w| over the root mean square of its weights, those of the gate, up and down projections
taken together: ||w||_1 / (sqrt(N) ||w||_2) of the N weights (equations 4 and 5). It is 1 where all weights are equally
large, 0.80 for Gaussian ones, and small where few weights hold most of the size. A low ratio means a distinct expert:
the highest are removed. Two things are our reading: biases do not count, and an expert of zeros has the ratio 1.
"""

import torch

from compressor.plugins import LayerPlan, LayerStatistics, LayerWeights, as_float64, keep_best, projections

NEEDS = frozenset({"weights"})


@torch.no_grad()
def ratios(weights: LayerWeights, count: int) -> torch.Tensor:
    """Mean |w| over root mean square of each expert's projections: -> [E] in float64, in (0, 1]."""
    values = torch.ones(count, dtype=torch.float64)
    for expert in range(count):
        view = projections(weights.experts, expert)
        parts = [part for part in (view.gate, view.up, view.down) if part is not None]
        absolute = sum(float(torch.linalg.vector_norm(as_float64(part), 1)) for part in parts)
        squared = sum(float(torch.linalg.vector_norm(as_float64(part))) ** 2 for part in parts)
        if squared != 0:  # NaN goes on, and is refused
            values[expert] = absolute / (sum(part.numel() for part in parts) * squared) ** 0.5
    return values


def plan(stats: LayerStatistics, keep: int, protected: frozenset[int] = frozenset()) -> LayerPlan:
    """Keep the `keep` experts of least ratio; ties go to the lower expert."""
    values = ratios(stats.weights, stats.layer.experts)
    figures = {"least_ratio": round(float(values.min()), 6), "largest_ratio": round(float(values.max()), 6)}
    return keep_best(stats, -values, keep, protected, decided_by="mean |w| over root mean square", figures=figures)
