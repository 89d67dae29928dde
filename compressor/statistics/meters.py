"""Meters: how each statistic of an MoE layer is measured, with its shape and meaning; a class is all there is to one.

A meter sees every batch that passes the layer and in the end gives its statistic. Sums run over all tokens that the
router sent to an expert and are float64; samples of the tokens stand in `compressor.statistics.samples`. The gate
weight is the one that really multiplies an expert's output. E experts, H hidden.
"""

from collections.abc import Mapping
from typing import Self

import torch
from torch import Tensor

from compressor.statistics.observing import ExpertsCall, LayerWeights, Meter, Observed, RouterCall, SmallerRouter
from compressor.statistics.samples import (
    ExpertOutputs,
    Inputs,
    MixedOutputs,
    RouterArgumentsThere,
    RouterLogits,
    TopKIndex,
    TopKWeights,
)


class _Sum(Meter):
    kind, shape = "routed", "[E]"

    def __init__(self, observed: Observed) -> None:
        super().__init__(observed)
        self.total = torch.zeros(observed.layer.experts, dtype=torch.float64)

    def absorb(self, other: Self, scale: float) -> None:
        self.total += scale * other.total

    def tensors(self) -> list[Tensor]:
        return [self.total]

    def restore(self, tensors: list[Tensor], like: Self) -> None:
        (self.total,) = tensors

    def finish(self, smaller_router: SmallerRouter) -> Tensor:
        return self.total


class RoutedCount(_Sum):
    name, meaning = "routed_count", "tokens sent to each expert"

    def experts_called(self, call: ExpertsCall) -> None:
        self.total += torch.bincount(call.index[call.used], minlength=len(self.total)).cpu()


class GateWeightSum(_Sum):
    name, meaning = "gate_weight_sum", "sum of gate weights over those tokens"

    def experts_called(self, call: ExpertsCall) -> None:
        found = torch.zeros(len(self.total), dtype=torch.float64, device=call.hidden.device)
        self.total += found.index_add_(0, call.index[call.used], call.weights[call.used].double()).cpu()


class ProbabilitySum(_Sum):
    name = "probability_sum"
    meaning = "softmax of the router logits (over a skip expert too), summed over all tokens"

    def router_called(self, call: RouterCall) -> None:
        if len(call.logits):
            shares = call.logits.softmax(-1).sum(0, dtype=torch.float64)
            self.total += shares[: len(self.total)].cpu()


class _OutputSum(_Sum):
    kind, outputs = "routed outputs", True


class NormSum(_OutputSum):
    name, meaning = "norm_sum", "L2 norm of the expert's output, summed over its tokens"

    def expert_ran(self, expert: int, weights: Tensor, norms: Tensor) -> None:
        self.total[expert] += norms[weights != 0].sum().cpu()


class SquaredNormSum(_OutputSum):
    name, meaning = "squared_norm_sum", "square of that norm, summed over its tokens"

    def expert_ran(self, expert: int, weights: Tensor, norms: Tensor) -> None:
        self.total[expert] += norms[weights != 0].square().sum().cpu()


class GatedNormSum(_OutputSum):
    name, meaning = "gated_norm_sum", "gate weight times the norm, summed over its tokens"

    def expert_ran(self, expert: int, weights: Tensor, norms: Tensor) -> None:
        self.total[expert] += (weights.double() * norms).sum().cpu()


class SquaredGateSum(_Sum):
    name, meaning = "squared_gate_sum", "square of the gate weight, summed over its tokens"

    def experts_called(self, call: ExpertsCall) -> None:
        found = torch.zeros(len(self.total), dtype=torch.float64, device=call.hidden.device)
        self.total += found.index_add_(0, call.index[call.used], call.weights[call.used].double().square()).cpu()


class SquaredGateOutputSum(_OutputSum):
    name, shape = "squared_gate_output_sum", "[E, H]"
    meaning = "square of the gate weight times the expert's output, summed over its tokens"

    def __init__(self, observed: Observed) -> None:
        super().__init__(observed)
        down, turned = observed.experts.down_proj, observed.experts.is_transposed
        self.total = torch.zeros(observed.layer.experts, down.shape[2 if turned else 1], dtype=torch.float64)

    def expert_put_out(self, expert: int, weights: Tensor, outputs: Tensor) -> None:
        self.total[expert] += (weights.double().square() @ outputs.double()).cpu()


class SquaredGatedNormSum(_OutputSum):
    name, meaning = "squared_gated_norm_sum", "square of gate weight times the norm, summed over its tokens"

    def expert_ran(self, expert: int, weights: Tensor, norms: Tensor) -> None:
        self.total[expert] += (weights.double() * norms).square().sum().cpu()


class Weights(Meter):
    name, kind, meaning = "weights", "weights", "the layer's live experts and router modules, to be read only"

    def finish(self, smaller_router: SmallerRouter) -> LayerWeights:
        return LayerWeights(self.observed.experts, self.observed.router, self.observed.block, smaller_router)


class Heldout(Meter):
    """Measured by a collector of its own, on other tokens."""

    name, kind = "heldout", "heldout"
    meaning = "statistics of calibration tokens that no other statistic saw, enough to reconstruct the layer's output"


class RankChange(Meter):
    """Measured by routing attribution, over the layers at once, where a strategy asks for it."""

    name, shape, kind = "rank_change", "[E]", "attributed"
    meaning = (
        "AARV: places by which the ranks of later routers' chosen experts change without the expert, on average over "
        "all tokens, summed over those routers; 0 where there are none"
    )


METERS: Mapping[str, type[Meter]] = {
    meter.name: meter
    for meter in (
        RoutedCount,
        GateWeightSum,
        ProbabilitySum,
        NormSum,
        SquaredNormSum,
        GatedNormSum,
        SquaredGateSum,
        SquaredGateOutputSum,
        SquaredGatedNormSum,
        Inputs,
        RouterLogits,
        TopKIndex,
        TopKWeights,
        RouterArgumentsThere,
        ExpertOutputs,
        MixedOutputs,
        Weights,
        Heldout,
        RankChange,
    )
}


def statistics_table() -> list[tuple[str, str, str]]:
    """Name, shape ("" where there is none) and meaning of each statistic that a strategy may need."""
    return [(name, meter.shape, meter.meaning) for name, meter in METERS.items()]
