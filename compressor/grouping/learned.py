"""Learned merging: coefficients and scales that bring the layer's output back (Zhang et al. 2024, equation 7).

The merged expert n is lambda_n * sum_i alpha_i theta_i with alpha = softmax(logits), its router row sum_i alpha_i W_i;
loss is ||y - F(x)||^2 / ||y||^2 over the sampled inputs of the experts. One merged expert exists at a time.
"""

from dataclasses import dataclass, replace
from typing import Self

import torch

from compressor.grouping.rerouting import SmallerRouter
from compressor.model.experts import ExpertsView, Parameters, apply_expert, expert_parameters, observed_forward, routed
from compressor.recipe.plan import LayerPlan
from compressor.statistics.statistics import LayerStatistics
from compressor.surgery.cutting import aligned_experts, mixed_parameters
from compressor.ties import SQUARED, least

STEPS = 60
LEARNING_RATE = 0.05


@dataclass(frozen=True, slots=True)
class _Merge:
    """A plan's merged layer, and what is learned of it: logits of each group's coefficients, logarithm of its scale."""

    stats: LayerStatistics
    plan: LayerPlan
    logits: tuple[torch.Tensor, ...]
    log_scales: tuple[torch.Tensor, ...]

    @classmethod
    def start(cls, stats: LayerStatistics, plan: LayerPlan) -> Self:
        device, sizes = stats.inputs.device, [len(group.members) for group in plan.groups]
        logits = tuple(torch.zeros(size, device=device, requires_grad=size > 1) for size in sizes)
        return cls(stats, plan, logits, tuple(torch.zeros((), device=device, requires_grad=size > 1) for size in sizes))

    def parameters(self) -> list[torch.Tensor]:
        return [tensor for tensor in (*self.logits, *self.log_scales) if tensor.requires_grad]

    def alphas(self) -> list[torch.Tensor]:
        """Coefficients [members] of every group."""
        return [logits.softmax(0) for logits in self.logits]

    @torch.no_grad()
    def _merged(self, slot: int) -> Parameters:
        """Parameters of one merged expert in float32."""
        shares = (self.logits[slot].softmax(0) * self.log_scales[slot].exp()).tolist()
        return mixed_parameters(self.stats.weights.experts, zip(self.plan.groups[slot].members, shares, strict=True))

    @torch.no_grad()
    def forward(self, weights: torch.Tensor, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The merged layer's output [S, H], and each choice's own expert output [S, K, H]."""
        x = self.stats.inputs
        chosen = x.new_zeros(*index.shape, x.shape[1])
        for slot, rows, places in routed(weights, index):
            chosen[rows, places] = apply_expert(self.stats.weights.experts, self._merged(slot), x[rows])
        return (weights[..., None] * chosen).sum(1), chosen

    def backward(self, weights: torch.Tensor, index: torch.Tensor, slope: torch.Tensor) -> None:
        """Add the loss's gradient through the experts, one merged expert at a time; `slope` is dloss/dy."""
        experts = self.stats.weights.experts
        for slot, rows, places in routed(weights, index):
            if len(self.plan.groups[slot].members) > 1:
                merged = {name: value.requires_grad_() for name, value in self._merged(slot).items()}
                output = apply_expert(experts, merged, self.stats.inputs[rows])
                above = weights[rows, places, None].detach() * slope[rows]
                slopes = dict(zip(merged, torch.autograd.grad(output, list(merged.values()), above), strict=True))
                with torch.no_grad():  # <dloss/dmerged, theta_i> of every member
                    members = [expert_parameters(experts, expert) for expert in self.plan.groups[slot].members]
                    products = torch.stack(
                        [sum((slopes[name] * member[name].float()).sum() for name in slopes) for member in members]  # type: ignore[misc]
                    )
                (self.log_scales[slot].exp() * self.logits[slot].softmax(0) * products).sum().backward()


@torch.enable_grad()
def learn_coefficients(
    stats: LayerStatistics, plan: LayerPlan, merge_routers: bool = True, steps: int = STEPS
) -> LayerPlan:
    """Replace a plan's coefficients by learned ones, never worse than those it starts from on the sampled tokens.

    A layer that no calibration token reached keeps the coefficients it has. Members of a group with a head are aligned
    to it, as surgery does. Deterministic: no randomness is used.
    """
    if len(stats.inputs) == 0 or all(len(group.members) == 1 for group in plan.groups):
        return plan
    wide = ExpertsView(stats.weights.experts, lambda name, expert, value: value.float())
    with torch.no_grad():
        target = observed_forward(wide, stats.inputs, stats.top_k_index, stats.top_k_weights, lambda *seen: None)
    size = float(target.square().sum()) or 1.0
    aligned = replace(stats.weights, experts=aligned_experts(stats.weights.experts, plan.groups))
    stats = replace(stats, values={**stats.values, "weights": aligned})
    merge, router = _Merge.start(stats, plan), SmallerRouter(stats)
    optimizer = torch.optim.Adam(merge.parameters(), lr=LEARNING_RATE)
    losses, states = list[float](), list[list[torch.Tensor]]()
    for step in range(steps + 1):
        optimizer.zero_grad()
        weights, index = router.planned(plan, merge.alphas() if merge_routers else None)
        output, chosen = merge.forward(weights.detach(), index)
        residual = output - target
        losses.append(float(residual.square().sum()) / size)
        states.append([tensor.detach().clone() for tensor in (*merge.logits, *merge.log_scales)])
        if step == steps:
            break
        slope = 2 * residual / size
        merge.backward(weights, index, slope)
        if weights.requires_grad:
            weights.backward((chosen * slope[:, None]).sum(-1))
        optimizer.step()
    won = least(losses, SQUARED)
    return _learned_plan(plan, states[won], merge_routers, losses[0], losses[won])


def _learned_plan(
    plan: LayerPlan, kept: list[torch.Tensor], merge_routers: bool, first: float, best: float
) -> LayerPlan:
    count, groups = len(plan.groups), list(plan.groups)
    for slot, group in enumerate(plan.groups):
        if len(group.members) > 1:
            shares = kept[slot].double().softmax(0)
            alpha, scale = tuple((shares / shares.sum()).tolist()), float(kept[count + slot].exp())
            router = alpha if merge_routers else group.router_coefficients
            groups[slot] = replace(group, coefficients=alpha, router_coefficients=router, scale=scale)
    figures = {**plan.figures, "error_uniform": round(first, 6), "error_learned": round(best, 6)}
    return replace(plan, groups=tuple(groups), figures=figures)
