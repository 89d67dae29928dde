"""Selection by a score, and merging of a group of experts: max, uniform, by frequency, or learned.

Equations 6 and 7 of Zhang et al. 2024, arXiv:2407.09590. Learned are coefficients and scales that
bring the layer's output back: the merged expert n is lambda_n * sum_i alpha_i theta_i with alpha =
softmax(logits), its router row sum_i alpha_i W_i; the loss is ||y - F(x)||^2 / ||y||^2 over the
sampled inputs. One merged expert exists at a time. S sampled tokens, K top-k, E experts, H hidden.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from compressor.devices import as_float64
from compressor.errors import CompressionError
from compressor.frozen import frozen
from compressor.model.experts import Parameters, apply_expert, expert_parameters, routed
from compressor.model.moe_layer import MoeLayer
from compressor.options import NamedOptions
from compressor.recipe.plan import Group, LayerPlan
from compressor.statistics.statistics import LayerStatistics
from compressor.steps.cutting import aligned_experts, mixed_parameters
from compressor.steps.prune.reconstruction import SmallerRouter
from compressor.tolerance import SQUARED, rounded, stable_argmin

STEPS = 60  # of learning coefficients
LEARNING_RATE = 0.05
MergeMethod = Literal["uniform", "max", "frequency", "learned"]
METHODS = get_args(MergeMethod)
COUNTS = frozenset({"routed_count"})
LEARNED = frozenset({"inputs", "top_k_index", "top_k_weights", "router_arguments", "weights"})


def merge_needs(method: str, merge_routers: bool) -> frozenset[str]:
    """Return the statistics that a merging method needs beside those of the grouping."""
    if method not in METHODS:
        raise CompressionError(f"there is no merge {method!r}; known are {', '.join(METHODS)}")
    if method == "uniform":
        return frozenset()
    if method == "learned":
        return LEARNED if merge_routers else LEARNED | COUNTS
    return COUNTS


class MergeOptions(NamedOptions):
    """Options of merging a group of experts into one; those of a merging strategy derive from
    them."""

    merge: MergeMethod = "uniform"
    """How a group becomes one expert."""
    merge_routers: bool = True
    """Merge router rows, too, instead of keeping the leading expert's."""
    align: bool = False
    """Put neurons in the order of the leading expert's first."""

    @property
    def merge_needs(self) -> frozenset[str]:
        """Statistics that the merging needs beside those of the grouping."""
        return merge_needs(self.merge, self.merge_routers)

    def merged(
        self, stats: LayerStatistics, groups: Sequence[Sequence[int]], **details: Any
    ) -> LayerPlan:
        """Return the plan that merges these groups of experts so; singletons stay bit for bit."""
        return merge_groups(stats, groups, self.merge, self.merge_routers, self.align, **details)


def coefficients(members: Sequence[int], method: str, counts: Tensor | None) -> tuple[float, ...]:
    """Coefficients of a group's members, summing to 1; `counts` [E] are routed tokens.

    With max, ties go to the lower expert; a group that no token reached is averaged uniformly.
    """
    if method == "uniform" or len(members) == 1:
        weights = [1.0] * len(members)
    elif counts is None:
        raise CompressionError(
            f"merge {method!r} needs counts of routed tokens, which were not collected"
        )
    elif method == "max":
        leader = _leader(members, counts)
        weights = [float(member == leader) for member in members]
    else:
        weights = counts[list(members)].tolist()
    total = sum(weights)
    return tuple(weight / total if total else 1 / len(members) for weight in weights)


def _leader(members: Sequence[int], counts: Tensor | None) -> int:
    """The expert that leads its group: the one with most routed tokens, `counts` [E], or without
    these the lowest."""
    if counts is None:
        return members[0]
    return members[int(rounded(counts)[list(members)].argmax())]


def merge_groups(
    stats: LayerStatistics,
    groups: Sequence[Sequence[int]],
    method: str = "uniform",
    merge_routers: bool = True,
    align: bool = False,
    **details: Any,
) -> LayerPlan:
    """Return the plan that merges these groups of experts; singletons stay bit for bit.

    With `align`, the neurons of a group are matched to those of its expert with most routed tokens
    (its lowest, where these are not known) when the plan is carried out."""
    merge_needs(method, merge_routers)
    counts = stats.values.get("routed_count")
    merged = []
    for members in (tuple(sorted(group)) for group in groups):
        shares = coefficients(members, "uniform" if method == "learned" else method, counts)
        leader = _leader(members, counts)
        rows = shares if merge_routers else tuple(float(member == leader) for member in members)
        group = Group(members, shares, rows, head=leader)
        merged.append(group if align and group.aligned else replace(group, head=None))
    plan = LayerPlan.of(stats.layer, merged, **details)
    return learn_coefficients(stats, plan, merge_routers) if method == "learned" else plan


class _Merge:
    """A plan's merged layer with learned logits of each group's coefficients and the logarithm of
    its scale."""

    def __init__(self, stats: LayerStatistics, plan: LayerPlan) -> None:
        self.inputs = stats.inputs
        self.experts = stats.weights.experts
        self.groups = plan.groups
        self.logits = list[Tensor]()
        self.log_scales = list[Tensor]()
        device = self.inputs.device
        for group in plan.groups:
            size = len(group.members)
            self.logits.append(torch.zeros(size, device=device, requires_grad=size > 1))
            self.log_scales.append(torch.zeros((), device=device, requires_grad=size > 1))

    def shares(self, slot: int) -> Tensor:
        """Coefficients of a group's members, times its scale."""
        return self.logits[slot].softmax(0) * self.log_scales[slot].exp()

    @torch.no_grad()
    def merged(self, slot: int) -> Parameters:
        """Return the parameters of one merged expert."""
        pairs = zip(self.groups[slot].members, self.shares(slot).tolist(), strict=True)
        return mixed_parameters(self.experts, pairs)

    @torch.no_grad()
    def forward(self, weights: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        """Return the merged layer's output [S, H], and each choice's own expert output [S, K,
        H]."""
        chosen = self.inputs.new_zeros(*index.shape, self.inputs.shape[1])
        for slot, rows, choices in routed(weights, index):
            chosen[rows, choices] = apply_expert(self.experts, self.merged(slot), self.inputs[rows])
        return (weights[..., None] * chosen).sum(1), chosen

    def backward(self, weights: Tensor, index: Tensor, slope: Tensor) -> None:
        """Add the loss's gradient through the experts, one merged expert at a time; `slope` is
        dloss/dy."""
        for slot, rows, choices in routed(weights, index):
            members = self.groups[slot].members
            if len(members) == 1:
                continue
            merged = {name: value.requires_grad_() for name, value in self.merged(slot).items()}
            output = apply_expert(self.experts, merged, self.inputs[rows])
            above = weights[rows, choices, None].detach() * slope[rows]
            gradients = torch.autograd.grad(output, list(merged.values()), above)
            # <dloss/dmerged, theta> of each member
            products = torch.zeros(len(members), device=self.inputs.device)
            for position, member in enumerate(members):
                parameters = expert_parameters(self.experts, member)
                for name, gradient in zip(merged, gradients, strict=True):
                    products[position] += (gradient * parameters[name].detach().float()).sum()
            (self.shares(slot) * products).sum().backward()


@torch.enable_grad()
def learn_coefficients(
    stats: LayerStatistics, plan: LayerPlan, merge_routers: bool = True, steps: int = STEPS
) -> LayerPlan:
    """Replace a plan's coefficients by learned ones, never worse than those it starts from on the
    sampled tokens.

    A layer that no calibration token reached keeps the coefficients it has. Members of a group with
    a head are aligned to it, as surgery does. Deterministic: no randomness is used."""
    if len(stats.inputs) == 0 or all(len(group.members) == 1 for group in plan.groups):
        return plan
    target = torch.zeros_like(stats.inputs)
    with torch.no_grad():
        for expert, tokens, choices in routed(stats.top_k_weights, stats.top_k_index):
            parameters = mixed_parameters(stats.weights.experts, [(expert, 1.0)])
            outputs = apply_expert(stats.weights.experts, parameters, stats.inputs[tokens])
            target.index_add_(0, tokens, outputs * stats.top_k_weights[tokens, choices, None])
    size = float(target.square().sum()) or 1.0
    experts = aligned_experts(stats.weights.experts, plan.groups)
    stats = stats.adding(weights=replace(stats.weights, experts=experts))
    merge = _Merge(stats, plan)
    router = SmallerRouter(stats)
    learned = [*merge.logits, *merge.log_scales]
    optimizer = torch.optim.Adam(
        [tensor for tensor in learned if tensor.requires_grad], lr=LEARNING_RATE
    )
    losses = []
    states = []
    for step in range(steps + 1):
        optimizer.zero_grad()
        shares = [logits.softmax(0) for logits in merge.logits] if merge_routers else None
        weights, index = router.planned(plan, shares)
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
    best = stable_argmin(losses, SQUARED)
    groups = []
    for slot, group in enumerate(plan.groups):
        if len(group.members) > 1:
            shares64 = as_float64(states[best][slot]).softmax(0)
            alpha = tuple((shares64 / shares64.sum()).tolist())
            scale = float(states[best][len(plan.groups) + slot].exp())
            rows = alpha if merge_routers else group.router_coefficients
            group = replace(group, coefficients=alpha, router_coefficients=rows, scale=scale)
        groups.append(group)
    figures = {"error_uniform": round(losses[0], 6), "error_learned": round(losses[best], 6)}
    return replace(plan, groups=tuple(groups), figures={**plan.figures, **figures})


def competing(layer: MoeLayer) -> list[list[int]]:
    """Return the experts that compete for the same places: those of each routing group, or all."""
    size = layer.experts // layer.routing_groups
    return [list(range(begin, begin + size)) for begin in range(0, layer.experts, size)]


@frozen
class Block:
    """Experts that compete for the same places: a routing group, or the whole layer."""

    fixed: tuple[int, ...]  # protected
    free: tuple[int, ...]
    take: int  # how many of the free ones stay


def blocks_of(layer: MoeLayer, keep: int, protected: frozenset[int]) -> list[Block]:
    """Return the blocks of a layer that keeps `keep` experts; refuses protected experts that do not
    fit."""
    blocks = []
    capacity = keep // layer.routing_groups
    for experts in competing(layer):
        fixed = tuple(expert for expert in experts if expert in protected)
        free = tuple(expert for expert in experts if expert not in protected)
        if len(fixed) > capacity:
            where = f" of experts {experts[0]} to {experts[-1]}" if layer.routing_groups > 1 else ""
            raise CompressionError(
                f"{layer.name}: {len(fixed)} protected experts do not fit into the {capacity} "
                f"places{where} when {keep} are kept; protect fewer or keep more"
            )
        blocks.append(Block(fixed, free, capacity - len(fixed)))
    return blocks


def kept_share(plan: LayerPlan, scores: Tensor) -> float:
    """Share of the scores' total [E] that a dropping plan's kept experts hold; 0 where the total
    is."""
    kept = [group.members[0] for group in plan.groups]
    total = float(scores.sum())
    return round(float(scores[kept].sum()) / total, 6) if total else 0.0


def keep_best(
    stats: LayerStatistics, scores: Tensor, keep: int, protected: frozenset[int], **details: Any
) -> LayerPlan:
    """Keep the experts of highest score [E], equally many in each routing group; ties go to the
    lower expert.

    Where sources of text are balanced, theirs decide (`balanced`).
    """
    for values in (scores,) if stats.shares is None else (scores, *stats.shares):
        if values.isnan().any():  # an infinite score may mean always or never
            expert = int(values.isnan().int().argmax())
            raise CompressionError(
                f"{stats.layer.name}: the score of expert {expert} is not a number"
            )
    blocks = blocks_of(stats.layer, keep, protected)
    if stats.shares is not None:
        kept = balanced(stats.shares, blocks)
        least = round(float(stats.shares[:, kept].sum(1).min()), 6)
        figures = {**details.pop("figures", {}), "kept_share_of_worst_source": least}
        return LayerPlan.keep(stats.layer, kept, figures=figures, **details)
    ranked = rounded(scores).cpu()
    kept = []
    for block in blocks:
        order = ranked[list(block.free)].argsort(descending=True, stable=True)
        best = [block.free[position] for position in order[: block.take].tolist()]
        kept += [*block.fixed, *best]
    return LayerPlan.keep(stats.layer, kept, **details)


def balanced(shares: Tensor, blocks: Sequence[Block]) -> list[int]:
    """Return the experts that maximin keeps: the source with the least share kept gets its best
    one, until all is full.

    `shares` [N, E] are the experts' of each source's score. Ties go to the lower source and the
    lower expert. A source that could gain nothing more passes."""
    kept = [expert for block in blocks for expert in block.fixed]
    totals = shares[:, kept].sum(1)
    # of the experts that may still be kept
    values = shares.index_fill(1, torch.tensor(kept, dtype=torch.long), -1)
    places = {block: block.take for block in blocks}
    while True:
        for block, left in places.items():
            if not left:
                values[:, list(block.free)] = -1
        if not any(places.values()):
            return kept
        best, experts = values.max(dim=1)
        source = stable_argmin(totals.masked_fill(best <= 0, torch.inf).tolist())
        expert = int(experts[source])
        kept.append(expert)
        totals += shares[:, expert]
        values[:, expert] = -1
        places[next(block for block in blocks if expert in block.free)] -= 1
