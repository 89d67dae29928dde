"""HOPE: delete the set of experts that costs least together, p'Fp with p 1 for a deleted expert and 0 for a kept one.

Tseng et al. 2026, arXiv:2609.18916: experts that stand in for each other must not both go. With gate weight g and
output f, over tokens t that chose both experts:
outputs: F_ef = sum_t <g_e f_e, g_f f_f>, so that p'Fp is the squared error of deleting p, weights staying as they are;
norms, as published: F_ef = mean_t ||g_e f_e|| ||g_f f_f||, 0 for experts that no token chose together.
Up to 5,000 sets all are tried. Beyond, the set grows by the expert that adds least, then experts are exchanged while
that gains, some E^2 to E^3 additions for E experts; the paper relaxes p to [0, 1] and rounds.
"""

import math
from dataclasses import dataclass
from itertools import chain, combinations, product

import torch
from torch import Tensor

from compressor.plugins import (
    ROUNDING,
    CompressionError,
    LayerPlan,
    LayerStatistics,
    blocks_of,
    option,
    rounded,
)

MOST_SETS = 5_000  # that are all tried

INTERACTIONS = {"outputs": frozenset({"pair_product_sum"}), "norms": frozenset({"pair_norm_sum", "pair_count"})}

NEEDS = INTERACTIONS["outputs"]


@dataclass(frozen=True, slots=True)
class Options:
    """What two experts have in common."""

    interaction: str = option(
        "outputs", help="what two experts have in common: outputs, or the published norms", choices=INTERACTIONS
    )


def needs(options: Options) -> frozenset[str]:
    """The sums over pairs of experts."""
    return INTERACTIONS[options.interaction]


def plan(
    stats: LayerStatistics, keep: int, protected: frozenset[int] = frozenset(), options: Options = Options()
) -> LayerPlan:
    """Keep `keep` experts, equally many of each routing group; of equal sets the one that keeps lower experts."""
    table = stats.pair_product_sum if options.interaction == "outputs" else _mean_products(stats)
    if not bool(table.isfinite().all()):
        raise CompressionError(
            f"{stats.layer.name}: experts' outputs are not finite on the calibration data; try --dtype float32"
        )
    sets = [(block.free, len(block.free) - block.take) for block in blocks_of(stats.layer, keep, protected)]
    if math.prod(math.comb(len(free), count) for free, count in sets) <= MOST_SETS:
        deleted = _cheapest(table, sets)
    else:
        deleted = exchanged(table, grown(table, sets), [free for free, _ in sets])
    kept = (~deleted).nonzero().flatten().tolist()
    total, cost = float(table.sum()), _cost(table, deleted)
    share = round(cost / total, 6) if total > 0 else 0.0
    return LayerPlan.keep(stats.layer, kept, decided_by="hope", figures={"deleted_share": share})


def _mean_products(stats: LayerStatistics) -> Tensor:
    counts = stats.pair_count
    return torch.where(counts > 0, stats.pair_norm_sum / counts.where(counts > 0, 1), 0)


def _cost(table: Tensor, deleted: Tensor) -> float:
    return float(table[deleted][:, deleted].sum())


def _cheapest(table: Tensor, sets: list[tuple[tuple[int, ...], int]]) -> Tensor:
    """Try all ways to delete so many of the experts of each set: -> [E]; of equal ones the highest experts go."""
    ways = [[*chain(*way)] for way in product(*(combinations(free, count) for free, count in sets))]
    tried = torch.zeros(len(ways), len(table), dtype=torch.float64)
    tried.scatter_(1, torch.tensor(ways, dtype=torch.long).view(len(ways), -1), 1.0)
    costs = rounded(((tried @ table) * tried).sum(1))
    return tried[(costs == costs.min()).nonzero().flatten()[-1]].bool()


def grown(table: Tensor, sets: list[tuple[tuple[int, ...], int]]) -> Tensor:
    """Delete so many of the experts of each set, one by one, always the one that adds least: -> [E], which are."""
    deleted, rest = torch.zeros(len(table), dtype=torch.bool), [count for _, count in sets]
    for _ in range(sum(rest)):
        added = table.diagonal() + 2 * table[:, deleted].sum(1)
        open_to = torch.zeros_like(deleted)
        for place, (free, _) in enumerate(sets):
            open_to[list(free)] = rest[place] > 0
        candidates = (open_to & ~deleted).nonzero().flatten()
        least = rounded(added[candidates])
        chosen = int(candidates[(least == least.min()).nonzero().flatten()[-1]])  # of equal ones the higher goes
        deleted[chosen] = True
        rest = [count - (chosen in free) for count, (free, _) in zip(rest, sets, strict=True)]
    return deleted


def exchanged(table: Tensor, deleted: Tensor, sets: list[tuple[int, ...]]) -> Tensor:
    """Exchange a deleted expert for a kept one of its set, always where it gains most, until none gains."""
    deleted = deleted.clone()
    while True:
        shared, best = table[:, deleted].sum(1), (-ROUNDING * abs(_cost(table, deleted)), -1, -1)
        for free in map(torch.tensor, sets):
            gone, stay = free[deleted[free]], free[~deleted[free]]
            if not len(gone) or not len(stay):
                continue
            back = table.diagonal()[gone] - 2 * shared[gone]
            change = back[:, None] + (table.diagonal() + 2 * shared)[stay] - 2 * table[gone][:, stay]
            place = int(change.argmin())
            if (least := float(change.flatten()[place])) < best[0]:
                best = least, int(gone[place // len(stay)]), int(stay[place % len(stay)])
        if best[1] < 0:
            return deleted
        deleted[best[1]], deleted[best[2]] = False, True
