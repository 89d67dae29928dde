"""Data-centric: group experts with alike outputs on mixed calibration tokens, then merge them
(arXiv:2407.09590)."""

from typing import Literal

import torch

from compressor.plugins import (
    CLOSENESS,
    SQUARED,
    LayerPlan,
    LayerStatistics,
    MergeOptions,
    closeness,
    linear_cka,
    mean_output_distances,
    rbf_cka,
)
from strategies.model_centric import merge_alike

NEEDS = frozenset({"mixed_outputs"})
SIMILARITIES = {  # with what a report calls them
    "linear-cka": "linear CKA of expert outputs",
    "rbf-cka": "CKA of expert outputs with a Gaussian kernel",
    "mean-output": f"closeness of mean expert outputs ({CLOSENESS})",
}


class Options(MergeOptions):
    """Comparing and merging experts; `mix_tokens` augments the tokens by random mixtures."""

    similarity: Literal["linear-cka", "rbf-cka", "mean-output"] = "linear-cka"
    """Measure by which outputs are compared."""
    mix_tokens: bool = True
    """Compare outputs on random mixtures of tokens."""

    def outputs(self, stats: LayerStatistics) -> torch.Tensor:
        """Return the outputs [E, S, H] that are compared."""
        return stats.mixed_outputs if self.mix_tokens else stats.expert_outputs


def needs(options: Options) -> frozenset[str]:
    """The outputs that are compared, on mixtures of tokens or on the tokens themselves."""
    return frozenset({"mixed_outputs" if options.mix_tokens else "expert_outputs"})


def distances(outputs: torch.Tensor, similarity: str) -> tuple[torch.Tensor, torch.Tensor | float]:
    """Distances of experts by their outputs, [E, S, H] -> [E, E], and their noise; 1 - CKA, or
    between mean outputs.

    An expert layer that no calibration token reached has no outputs; all its experts count as
    equally far apart."""
    if outputs.shape[1] == 0:
        return 1 - torch.eye(len(outputs), dtype=torch.float64), SQUARED
    if similarity == "mean-output":
        return mean_output_distances(outputs)
    return 1 - (linear_cka if similarity == "linear-cka" else rbf_cka)(outputs), SQUARED


def similarity(stats: LayerStatistics, options: Options) -> tuple[str, torch.Tensor]:
    """Similarity of the experts' outputs for a report: a label, and [E, E] from 0 to 1."""
    outputs = options.outputs(stats)
    table, _ = distances(outputs, options.similarity)
    tokens = "random mixtures of tokens" if options.mix_tokens else "tokens"
    label = f"{SIMILARITIES[options.similarity]}, {outputs.shape[1]} {tokens}"
    return label, closeness(table) if options.similarity == "mean-output" else 1 - table


@torch.no_grad()
def plan(
    stats: LayerStatistics,
    keep: int,
    protected: frozenset[int] = frozenset(),
    options: Options = Options(),
) -> LayerPlan:
    """Group by equation 5 on distances of the experts' outputs, merge by equation 6; protected
    experts stay alone."""
    table, noise = distances(options.outputs(stats), options.similarity)
    return merge_alike(
        stats, table.clamp(min=0).cpu(), noise, keep, protected, options, options.similarity
    )
