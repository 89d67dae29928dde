"""Enumerate: keep the experts whose smaller layer puts out most nearly what the layer did (arXiv:2402.14800)."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain, combinations, product
from math import comb, prod
from typing import Any

import torch

from compressor.plugins import (
    RECONSTRUCTION,
    Block,
    CompressionError,
    KeptErrors,
    LayerPlan,
    LayerStatistics,
    Routed,
    blocks_of,
    option,
    relative_error,
    rounded,
    stable_argmin,
)

NEEDS = RECONSTRUCTION
SEARCHES = ("auto", "all", "greedy")
PROBES = 16  # experts taken out on trial to see whether that leaves other tokens as they are
STRAY_SHARE = 1e-3  # of tokens that may change there all the same: near ties that rounding decides

Kept = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Options:
    """All subsets are tried up to `most_subsets`; above that, experts go one by one, along `beam` best sets at once."""

    search: str = option("auto", help="all subsets, greedy, or auto: all up to most_subsets", choices=SEARCHES)
    beam: int = option(1, help="how many best sets the greedy search goes on with")
    most_subsets: int = option(5000, help="up to how many subsets all are tried")

    def __post_init__(self) -> None:
        for name in ("beam", "most_subsets"):
            if getattr(self, name) < 1:
                raise CompressionError(f"{name} is {getattr(self, name)}; it must be at least 1")


def _subsets(blocks: list[Block]) -> Iterator[Kept]:
    for chosen in product(*(combinations(block.free, block.take) for block in blocks)):
        yield tuple(sorted(chain(*chosen, *(block.fixed for block in blocks))))


def _ranked(errors: Mapping[Kept, float], noise: float) -> list[Kept]:
    """Kept sets, those of the least error first; equal ones in lexicographic order."""
    judged = rounded(torch.tensor([*errors.values()], dtype=torch.float64), noise).tolist()
    return [kept for _, kept in sorted(zip(judged, errors, strict=True))]


def _dense(routed: Routed, experts: int) -> torch.Tensor:
    """Gate weights by expert: -> [S, E]."""
    weights = torch.zeros(len(routed.weights), experts, device=routed.weights.device)
    return weights.scatter_add_(1, routed.experts, routed.weights)


class Greedy:
    """Backward elimination: from all experts to the kept ones, each time without those whose loss costs least."""

    def __init__(self, errors: KeptErrors, experts: int, blocks: list[Block]) -> None:
        self.errors, self.blocks, self.start = errors, blocks, tuple(range(experts))
        self.steps, self.tried = len(blocks[0].free) - blocks[0].take, 0
        self.local = len(blocks) == 1 and self.steps > 0 and self._is_local()

    def _is_local(self) -> bool:
        """Return True if a router without one expert treats the tokens that did not choose it as before.

        One that takes a softmax over all experts and does not normalise the chosen ones' shares does not; a table of
        expert ids does, for a lost expert's place goes to the lowest kept ones.
        """
        routed, strays, tokens = self.errors.kept(self.start), 0, 0
        before = _dense(routed, len(self.start))
        for gone in self.start[:: -(-len(self.start) // PROBES)]:
            left = tuple(expert for expert in self.start if expert != gone)
            changed = (_dense(self.errors.kept(left), len(self.start)) - before).abs().amax(1) > 1e-4 * before.amax(1)
            others = (routed.experts != gone).all(1)
            strays, tokens = strays + int((changed & others).sum()), tokens + int(others.sum())
        return strays <= STRAY_SHARE * tokens

    def _expand(self, kept: Kept) -> dict[Kept, float]:
        """Errors without one expert of every routing group, first the least used, exchanged till none gets better.

        With a local router, only tokens that had chosen an expert are routed anew without it.
        """
        routed, costs = self.errors.kept(kept), dict[Kept, float]()

        def error(smaller: Kept, gone: Kept) -> float:
            if not self.local:
                return float(self.errors.kept(smaller).errors.sum())
            rows = (routed.experts == gone[0]).any(1).nonzero().flatten()
            return float(routed.errors.index_copy(0, rows, self.errors.kept(smaller, rows).errors).sum())

        def best(tried: list[Kept]) -> Kept:
            smaller = {tuple(expert for expert in kept if expert not in gone): gone for gone in tried}
            costs.update({left: error(left, gone) for left, gone in smaller.items() if left not in costs})
            return smaller[_ranked({left: costs[left] for left in smaller}, self.errors.noise)[0]]

        shares = rounded(_dense(routed, len(self.start)).sum(0)).tolist()
        free = [sorted(set(block.free) & set(kept), key=lambda e: (shares[e], -e)) for block in self.blocks]
        gone, before = tuple(experts[0] for experts in free), set[Kept]()
        while gone not in before:  # equal ones might go round in circles
            before.add(gone)
            for place, experts in enumerate(free):
                gone = best([(*gone[:place], expert, *gone[place + 1 :]) for expert in experts])
        self.tried += len(costs)
        return costs

    def search(self, beam: int) -> Kept:
        """The best set found along so many sets at once; equal ones count in lexicographic order."""
        level = [self.start]
        for _ in range(self.steps):
            costs = {kept: error for each in level for kept, error in self._expand(each).items()}
            level = _ranked(costs, self.errors.noise)[:beam]
        return level[0]


def search(
    errors: KeptErrors, experts: int, blocks: list[Block], options: Options, count: int
) -> tuple[Kept, dict[str, Any]]:
    """The kept set of least error that all `count` subsets or greedy elimination lead to, and how it was found."""

    def best(tried: Iterable[Kept]) -> Kept:
        sets = sorted(tried)
        return sets[stable_argmin((float(errors.kept(kept).errors.sum()) for kept in sets), errors.noise)]

    if options.search == "all" or (options.search == "auto" and count <= options.most_subsets):
        return best(_subsets(blocks)), {"search": f"all {count} subsets"}
    greedy = Greedy(errors, experts, blocks)
    kept = best(greedy.search(beam) for beam in sorted({1, options.beam}))  # a beam may lose greedy's way
    wide = f", beam of {options.beam}" if options.beam > 1 else ""
    return kept, {"search": f"greedy backward{wide}", "subsets_tried": greedy.tried}


@torch.no_grad()
def plan(
    stats: LayerStatistics, keep: int, protected: frozenset[int] = frozenset(), options: Options = Options()
) -> LayerPlan:
    """Keep the subset of least reconstruction error; of a layer that no token reached, the lowest experts.

    Lu et al. 2024, arXiv:2402.14800. Every expert's output on the sampled tokens is computed once; a subset costs
    routing them again. Greedy backward elimination takes over where subsets are too many; ties go to lower experts.
    """
    blocks = blocks_of(stats.layer, keep, protected)
    count = prod(comb(len(block.free), block.take) for block in blocks)
    if options.search == "all" and count > options.most_subsets:
        raise CompressionError(
            f"{stats.layer.name}: {count} subsets are more than most_subsets={options.most_subsets}; raise it or "
            "choose search=greedy"
        )
    if len(stats.inputs):
        kept, how = search(KeptErrors(stats), stats.layer.experts, blocks, options, count)
    else:
        kept, how = next(_subsets(blocks)), {"search": "none: no token reached the layer"}
    layer_plan = LayerPlan.keep(stats.layer, kept, decided_by="reconstruction error")
    return replace(layer_plan, figures={"reconstruction_error": round(relative_error(stats, layer_plan), 6), **how})
