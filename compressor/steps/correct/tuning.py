"""Tuning a cut layer on its own reconstruction loss: router rows, gate, up and down; one layer, no other.

The loss is the weighted mean of ||y - y'||^2 over a step's tokens. The optimiser is Adafactor (Shazeer and Stern 2018,
arXiv:1804.04235): its steps are relative to a tensor's own size, and its state is a row and a column of a matrix, so
that one layer in float32 is about all the memory it takes. Each gradient is used and freed before the next one.

Several ranks share the experts: all have a step's tokens, each has the weights, gradients and optimizers of some
experts, and they add up the experts' outputs [n, H] and the gradients of gate weights [n, K].
n tokens of a step, K top-k, H hidden, N experts.
"""

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from compressor.distributed import ranks
from compressor.model.experts import routed
from compressor.steps.correct.cut_layer import CutLayer

REBALANCED = 4  # step at which outputs are first added up along a new tree; then at twice as many each time
DEPTH = 4  # of the tree: 16 leaves, so that as many ranks have work
UPDATE = 130  # tokens that take an expert as long as a step of its optimizer

Leaves = Sequence[Sequence[int]]  # experts of each leaf of a binary tree, some of them maybe none


def balanced(loads: Sequence[float]) -> Leaves:
    """Divide experts of these loads among the leaves of a binary tree; halves of a branch have about equal loads."""
    leaves = [[*range(len(loads))]]
    for _ in range(DEPTH):
        halves = list[list[int]]()
        for leaf in leaves:
            pair, sums = (list[int](), list[int]()), [0.0, 0.0]
            for expert in sorted(leaf, key=lambda expert: -loads[expert]):
                lighter = int((sums[1], len(pair[1])) < (sums[0], len(pair[0])))
                pair[lighter].append(expert)
                sums[lighter] += loads[expert]
            halves += map(sorted, pair)
        leaves = halves
    return leaves


def owners(loads: Sequence[float], size: int) -> list[int]:
    """Assign experts of these loads above 0 to `size` ranks, leaf by leaf, each about as much to do: -> [N]."""
    rank_of, before = [0] * len(loads), 0.0
    for leaf in balanced(loads):
        load = sum(loads[expert] for expert in leaf)
        for expert in leaf:
            rank_of[expert] = min(int((before + load / 2) / sum(loads) * size), size - 1)
        before += load
    return rank_of


def _routed_tokens(layer: CutLayer, weights: Tensor, index: Tensor) -> Tensor:
    return torch.bincount(index[weights != 0], minlength=layer.choices).cpu()


@dataclass(frozen=True, slots=True)
class _Reached:
    """The m tokens and choices that reach an expert: gate weights [m, 1], and its outputs before these."""

    tokens: Tensor
    places: Tensor
    weights: Tensor
    output: Tensor  # [m, H], or [H] of a constant


def descend(layer: CutLayer, leaves: Leaves, experts: Collection[int], rows: Tensor) -> Tensor:
    """Leave in every leaf tensor the gradient of the tokens' weighted mean of ||y - y'||^2, of this rank's experts.

    The tokens at `rows` [n] are the same at all ranks. The router's leaf tensors get theirs at all. One that no token
    reaches gets none. Outputs are added up along the tree. Returns how many tokens [N] are routed to each expert.
    """
    weights, index = layer.route(rows)
    counts = _routed_tokens(layer, weights, index)
    if not bool(counts.any()):
        return counts
    inputs, targets, gates = layer.inputs(rows), layer.targets(rows), weights.detach()
    own = {
        expert: _Reached(at, places, gates[at, places, None], layer.slot_output(expert, inputs.index_select(0, at)))
        for expert, at, places in routed(gates, index, experts)
    }
    gap = ranks().all_reduce(_summed(leaves, own, targets)) - targets
    gradient = gap * (layer.token_weights(rows) * (2 / len(rows)))[:, None]
    pulls = {expert: gradient.index_select(0, each.tokens) for expert, each in own.items()}
    slopes = torch.zeros_like(gates)  # only an expert's rank knows those of its choices
    for expert, each in own.items():
        slopes[each.tokens, each.places] = (pulls[expert] * each.output.detach()).sum(-1)
    for expert, each in own.items():
        if each.output.requires_grad:
            each.output.backward(pulls[expert] * each.weights)
    if weights.requires_grad:
        weights.backward(ranks().all_reduce(slopes))
    return counts


@torch.no_grad()
def _summed(leaves: Leaves, reached: dict[int, _Reached], like: Tensor) -> Tensor:
    """Add up the gate-weighted outputs [n, H] of this rank's experts: a leaf's in order, then of both halves."""
    if len(leaves) > 1:
        half = len(leaves) // 2
        return _summed(leaves[:half], reached, like) + _summed(leaves[half:], reached, like)
    total = torch.zeros_like(like)
    for each in (reached[expert] for expert in leaves[0] if expert in reached):
        total.index_add_(0, each.tokens, each.output * each.weights)
    return total


def _steps(rows: Tensor, steps: int, tokens: int, seed: int) -> list[Tensor]:
    """Positions of each step's tokens: passes over shuffled tokens, without a remainder's short step."""
    generator = torch.Generator().manual_seed(seed)
    size, found = min(tokens, len(rows)), list[Tensor]()
    while len(found) < steps:
        order = rows[torch.randperm(len(rows), generator=generator)]
        found += [order[begin : begin + size] for begin in range(0, len(order) - size + 1, size)]
    return found[:steps]


@torch.enable_grad()
def tune(
    layer: CutLayer, rows: Tensor, router: Sequence[Tensor], steps: int, tokens: int, rate: float, seed: int = 0
) -> None:
    """Tune `layer.parameters` and `router`, leaves of the live router, in place, on so many tokens a step.

    The `rate` is relative to each tensor's root mean square, and falls to 0. Each rank gives its own tokens at `rows`,
    and all end with the same values.
    """
    if not ranks().is_alone:
        layer, rows = layer.gathered(rows)

    def values(experts: Iterable[int]) -> list[Tensor]:
        """All parameters of these experts; a constant has none here."""
        kept = len(layer.parameters)
        return [value for expert in experts if expert < kept for value in layer.parameters[expert].values()]

    batches = _steps(rows, steps, tokens, seed)
    with torch.no_grad():
        foreseen = [_routed_tokens(layer, *layer.route(chosen)) for chosen in batches[:REBALANCED]]
    counts = torch.zeros(layer.choices, dtype=torch.int64)
    loads = (sum(foreseen, start=counts) + UPDATE * len(foreseen)).tolist()
    owner_of, leaves = owners(loads, ranks().size), balanced(loads)
    own = [expert for expert, owner in enumerate(owner_of) if owner == ranks().rank]
    tuned = [*values(own), *router]
    optimizers = {value: torch.optim.Adafactor([value.requires_grad_()]) for value in tuned}

    def update(value: Tensor) -> None:
        optimizers[value].step()
        value.grad = None  # no two gradients need be in memory at once

    hooks = [value.register_post_accumulate_grad_hook(update) for value in tuned]
    since = 0
    for step, chosen in enumerate(batches):
        if step == max(REBALANCED, 2 * since):
            leaves = balanced((counts + UPDATE * (step - since)).tolist())
            counts, since = torch.zeros_like(counts), step
        for optimizer in optimizers.values():
            optimizer.param_groups[0]["lr"] = rate * 0.5 * (1 + math.cos(math.pi * step / steps))
        counts += descend(layer, leaves, own, chosen)
    for hook in hooks:
        hook.remove()
    for value in tuned:
        value.requires_grad_(False)
        value.grad = None
    for expert, owner in enumerate(owner_of):
        ranks().copy_from(owner, values([expert]))
