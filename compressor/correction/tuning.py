"""Tuning a cut layer on its own reconstruction loss: router rows, gate, up and down; one layer, no other.

The loss is the weighted mean of ||y - y'||^2 over a step's tokens. The optimiser is Adafactor (Shazeer and Stern 2018,
arXiv:1804.04235): its steps are relative to a tensor's own size, and its state is a row and a column of a matrix, so
that one layer in float32 is about all the memory it takes. Each gradient is used and freed before the next one.
Several ranks share the experts: see `compressor.correction.sharing`.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from compressor.correction.cut_layer import CutLayer
from compressor.correction.sharing import descend, shared
from compressor.ranks.present import here

STEPS, TOKENS = 300, 2048
WEIGHED = 16  # steps whose tokens tell how much each expert has to do


@dataclass(frozen=True, slots=True)
class Schedule:
    """How long and how boldly to tune. The rate is relative to each tensor's root mean square, falling to 0."""

    steps: int = STEPS
    tokens: int = TOKENS  # a step
    rate: float = 0.01
    seed: int = 0


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
    """Tune `layer.parameters` and `router`, leaves of the live router, in place; `after` is told each finished step.

    Of several ranks each gives its own tokens at `rows`, and all come to the same values.
    """
    if not here().is_alone:
        layer, rows = layer.everywhere(rows)
    drawn = _steps(rows, schedule)
    share = shared(layer, drawn[:WEIGHED])
    leaves = [*_values(layer, share.of_rank(here().rank)), *router]
    optimizers: dict[torch.Tensor, torch.optim.Optimizer] = {}

    def update(leaf: torch.Tensor) -> None:
        optimizers[leaf].step()
        leaf.grad = None  # no two gradients need be in memory at once

    hooks = []
    for leaf in leaves:
        leaf.requires_grad_()
        optimizers[leaf] = torch.optim.Adafactor([leaf], lr=schedule.rate)
        hooks.append(leaf.register_post_accumulate_grad_hook(update))
    for step, chosen in enumerate(drawn):
        rate = schedule.rate * 0.5 * (1 + math.cos(math.pi * step / schedule.steps))
        for optimizer in optimizers.values():
            optimizer.param_groups[0]["lr"] = rate
        descend(layer, share, chosen)
        after(step)
    for leaf in leaves:
        leaf.requires_grad_(False)
        leaf.grad = None
    for hook in hooks:
        hook.remove()
    for branch, owner in zip(share.branches, share.owners, strict=True):
        tuned = _values(layer, branch.experts)
        here().spread(tuned, [owner] * len(tuned))


def _values(layer: CutLayer, experts: Iterable[int]) -> list[torch.Tensor]:
    """All parameters of these experts; what stands for one has none here."""
    kept = len(layer.parameters)
    return [value for expert in experts if expert < kept for value in layer.parameters[expert].values()]
