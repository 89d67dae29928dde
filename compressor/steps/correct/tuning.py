"""Tuning a cut layer on its own reconstruction loss: router rows, gate, up and down; one layer, no other.

The loss is the weighted mean of ||y - y'||^2 over a step's tokens. The optimiser is Adafactor (Shazeer and Stern 2018,
arXiv:1804.04235): its steps are relative to a tensor's own size, and its state is a row and a column of a matrix, so
that one layer in float32 is about all the memory it takes. Each gradient is used and freed before the next one.
Several ranks share the experts: see `compressor.steps.correct.sharing`.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch

from compressor.distributed.ranks import here
from compressor.steps.correct.cut_layer import CutLayer
from compressor.steps.correct.sharing import Share, descend, foreseen, shared

STEPS, TOKENS = 300, 2048
AGAIN = 4  # steps after which ranks share the experts anew, and then after twice as many each time: routers settle


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


class _Leaves:
    """This rank's leaves; the optimiser of each steps as soon as its gradient is there, and frees it."""

    def __init__(self) -> None:
        self._optimizers: dict[torch.Tensor, torch.optim.Optimizer] = {}
        self._hooks: dict[torch.Tensor, Any] = {}

    def take(self, leaf: torch.Tensor, state: Mapping[str, torch.Tensor] = MappingProxyType({})) -> None:
        """Tune this one from now on; `state` is what another rank's optimiser knew of it."""
        optimizer = torch.optim.Adafactor([leaf.requires_grad_()])
        if state:
            optimizer.load_state_dict({**optimizer.state_dict(), "state": {0: dict(state)}})

        def update(leaf: torch.Tensor) -> None:
            optimizer.step()
            leaf.grad = None  # no two gradients need be in memory at once

        self._optimizers[leaf], self._hooks[leaf] = optimizer, leaf.register_post_accumulate_grad_hook(update)

    def give(self, leaf: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """Tune this one no more; returns what its optimiser knows of it."""
        self._hooks.pop(leaf).remove()
        leaf.requires_grad_(False)
        leaf.grad = None
        return dict(self._optimizers.pop(leaf).state[leaf])

    def set_rate(self, rate: float) -> None:
        """Take steps of this rate."""
        for optimizer in self._optimizers.values():
            optimizer.param_groups[0]["lr"] = rate

    def give_all(self) -> None:
        """Tune none of them any more."""
        for leaf in [*self._optimizers]:
            self.give(leaf)


@torch.enable_grad()
def tune(
    layer: CutLayer,
    rows: torch.Tensor,
    router: Sequence[torch.Tensor],
    schedule: Schedule,
    after: Callable[[int], None] = lambda step: None,
) -> None:
    """Tune `layer.parameters` and `router`, leaves of the live router, in place; `after` gets each finished step.

    Each rank gives its own tokens at `rows`, and all end with the same values.
    """
    if not here().is_alone:
        layer, rows = layer.gathered(rows)
    drawn, leaves = _steps(rows, schedule), _Leaves()
    first = drawn[:AGAIN]
    share, counts, since = shared(foreseen(layer, first), len(first)), torch.zeros(layer.choices, dtype=torch.int64), 0
    for leaf in (*_values(layer, share.of_rank(here().rank)), *router):
        leaves.take(leaf)
    for step, chosen in enumerate(drawn):
        if step == max(AGAIN, 2 * since):
            share = _moved(layer, leaves, share, shared(counts, step - since))
            counts, since = torch.zeros_like(counts), step
        leaves.set_rate(schedule.rate * 0.5 * (1 + math.cos(math.pi * step / schedule.steps)))
        counts += descend(layer, share, chosen)
        after(step)
    leaves.give_all()
    for expert, owner in enumerate(share.owners):
        here().copy_from(owner, _values(layer, [expert]))


def _moved(layer: CutLayer, leaves: _Leaves, old: Share, new: Share) -> Share:
    """Move experts to their new owners, with the state of their optimizers; returns the new share."""
    for expert, (before, owner) in enumerate(zip(old.owners, new.owners, strict=True)):
        if owner != before:
            values = _values(layer, [expert])
            here().copy_from(before, values)
            for leaf in values:
                state = here().broadcast_tensors(partial(leaves.give, leaf), before)
                if owner == here().rank:
                    leaves.take(leaf, state)
    return new


def _values(layer: CutLayer, experts: Iterable[int]) -> list[torch.Tensor]:
    """All parameters of these experts; what stands for one has none here."""
    kept = len(layer.parameters)
    return [value for expert in experts if expert < kept for value in layer.parameters[expert].values()]
