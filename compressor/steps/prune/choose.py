"""Which experts stay by a score, and how a group of experts becomes one: max, uniform, by frequency, or learned.

Equations 6 and 7 of Zhang et al. 2024, arXiv:2407.09590. Learned are coefficients and scales that bring the layer's
output back: the merged expert n is lambda_n * sum_i alpha_i theta_i with alpha = softmax(logits), its router row
sum_i alpha_i W_i; the loss is ||y - F(x)||^2 / ||y||^2 over the sampled inputs. One merged expert exists at a time.
S sampled tokens, K top-k, E experts, H hidden.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from compressor.devices import as_float64
from compressor.entry_points import option
from compressor.errors import CompressionError
from compressor.model.experts import ExpertsView, Parameters, apply_expert, expert_parameters, observed_forward, routed
from compressor.model.moe_layer import MoeLayer
from compressor.recipe.plan import Group, LayerPlan
from compressor.statistics.statistics import LayerStatistics
from compressor.steps.cutting import aligned_experts, mixed_parameters
from compressor.steps.prune.reconstruction import SmallerRouter
from compressor.tolerance import SQUARED, rounded, stable_argmin

STEPS = 60  # of learning coefficients
LEARNING_RATE = 0.05
_NEEDS = {
    "uniform": frozenset[str](),
    "max": frozenset({"routed_count"}),
    "frequency": frozenset({"routed_count"}),
    "learned": frozenset({"inputs", "top_k_index", "top_k_weights", "router_arguments", "weights"}),
}
METHODS = tuple(_NEEDS)


def merge_needs(method: str, merge_routers: bool) -> frozenset[str]:
    """Statistics that a merging method needs beside those of the grouping."""
    if method not in METHODS:
        raise CompressionError(f"there is no merge {method!r}; known are {', '.join(METHODS)}")
    return _NEEDS[method] | (frozenset() if merge_routers or method == "uniform" else frozenset({"routed_count"}))


def merge_option(default: str) -> str:
    """The option `merge` of a strategy, with its help and choices."""
    return option(default, "how a group becomes one expert: uniform, max, frequency or learned", METHODS)


@dataclass(frozen=True, slots=True)
class MergeOptions:
    """How a group of experts becomes one; the options of a merging strategy derive from it."""

    merge: str = merge_option("uniform")
    merge_routers: bool = option(True, help="whether router rows are merged alike, or the leading expert's stays")
    align: bool = option(False, help="whether neurons are first put in the order of the leading expert's")

    @property
    def merge_needs(self) -> frozenset[str]:
        """Statistics that the merging needs beside those of the grouping."""
        return merge_needs(self.merge, self.merge_routers)

    def merged(self, stats: LayerStatistics, groups: Sequence[Sequence[int]], **details: Any) -> LayerPlan:
        """The plan that merges these groups of experts so; singletons stay bit for bit."""
        return merge_groups(stats, groups, self.merge, self.merge_routers, self.align, **details)


def coefficients(members: Sequence[int], method: str, counts: torch.Tensor | None) -> tuple[float, ...]:
    """Coefficients of a group's members, summing to 1; `counts` [E] are routed tokens.

    With max, ties go to the lower expert; a group that no token reached is averaged uniformly.
    """
    if method == "uniform" or len(members) == 1:
        own = [1.0] * len(members)
    elif counts is None:
        raise CompressionError(f"merge {method!r} needs counts of routed tokens, which were not collected")
    elif method == "max":
        own = [float(member == _leading(members, counts)) for member in members]
    else:
        own = [float(counts[member]) for member in members]
        own = own if any(own) else [1.0] * len(members)
    return tuple(share / sum(own) for share in own)


def _leading(members: Sequence[int], counts: torch.Tensor | None) -> int:
    """The expert that leads its group: the one with most routed tokens, `counts` [E], or without these the lowest."""
    return members[0] if counts is None else members[int(rounded(counts)[list(members)].argmax())]


def merge_groups(
    stats: LayerStatistics,
    groups: Sequence[Sequence[int]],
    method: str = "uniform",
    merge_routers: bool = True,
    align: bool = False,
    **details: Any,
) -> LayerPlan:
    """The plan that merges these groups of experts; singletons stay bit for bit.

    With `align`, the neurons of a group are matched to those of its expert with most routed tokens (its lowest, where
    these are not known) when the plan is carried out.
    """
    merge_needs(method, merge_routers)
    if not all(groups):
        raise CompressionError(f"{stats.layer.name}: a group has no members; remove it")
    counts, merged = stats.values.get("routed_count"), list[Group]()
    for members in (tuple(sorted(group)) for group in groups):
        shares = coefficients(members, "uniform" if method == "learned" else method, counts)
        leading = _leading(members, counts)
        rows = shares if merge_routers else tuple(float(member == leading) for member in members)
        group = Group(members, shares, rows, head=leading)
        merged.append(group if align and group.aligned else replace(group, head=None))
    plan = LayerPlan.of(stats.layer, merged, **details)
    return learn_coefficients(stats, plan, merge_routers) if method == "learned" else plan


class _Merge:
    """A plan's merged layer, and what is learned of it: logits of each group's coefficients, logarithm of its scale."""

    def __init__(self, stats: LayerStatistics, plan: LayerPlan) -> None:
        self.stats, self.experts, self.groups = stats, stats.weights.experts, plan.groups
        sizes, device = [len(group.members) for group in plan.groups], stats.inputs.device
        self.logits = [torch.zeros(size, device=device, requires_grad=size > 1) for size in sizes]
        self.log_scales = [torch.zeros((), device=device, requires_grad=size > 1) for size in sizes]

    def shares(self, slot: int) -> torch.Tensor:
        """Coefficients of a group's members, times its scale."""
        return self.logits[slot].softmax(0) * self.log_scales[slot].exp()

    @torch.no_grad()
    def merged(self, slot: int) -> Parameters:
        """The parameters of one merged expert."""
        pairs = zip(self.groups[slot].members, self.shares(slot).tolist(), strict=True)
        return mixed_parameters(self.experts, pairs)

    @torch.no_grad()
    def forward(self, weights: torch.Tensor, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The merged layer's output [S, H], and each choice's own expert output [S, K, H]."""
        x = self.stats.inputs
        chosen = x.new_zeros(*index.shape, x.shape[1])
        for slot, rows, places in routed(weights, index):
            chosen[rows, places] = apply_expert(self.experts, self.merged(slot), x[rows])
        return (weights[..., None] * chosen).sum(1), chosen

    def backward(self, weights: torch.Tensor, index: torch.Tensor, slope: torch.Tensor) -> None:
        """Add the loss's gradient through the experts, one merged expert at a time; `slope` is dloss/dy."""
        for slot, rows, places in routed(weights, index):
            if len(self.groups[slot].members) > 1:
                merged = {name: value.requires_grad_() for name, value in self.merged(slot).items()}
                output = apply_expert(self.experts, merged, self.stats.inputs[rows])
                above = weights[rows, places, None].detach() * slope[rows]
                slopes = dict(zip(merged, torch.autograd.grad(output, list(merged.values()), above), strict=True))
                with torch.no_grad():  # <dloss/dmerged, theta_i> of every member
                    members = [expert_parameters(self.experts, expert) for expert in self.groups[slot].members]
                    products = torch.stack(
                        [sum((slopes[name] * member[name].float()).sum() for name in slopes) for member in members]  # type: ignore[misc]
                    )
                (self.shares(slot) * products).sum().backward()


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
    merge, router = _Merge(stats, plan), SmallerRouter(stats)
    learned = [*merge.logits, *merge.log_scales]
    optimizer = torch.optim.Adam([tensor for tensor in learned if tensor.requires_grad], lr=LEARNING_RATE)
    losses, states = list[float](), list[list[torch.Tensor]]()
    for step in range(steps + 1):
        optimizer.zero_grad()
        weights, index = router.planned(plan, [each.softmax(0) for each in merge.logits] if merge_routers else None)
        output, chosen = merge.forward(weights.detach(), index)
        residual = output - target
        losses.append(float(residual.square().sum()) / size)
        states.append([tensor.detach().clone() for tensor in learned])
        if step == steps:
            break
        slope = 2 * residual / size
        merge.backward(weights, index, slope)
        if weights.requires_grad:
            weights.backward((chosen * slope[:, None]).sum(-1))
        optimizer.step()
    won, groups = stable_argmin(losses, SQUARED), list(plan.groups)
    for slot, group in enumerate(plan.groups):
        if len(group.members) > 1:
            shares = as_float64(states[won][slot]).softmax(0)
            alpha = tuple((shares / shares.sum()).tolist())
            scale = float(states[won][len(groups) + slot].exp())
            kept = alpha if merge_routers else group.router_coefficients
            groups[slot] = replace(group, coefficients=alpha, router_coefficients=kept, scale=scale)
    figures = {"error_uniform": round(losses[0], 6), "error_learned": round(losses[won], 6)}
    return replace(plan, groups=tuple(groups), figures={**plan.figures, **figures})


def competing(layer: MoeLayer) -> list[list[int]]:
    """Experts that compete for the same places: those of each routing group, or all."""
    size = layer.experts // layer.routing_groups
    return [list(range(begin, begin + size)) for begin in range(0, layer.experts, size)]


@dataclass(frozen=True, slots=True)
class Block:
    """Experts that compete for the same places: a routing group, or the whole layer."""

    fixed: tuple[int, ...]  # protected
    free: tuple[int, ...]
    take: int  # how many of the free ones stay


def blocks_of(layer: MoeLayer, keep: int, protected: frozenset[int]) -> list[Block]:
    """Blocks of a layer that keeps so many experts; refuses protected experts that do not fit."""
    blocks, places = list[Block](), keep // layer.routing_groups
    for experts in competing(layer):
        fixed, free = (tuple(e for e in experts if (e in protected) == wanted) for wanted in (True, False))
        if len(fixed) > places:
            where = f" of experts {experts[0]} to {experts[-1]}" if layer.routing_groups > 1 else ""
            raise CompressionError(
                f"{layer.name}: {len(fixed)} protected experts do not fit into the {places} places{where} when {keep} "
                "are kept; protect fewer or keep more"
            )
        blocks.append(Block(fixed, free, places - len(fixed)))
    return blocks


def kept_share(plan: LayerPlan, scores: torch.Tensor) -> float:
    """Share of the scores' total [E] that a dropping plan's kept experts hold; 0 where the total is."""
    kept, total = [group.members[0] for group in plan.groups], float(scores.sum())
    return round(float(scores[kept].sum()) / total, 6) if total else 0.0


def keep_best(
    stats: LayerStatistics, scores: torch.Tensor, keep: int, protected: frozenset[int], **details: Any
) -> LayerPlan:
    """Keep the experts of highest score [E], equally many in each routing group; ties go to the lower expert."""
    if wrong := scores.isnan().nonzero().flatten().tolist():  # an infinite score may mean always or never
        raise CompressionError(f"{stats.layer.name}: the score of expert {wrong[0]} is not a number")
    ranked, kept = rounded(scores).cpu(), list[int]()
    for block in blocks_of(stats.layer, keep, protected):
        order = ranked[list(block.free)].argsort(descending=True, stable=True).tolist()
        kept += (*block.fixed, *(block.free[position] for position in order[: block.take]))
    return LayerPlan.keep(stats.layer, kept, **details)
