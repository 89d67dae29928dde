"""Data-centric: group experts with alike outputs on mixed calibration tokens, then merge them (arXiv:2407.09590)."""

from dataclasses import dataclass

import torch

from compressor.plugins import (
    CLOSENESS,
    METHODS,
    SQUARED,
    LayerPlan,
    LayerStatistics,
    closeness,
    linear_cka,
    mean_output_distances,
    merge_needs,
    option,
    rbf_cka,
)
from strategies.model_centric import merge_alike

NEEDS = frozenset({"mixed_outputs"})
SIMILARITIES = {  # with what a report calls them
    "linear-cka": "linear CKA of expert outputs",
    "rbf-cka": "CKA of expert outputs with a Gaussian kernel",
    "mean-output": f"closeness of mean expert outputs ({CLOSENESS})",
}


@dataclass(frozen=True, slots=True)
class Options:
    """How experts are compared and merged; `mix_tokens` augments the tokens by random mixtures."""

    similarity: str = option(
        "linear-cka", help="by what outputs are compared: linear-cka, rbf-cka or mean-output", choices=SIMILARITIES
    )
    mix_tokens: bool = option(True, help="whether outputs are compared on random mixtures of tokens")
    merge: str = option(
        "uniform", help="how a group becomes one expert: uniform, max, frequency or learned", choices=METHODS
    )
    merge_routers: bool = option(True, help="whether router rows are merged alike, or the leading expert's stays")
    align: bool = option(False, help="whether neurons are first put in the order of the leading expert's")


def needs(options: Options) -> frozenset[str]:
    """Outputs of all experts, on mixtures or on the tokens themselves, and what the merging needs."""
    return likeness_needs(options) | merge_needs(options.merge, options.merge_routers)


def likeness_needs(options: Options) -> frozenset[str]:
    """The outputs that are compared."""
    return frozenset({"mixed_outputs" if options.mix_tokens else "expert_outputs"})


def distances(outputs: torch.Tensor, similarity: str) -> tuple[torch.Tensor, torch.Tensor | float]:
    """Distances of experts by their outputs, [E, S, H] -> [E, E], and their noise; 1 - CKA, or between mean outputs.

    An expert layer that no calibration token reached has no outputs; all its experts count as equally far apart.
    """
    if outputs.shape[1] == 0:
        return 1 - torch.eye(len(outputs), dtype=torch.float64), SQUARED
    if similarity == "mean-output":
        return mean_output_distances(outputs)
    return 1 - (linear_cka if similarity == "linear-cka" else rbf_cka)(outputs), SQUARED


def likeness(stats: LayerStatistics, options: Options) -> tuple[str, torch.Tensor]:
    """How alike the experts' outputs are, for a report: a label, and [E, E] from 0 to 1."""
    outputs = stats.mixed_outputs if options.mix_tokens else stats.expert_outputs
    table, _ = distances(outputs, options.similarity)
    on = "random mixtures of tokens" if options.mix_tokens else "tokens"
    label = f"{SIMILARITIES[options.similarity]}, {outputs.shape[1]} {on}"
    return label, closeness(table) if options.similarity == "mean-output" else 1 - table


@torch.no_grad()
def plan(
    stats: LayerStatistics, keep: int, protected: frozenset[int] = frozenset(), options: Options = Options()
) -> LayerPlan:
    """Group by equation 5 on distances of the experts' outputs, merge by equation 6; protected experts stay alone."""
    outputs = stats.mixed_outputs if options.mix_tokens else stats.expert_outputs
    table, noise = distances(outputs, options.similarity)
    return merge_alike(stats, table.clamp(min=0).cpu(), noise, keep, protected, options, options.similarity)
