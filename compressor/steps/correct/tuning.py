"""Tuning a cut layer on its own reconstruction loss: router rows, gate, up and down; one layer, no other.

The loss is the weighted mean of ||y - y'||^2 over a step's tokens. The optimiser is Adafactor (Shazeer and Stern 2018,
arXiv:1804.04235): its steps are relative to a tensor's own size, and its state is a row and a column of a matrix, so
that one layer in float32 is about all the memory it takes. Each gradient is used and freed before the next one.

Of several ranks each computes with its own tokens of a step, and gradients are added up.
n tokens of a step, K top-k, H hidden, N experts.
"""

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from compressor.distributed import ranks
from compressor.model.experts import routed
from compressor.steps.correct.cut_layer import CutLayer

Update = Callable[[Iterable[Tensor]], None]  # takes a step for each tensor that has a gradient, and frees that


def descend(layer: CutLayer, rows: Tensor, tokens: int, router: Sequence[Tensor], update: Update) -> None:
    """Take the gradients of the weighted mean of ||y - y'||^2 over a step's `tokens`, and `update` by each in turn.

    This rank has those at `rows` [n]. An expert that no token reaches is not updated.
    """
    weights = torch.zeros(0, 1)
    index = torch.zeros(0, 1, dtype=torch.int64)
    if len(rows):
        weights, index = layer.route(rows)
    gates = weights.detach()
    counts = ranks().all_reduce(torch.bincount(index[gates != 0], minlength=layer.slots).cpu())
    inputs = layer.inputs(rows)
    targets = layer.targets(rows)
    # the m tokens and choices that reach an expert, and its outputs before their gate weights: [m, H]
    reached = dict[int, tuple[Tensor, Tensor, Tensor]]()
    total = torch.zeros_like(targets)
    for slot, positions, choices in routed(gates, index):
        output = layer.slot_output(slot, inputs.index_select(0, positions))
        reached[slot] = positions, choices, output
        total.index_add_(0, positions, output.detach() * gates[positions, choices, None])
    gradient = (total - targets) * (layer.token_weights(rows) * (2 / tokens))[:, None]
    gate_gradient = torch.zeros_like(gates)
    for slot in counts.nonzero().flatten().tolist():
        if slot in reached:
            positions, choices, output = reached.pop(slot)
            output_gradient = gradient.index_select(0, positions)
            gate_gradient[positions, choices] = (output_gradient * output.detach()).sum(-1)
            if output.requires_grad:
                output.backward(output_gradient * gates[positions, choices, None])
        update(layer.leaves_of(slot))
    if weights.requires_grad:
        weights.backward(gate_gradient)
    if len(counts.nonzero()):
        update(router)


def _steps(count: int, steps: int, tokens: int, seed: int) -> list[Tensor]:
    """Return the places of each step's tokens: passes over `count` shuffled ones, without a remainder's short step."""
    generator = torch.Generator().manual_seed(seed)
    size = min(tokens, count)
    chosen = list[Tensor]()
    while len(chosen) < steps:
        order = torch.randperm(count, generator=generator)
        chosen += order[: count - count % size].split(size)
    return chosen[:steps]


@torch.enable_grad()
def tune(
    layer: CutLayer, rows: Tensor, router: Sequence[Tensor], steps: int, tokens: int, rate: float, seed: int = 0
) -> None:
    """Tune `layer.parameters` and `router`, leaves of the live router, in place, on `tokens` tokens a step.

    The `rate` is relative to each tensor's root mean square, and falls to 0. Each rank gives its own tokens at `rows`,
    and all end with the same values.
    """
    places, count = layer.recording.places(rows)
    row_at = torch.full((count,), -1)
    row_at[places] = rows
    tuned = list(router)
    for parameters in layer.parameters:
        tuned += parameters.values()
    optimizers = {value: torch.optim.Adafactor([value.requires_grad_()]) for value in tuned}

    def update(values: Iterable[Tensor]) -> None:
        for value in values:
            if not ranks().is_alone:
                gradient = torch.zeros_like(value) if value.grad is None else value.grad
                value.grad = ranks().all_reduce(gradient)
            if value.grad is not None:
                optimizers[value].step()
                value.grad = None  # no two gradients need be in memory at once

    for step, chosen in enumerate(_steps(count, steps, tokens, seed)):
        for optimizer in optimizers.values():
            optimizer.param_groups[0]["lr"] = rate * 0.5 * (1 + math.cos(math.pi * step / steps))
        own_rows = row_at[chosen]
        descend(layer, own_rows[own_rows >= 0], len(chosen), router, update)
    for value in tuned:
        value.requires_grad_(False)
        value.grad = None
