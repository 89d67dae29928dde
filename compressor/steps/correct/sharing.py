"""A step of tuning shared among ranks: each has some of the experts, and all have the step's tokens.

An expert's weights, gradients and optimizer are at one rank. In each step ranks add up the experts' outputs [n, H] and
the gradients of gate weights [n, K]. One process has all experts.

n tokens of a step, K top-k, H hidden, N experts.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from compressor.distributed.ranks import here
from compressor.model.experts import routed
from compressor.steps.correct.cut_layer import CutLayer

DEPTH = 4  # of the tree: 16 leaves, so that as many ranks have work
UPDATE = 130  # tokens that take an expert as long as a step of its optimizer

Tree = list[int] | tuple[Any, Any]  # a leaf of experts, or two trees


def balanced(loads: Sequence[float], depth: int = DEPTH) -> Tree:
    """Build a tree of experts of these loads above 0; the halves of each branch have about as much to do."""

    def cut(experts: list[int], depth: int) -> Tree:
        if depth == 0 or len(experts) == 1:
            return experts
        halves, sums = (list[int](), list[int]()), [0.0, 0.0]
        for expert in sorted(experts, key=lambda expert: -loads[expert]):
            lighter = int((sums[1], len(halves[1])) < (sums[0], len(halves[0])))
            halves[lighter].append(expert)
            sums[lighter] += loads[expert]
        return cut(sorted(halves[0]), depth - 1), cut(sorted(halves[1]), depth - 1)

    return cut([*range(len(loads))], depth)


def leaves(tree: Tree) -> Iterator[list[int]]:
    """Yield the experts of each leaf, in order."""
    if isinstance(tree, list):
        yield tree
    else:
        yield from leaves(tree[0])
        yield from leaves(tree[1])


@dataclass(frozen=True, slots=True)
class Share:
    """The rank of each expert, and the tree along which a rank adds up its experts' outputs."""

    tree: Tree
    owners: tuple[int, ...]  # by expert

    @classmethod
    def of(cls, loads: Sequence[float], size: int) -> "Share":
        """Assign experts of these loads above 0 to so many ranks, leaf by leaf, each about as much to do."""
        tree, owners, before = balanced(loads), [0] * len(loads), 0.0
        for leaf in leaves(tree):
            load = sum(loads[expert] for expert in leaf)
            for expert in leaf:
                owners[expert] = min(int((before + load / 2) / sum(loads) * size), size - 1)
            before += load
        return cls(tree, tuple(owners))

    def of_rank(self, rank: int) -> list[int]:
        """Return the experts of a rank, in order."""
        return [expert for expert, owner in enumerate(self.owners) if owner == rank]


def shared(routed_tokens: Tensor, steps: int) -> Share:
    """Share experts that so many tokens [N] were routed to in so many steps; the same at all ranks."""
    return Share.of((routed_tokens + UPDATE * steps).tolist(), here().size)


@torch.no_grad()
def foreseen(layer: CutLayer, steps: Sequence[Tensor]) -> Tensor:
    """Count the tokens [N] that the smaller router sends to each expert at the tokens [n] of some steps."""
    none = torch.zeros(layer.choices, dtype=torch.int64)
    return sum((_routed_tokens(layer, *layer.route(rows)) for rows in steps), start=none)


def _routed_tokens(layer: CutLayer, weights: Tensor, index: Tensor) -> Tensor:
    return torch.bincount(index[weights != 0], minlength=layer.choices).cpu()


def descend(layer: CutLayer, share: Share, rows: Tensor) -> Tensor:
    """Leave in every leaf tensor the gradient of the tokens' weighted mean of ||y - y'||^2, of this rank's experts.

    The tokens at `rows` [n] are the same at all ranks. The router's leaf tensors get theirs at all. One that no token
    reaches gets none. Returns how many tokens [N] reach each expert.
    """
    weights, index = layer.route(rows)
    counts = _routed_tokens(layer, weights, index)
    if not bool(counts.any()):
        return counts
    inputs, targets, given = layer.inputs(rows), layer.targets(rows), weights.detach()
    own = {
        expert: _Reached(at, places, given[at, places, None], layer.put_out(expert, inputs.index_select(0, at)))
        for expert, at, places in routed(given, index, share.of_rank(here().rank))
    }
    gap = here().all_reduce(_summed(share.tree, own, targets)) - targets
    gradient = gap * (layer.token_weights(targets) * (2 / len(rows)))[:, None]
    pulls = {expert: gradient.index_select(0, each.tokens) for expert, each in own.items()}
    slopes = torch.zeros_like(given)  # only an expert's rank knows those of its choices
    for expert, each in own.items():
        slopes[each.tokens, each.places] = (pulls[expert] * each.output.detach()).sum(-1)
    for expert, each in own.items():
        if each.output.requires_grad:
            each.output.backward(pulls[expert] * each.weights)
    if weights.requires_grad:
        weights.backward(here().all_reduce(slopes))
    return counts


@dataclass(frozen=True, slots=True)
class _Reached:
    """The m tokens and choices that reach an expert: gate weights [m, 1], and its outputs before these."""

    tokens: Tensor
    places: Tensor
    weights: Tensor
    output: Tensor  # [m, H], or [H] of one that says the same to all


@torch.no_grad()
def _summed(tree: Tree, reached: dict[int, _Reached], like: Tensor) -> Tensor:
    """Add up the gate-weighted outputs [n, H] of this rank's experts: a leaf's in order, then of both halves."""
    if isinstance(tree, tuple):
        return _summed(tree[0], reached, like) + _summed(tree[1], reached, like)
    total = torch.zeros_like(like)
    for each in (reached[expert] for expert in tree if expert in reached):
        total.index_add_(0, each.tokens, each.output * each.weights)
    return total
