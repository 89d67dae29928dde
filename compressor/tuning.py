"""Tuning a cut layer on its own reconstruction loss: router rows, gate, up and down, by Adam; one layer, no other.

The loss is ||y - y'||^2 over a step's tokens, divided by what ||y||^2 is on average for as many.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from compressor.relayer import CHUNK, CutLayer

STEPS, TOKENS, RATE = 300, 2048, 0.03


@dataclass(frozen=True, slots=True)
class Schedule:
    """How long and how boldly to tune. The rate is relative to each tensor's root mean square, falling to 0."""

    steps: int = STEPS
    tokens: int = TOKENS  # a step
    rate: float = RATE
    seed: int = 0


@torch.no_grad()
def _mean_square(layer: CutLayer, rows: torch.Tensor) -> float:
    """Mean over tokens of ||y||^2."""
    total = sum(float(layer.targets(chunk).double().square().sum()) for chunk in rows.split(CHUNK))
    return total / max(len(rows), 1)


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
    """Tune `layer.parameters` and the `router` tensors (leaves that the live router uses) in place.

    `after` is called with the number of every finished step.
    """
    size = _mean_square(layer, rows)
    if size == 0:
        return
    leaves = [*(value for parameters in layer.parameters for value in parameters.values()), *router]
    groups = []
    for leaf in leaves:
        leaf.requires_grad_()
        scale = float(leaf.detach().square().mean().sqrt())
        groups.append({"params": [leaf], "lr": schedule.rate * scale, "top": schedule.rate * scale})
    optimizer = torch.optim.Adam(groups)
    for step, chosen in enumerate(_steps(rows, schedule)):
        share = 0.5 * (1 + math.cos(math.pi * step / schedule.steps))
        for group in optimizer.param_groups:
            group["lr"] = group["top"] * share
        optimizer.zero_grad(set_to_none=True)
        weights, index = layer.route(chosen)
        residual = layer.targets(chosen) - layer.output(layer.inputs(chosen), weights, index)
        loss = residual.square().sum() / (size * len(chosen))
        loss.backward()
        optimizer.step()
        after(step)
    for leaf in leaves:
        leaf.requires_grad_(False)
        leaf.grad = None
