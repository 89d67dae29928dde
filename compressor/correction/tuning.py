"""Tuning a cut layer on its own reconstruction loss: router rows, gate, up and down; one layer, no other.

The loss is the weighted mean of ||y - y'||^2 over a step's tokens. The optimiser is Adafactor (Shazeer and Stern 2018,
arXiv:1804.04235): its steps are relative to a tensor's own size, and its state is a row and a column of a matrix, so
that one layer in float32 is about all the memory it takes. Each gradient is used and freed before the next one. Of
several ranks each computes the loss of its own tokens of a step; all make the same updates, of the summed gradients.
A deterministic run computes the gradients of fixed groups of tokens, by batches, and adds them up in a fixed order, so
that its bits do not depend on how many ranks there are.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from compressor.correction.cut_layer import CutLayer
from compressor.ranks.present import here

STEPS, TOKENS = 300, 2048
BUCKET = 2**25  # bytes of gradients that ranks exchange at once, or those of one expert


@dataclass(frozen=True, slots=True)
class Schedule:
    """How long and how boldly to tune. The rate is relative to each tensor's root mean square, falling to 0."""

    steps: int = STEPS
    tokens: int = TOKENS  # a step
    rate: float = 0.01
    seed: int = 0
    deterministic: bool = False  # whether any number of ranks comes to the same bits


def _steps(rows: torch.Tensor, schedule: Schedule) -> "list[torch.Tensor]":
    """Positions of each step's tokens: passes over shuffled tokens, without a remainder's short step."""
    generator = torch.Generator().manual_seed(schedule.seed)
    size, found = min(schedule.tokens, len(rows)), list[torch.Tensor]()
    while len(found) < schedule.steps:
        order = rows[torch.randperm(len(rows), generator=generator)]
        found += [order[begin : begin + size] for begin in range(0, len(order) - size + 1, size)]
    return found[: schedule.steps]


@torch.enable_grad()
def tune(
    layer: CutLayer,
    rows: torch.Tensor,
    router: Sequence[torch.Tensor],
    schedule: Schedule,
    after: Callable[[int], None] = lambda step: None,
) -> None:
    """Tune `layer.parameters` and `router`, leaves of the live router, in place; `after` is told each finished step."""
    leaves = [*(value for parameters in layer.parameters for value in parameters.values()), *router]
    optimizers: dict[torch.Tensor, torch.optim.Optimizer] = {}

    def update(leaf: torch.Tensor) -> None:
        optimizers[leaf].step()
        leaf.grad = None  # no two gradients need be in memory at once

    hooks, together = [], schedule.deterministic or not here().is_alone
    buckets = _buckets([*(list(parameters.values()) for parameters in layer.parameters), list(router)])
    for leaf in leaves:
        leaf.requires_grad_()
        optimizers[leaf] = torch.optim.Adafactor([leaf], lr=schedule.rate)
        if not together:
            hooks.append(leaf.register_post_accumulate_grad_hook(update))
    places, groups = layer.pieces.places(rows), layer.pieces.groups(rows)
    for step, chosen in enumerate(_steps(torch.arange(len(places)), schedule)):
        rate = schedule.rate * 0.5 * (1 + math.cos(math.pi * step / schedule.steps))
        for optimizer in optimizers.values():
            optimizer.param_groups[0]["lr"] = rate
        if schedule.deterministic:
            parts = {group: places[chosen[groups[chosen] == group]] for group in groups[chosen].unique().tolist()}
            own = {group: part for group, part in parts.items() if here().takes_turn(group)}
        else:
            parts = own = {here().rank: places[chosen][places[chosen] >= 0]}
        losses = {group: _loss(layer, part, len(chosen)) for group, part in own.items()}
        if together:
            for bucket in buckets:
                _update_together(losses, parts if schedule.deterministic else None, bucket, update)
        elif losses[0].requires_grad:  # not where every token of the step skips the experts
            losses[0].backward()
        after(step)
    for leaf in leaves:
        leaf.requires_grad_(False)
        leaf.grad = None
    for hook in hooks:
        hook.remove()


def _loss(layer: CutLayer, rows: torch.Tensor, count: int) -> torch.Tensor:
    """What the tokens at `rows` add to the loss of a step of `count` tokens."""
    if not len(rows):
        return torch.zeros((), device=layer.recording.inputs.device)
    target = layer.targets(rows)
    return layer.token_weights(target) @ layer.gap(rows, target).square().sum(-1) / count


def _buckets(groups: Sequence[Sequence[torch.Tensor]]) -> list[list[torch.Tensor]]:
    """Leaves whose gradients are exchanged at once: a few experts, or one that is large."""
    found, size = list[list[torch.Tensor]](), BUCKET
    for group in groups:
        if size >= BUCKET:
            found.append([])
            size = 0
        found[-1] += group
        size += sum(leaf.nbytes for leaf in group)
    return [bucket for bucket in found if bucket]


def _update_together(
    losses: Mapping[int, torch.Tensor],
    ordered: Collection[int] | None,
    leaves: Sequence[torch.Tensor],
    update: Callable[[torch.Tensor], None],
) -> None:
    """Update these leaves by the gradients of all ranks' losses; one that no loss depends on stays as it is.

    The losses of groups are added up as `ordered` names them, those of ranks in whatever order is fastest.
    """
    if ordered is None:
        (loss,) = losses.values()
        total = here().reduced(_gradients(loss, leaves))
    else:
        groups = list(ordered)
        like = torch.empty(sum(map(torch.numel, leaves)) + len(leaves), device=leaves[0].device)
        owners = [group % here().size for group in groups]
        total = here().ordered_sum(like, owners, lambda number: _gradients(losses[groups[number]], leaves))
    *gradients, used = total.split([*map(torch.numel, leaves), len(leaves)])
    for leaf, gradient, dependent in zip(leaves, gradients, used.tolist(), strict=True):
        if dependent:
            leaf.grad = gradient.view_as(leaf)
            update(leaf)


def _gradients(loss: torch.Tensor, leaves: Sequence[torch.Tensor]) -> torch.Tensor:
    """Of all leaves one after another, and then for each whether the loss depends on it: 1 or 0."""
    found: Sequence[torch.Tensor | None] = [None] * len(leaves)
    if loss.requires_grad:
        found = torch.autograd.grad(loss, leaves, retain_graph=True, allow_unused=True)
    used = torch.tensor([float(gradient is not None) for gradient in found], device=loss.device)
    pairs = zip(leaves, found, strict=True)
    flat = [(torch.zeros_like(leaf) if gradient is None else gradient).flatten() for leaf, gradient in pairs]
    return torch.cat([*flat, used])
