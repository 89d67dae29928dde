"""A step of tuning shared among ranks: each has some of the experts, and all have the step's tokens.

An expert's weights, gradients and optimiser are with one rank, so what ranks exchange in a step are outputs: n tokens
times H. These are added up along a tree of experts that is the same for any number of ranks, whatever part of it a rank
computes, and so are the bits that come out. One process has all experts.

n tokens of a step, K top-k, H hidden, N experts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from compressor.distributed.present import here
from compressor.model.experts import routed
from compressor.steps.correct.cut_layer import CutLayer

DEPTH = 4  # of the tree: 16 leaves, so that as many ranks have work
UPDATE = 130  # tokens that take an expert as long as a step of its optimiser


@dataclass(frozen=True, slots=True)
class Branch:
    """Experts whose outputs are summed: of a leaf in their order, otherwise of both halves, and then of these two."""

    experts: tuple[int, ...]
    load: float
    halves: tuple["Branch", "Branch"] | None = None

    @property
    def leaves(self) -> tuple["Branch", ...]:
        """The leaves below, in order; a leaf's are itself."""
        return (self,) if self.halves is None else (*self.halves[0].leaves, *self.halves[1].leaves)


def grown(loads: Sequence[float], depth: int = DEPTH) -> Branch:
    """A tree of experts of these loads above 0, each of its branches cut into halves that have about as much to do."""

    def cut(experts: tuple[int, ...], depth: int) -> Branch:
        if depth == 0 or len(experts) == 1:
            return Branch(experts, sum(loads[expert] for expert in experts))
        halves, sums = (list[int](), list[int]()), [0.0, 0.0]
        for expert in sorted(experts, key=lambda expert: -loads[expert]):
            lighter = int((sums[1], len(halves[1])) < (sums[0], len(halves[0])))
            halves[lighter].append(expert)
            sums[lighter] += loads[expert]
        first, second = (cut(tuple(sorted(half)), depth - 1) for half in halves)
        return Branch(experts, first.load + second.load, (first, second))

    return cut(tuple(range(len(loads))), depth)


@dataclass(frozen=True, slots=True)
class Share:
    """The branches that ranks compute, in order, with their owners, and how their sums are added up."""

    tree: Branch
    branches: tuple[Branch, ...]
    owners: tuple[int, ...]

    @classmethod
    def of(cls, tree: Branch, size: int) -> "Share":
        """Deal the leaves out in order, to each of so many ranks about as much to do.

        A rank sums a branch by itself if it has all of it.
        """
        owner, before = dict[tuple[int, ...], int](), 0.0
        for leaf in tree.leaves:
            owner[leaf.experts] = min(int((before + leaf.load / 2) / tree.load * size), size - 1)
            before += leaf.load
        found = list[tuple[Branch, int]]()

        def visit(branch: Branch) -> None:
            owners = {owner[leaf.experts] for leaf in branch.leaves}
            if branch.halves is None or len(owners) == 1:
                found.append((branch, owners.pop()))
            else:
                for half in branch.halves:
                    visit(half)

        visit(tree)
        return cls(tree, tuple(branch for branch, _ in found), tuple(each for _, each in found))

    def owner(self) -> dict[int, int]:
        """The rank of each expert, in the experts' order."""
        pairs = zip(self.branches, self.owners, strict=True)
        return dict(sorted((expert, owner) for branch, owner in pairs for expert in branch.experts))

    def of_rank(self, rank: int) -> list[int]:
        """The experts of a rank, in order."""
        return [expert for expert, owner in self.owner().items() if owner == rank]

    def total(self, sums: Sequence[Tensor]) -> Tensor:
        """The sum over all experts of the branches' `sums` [n, H]."""
        left = dict(zip((branch.experts for branch in self.branches), sums, strict=True))

        def add(branch: Branch) -> Tensor:
            if (found := left.get(branch.experts)) is not None:
                return found
            assert branch.halves is not None
            return add(branch.halves[0]) + add(branch.halves[1])

        return add(self.tree)


def shared(visits: Tensor, steps: int) -> Share:
    """How ranks share experts that so many tokens [N] have reached in so many steps, the same at all ranks."""
    return Share.of(grown((visits + UPDATE * steps).tolist()), here().size)


@torch.no_grad()
def foreseen(layer: CutLayer, steps: Sequence[Tensor]) -> Tensor:
    """[N] how many tokens the smaller router sends to each expert at the tokens [n] of some steps."""
    none = torch.zeros(layer.choices, dtype=torch.int64)
    return sum((_visits(layer, *layer.route(rows)) for rows in steps), start=none)


def _visits(layer: CutLayer, weights: Tensor, index: Tensor) -> Tensor:
    return torch.bincount(index[weights != 0], minlength=layer.choices).cpu()


def descend(layer: CutLayer, share: Share, rows: Tensor) -> Tensor:
    """Leave in every leaf the gradient of the tokens' weighted mean of ||y - y'||^2, of this rank's experts alone.

    The tokens at `rows` [n] are the same at all ranks. The router's leaves get theirs at all. A leaf that no token
    reaches gets none. Returns how many tokens [N] reach each expert.
    """
    weights, index = layer.route(rows)
    visits = _visits(layer, weights, index)
    if not bool(visits.any()):
        return visits
    inputs, targets, given = layer.inputs(rows), layer.targets(rows), weights.detach()
    own = [
        _Reached(expert, at, places, given[at, places, None], layer.put_out(expert, inputs.index_select(0, at)))
        for expert, at, places in routed(given, index, share.of_rank(here().rank))
    ]
    gap = share.total(_exchanged(share, own, targets)) - targets
    gradient = gap * (layer.token_weights(targets) * (2 / len(rows)))[:, None]
    pulls = [gradient.index_select(0, each.tokens) for each in own]
    slopes = torch.zeros_like(given)  # of a choice its expert's rank alone knows it
    for each, pull in zip(own, pulls, strict=True):
        slopes[each.tokens, each.places] = (pull * each.output.detach()).sum(-1)
    of_all = here().reducing(slopes) if weights.requires_grad else None
    for each, pull in zip(own, pulls, strict=True):
        if each.output.requires_grad:
            each.output.backward(pull * each.weights)
    if of_all is not None:
        weights.backward(of_all())
    return visits


@dataclass(frozen=True, slots=True)
class _Reached:
    """An expert at the m tokens and choices that reach it: their gate weights [m, 1], and its outputs before these."""

    expert: int
    tokens: Tensor
    places: Tensor
    weights: Tensor
    output: Tensor  # [m, H], or [H] of one that says the same to all


@torch.no_grad()
def _exchanged(share: Share, own: Sequence[_Reached], like: Tensor) -> list[Tensor]:
    """Of all branches the gate-weighted outputs [n, H], summed; this rank computes its own."""
    reached = {each.expert: each for each in own}

    def summed(branch: Branch) -> Tensor:
        if branch.halves is not None:
            return summed(branch.halves[0]) + summed(branch.halves[1])
        found = torch.zeros_like(like)
        for each in (reached[expert] for expert in branch.experts if expert in reached):
            found.index_add_(0, each.tokens, each.output * each.weights)
        return found

    pairs = zip(share.branches, share.owners, strict=True)
    sums = [summed(branch) if owner == here().rank else torch.empty_like(like) for branch, owner in pairs]
    here().spread(sums, share.owners)
    return sums
