"""Enumerate: keep the experts with which the layer's output is closest to the base layer's
(arXiv:2402.14800)."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import chain, combinations, product
from math import comb, prod
from typing import Any

import torch

from compressor.plugins import (
    RECONSTRUCTION,
    Block,
    KeptErrors,
    LayerPlan,
    LayerStatistics,
    NamedOptions,
    Routed,
    blocks_of,
    relative_error,
    rounded,
    stable_argmin,
)

NEEDS = RECONSTRUCTION
PROBES = 16  # experts taken out on trial to see whether that leaves other tokens as they are
STRAY_SHARE = 1e-3  # of tokens that may change there all the same: near ties that rounding decides

Kept = tuple[int, ...]


class Options(NamedOptions):
    """Number of subsets up to which all are tried; beyond, experts go one by one."""

    most_subsets: int = 5000
    """Number of subsets up to which all are tried. Beyond, experts go one by one."""


def count_subsets(blocks: list[Block]) -> int:
    """Number of sets of experts that can be kept."""
    return prod(comb(len(block.free), block.take) for block in blocks)


def subsets(blocks: list[Block]) -> Iterator[Kept]:
    """Sets of experts that can be kept, in lexicographic order where there is one block."""
    choices = [combinations(block.free, block.take) for block in blocks]
    fixed = [block.fixed for block in blocks]
    for chosen in product(*choices):
        yield tuple(sorted(chain(*chosen, *fixed)))


def _least(errors: Mapping[Kept, float], noise: float) -> Kept:
    """The kept set of least error; of equal ones the first in lexicographic order."""
    ordered = sorted(errors)
    return ordered[stable_argmin([errors[kept] for kept in ordered], noise)]


def _dense(routed: Routed, experts: int) -> torch.Tensor:
    """Gate weights by expert: -> [S, E]."""
    weights = torch.zeros(len(routed.weights), experts, device=routed.weights.device)
    return weights.scatter_add_(1, routed.experts, routed.weights)


def _without_one(
    errors: KeptErrors, kept: Kept, experts: int, blocks: list[Block], local: bool
) -> dict[Kept, float]:
    """Errors without one expert of every routing group, first the least used, exchanged till none
    gets better.

    With a `local` router, only tokens that had chosen an expert are routed anew without it.
    """
    routed = errors.kept(kept)
    costs = {}

    def error(smaller: Kept, gone: Kept) -> float:
        if not local:
            return float(errors.kept(smaller).errors.sum())
        rows = (routed.experts == gone[0]).any(1).nonzero().flatten()
        return float(routed.errors.index_copy(0, rows, errors.kept(smaller, rows).errors).sum())

    def best(tried: list[Kept]) -> Kept:
        """Return the experts, one of each group, without which the error is least."""
        gone_of = {}
        for gone in tried:
            smaller = tuple(expert for expert in kept if expert not in gone)
            gone_of[smaller] = gone
            if smaller not in costs:
                costs[smaller] = error(smaller, gone)
        return gone_of[_least({smaller: costs[smaller] for smaller in gone_of}, errors.noise)]

    shares = rounded(_dense(routed, experts).sum(0)).tolist()
    free = [
        sorted({*block.free} & {*kept}, key=lambda expert: (shares[expert], -expert))
        for block in blocks
    ]
    gone = tuple(group[0] for group in free)
    before = set[Kept]()
    while gone not in before:  # equal ones might go round in circles
        before.add(gone)
        for place, group in enumerate(free):
            gone = best([(*gone[:place], expert, *gone[place + 1 :]) for expert in group])
    return costs


@torch.no_grad()
def plan(
    stats: LayerStatistics,
    keep: int,
    protected: frozenset[int] = frozenset(),
    options: Options = Options(),
) -> LayerPlan:
    """Keep the subset of least reconstruction error; of a layer that no token reached, the lowest
    experts.

    Lu et al. 2024, arXiv:2402.14800. Every expert's output on the sampled tokens is computed once;
    a subset costs routing them again. Greedy backward elimination takes over where subsets are too
    many; ties go to lower experts."""
    blocks = blocks_of(stats.layer, keep, protected)
    experts = stats.layer.experts
    count = count_subsets(blocks)
    search: dict[str, Any]
    if not len(stats.inputs):
        kept = next(subsets(blocks))
        search = {"search": "none: no token reached the layer"}
    elif count <= options.most_subsets:
        errors = KeptErrors(stats)
        costs = {subset: float(errors.kept(subset).errors.sum()) for subset in subsets(blocks)}
        kept = _least(costs, errors.noise)
        search = {"search": f"all {count} subsets"}
    else:
        errors = KeptErrors(stats)
        kept = tuple(range(experts))
        local = len(blocks) == 1
        if local:
            # Does a router without one expert treat the tokens that did not choose it as before?
            # One that takes a softmax over all experts and does not normalise the chosen ones'
            # shares does not; a table of expert ids does, for a lost expert's place goes to the
            # lowest kept ones.
            routed = errors.kept(kept)
            before = _dense(routed, experts)
            strays = tokens = 0
            for gone in range(experts)[:: -(-experts // PROBES)]:
                rest = errors.kept([expert for expert in range(experts) if expert != gone])
                changed = (_dense(rest, experts) - before).abs().amax(1) > 1e-4 * before.amax(1)
                others = (routed.experts != gone).all(1)
                strays += int((changed & others).sum())
                tokens += int(others.sum())
            local = strays <= STRAY_SHARE * tokens
        tried = 0
        for _ in range(len(blocks[0].free) - blocks[0].take):
            costs = _without_one(errors, kept, experts, blocks, local)
            kept = _least(costs, errors.noise)
            tried += len(costs)
        search = {"search": "greedy backward", "subsets_tried": tried}
    chosen = LayerPlan.keep(stats.layer, kept, decided_by="reconstruction error")
    return replace(
        chosen, figures={"reconstruction_error": round(relative_error(stats, chosen), 6), **search}
    )
