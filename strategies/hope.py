"""HOPE: delete the set of experts that costs least together, p'Fp with p 1 for a deleted expert and
0 for a kept one.

Tseng et al. 2026, arXiv:2609.18916: experts that stand in for each other must not both go. With
gate weight g and output f, over tokens t that chose both experts: outputs: F_ef = sum_t <g_e f_e,
g_f f_f>, so that p'Fp is the squared error of deleting p, weights staying as they are; norms, as
published: F_ef = mean_t ||g_e f_e|| ||g_f f_f||, 0 for experts that no token chose together. Up to
5,000 sets all are tried. Beyond, the set grows by the expert that adds least, then experts are
exchanged while that gains, some E^2 to E^3 additions for E experts; the paper relaxes p to [0, 1]
and rounds."""

from typing import Literal

import torch
from torch import Tensor

from compressor.plugins import (
    ROUNDING,
    Block,
    CompressionError,
    LayerPlan,
    LayerStatistics,
    NamedOptions,
    blocks_of,
    rounded,
)
from strategies.enumerate_subsets import count_subsets, subsets

MOST_SETS = 5_000  # that are all tried

INTERACTIONS = {
    "outputs": frozenset({"pair_product_sum"}),
    "norms": frozenset({"pair_norm_sum", "pair_count"}),
}

NEEDS = INTERACTIONS["outputs"]


class Options(NamedOptions):
    """Measure of what two experts have in common."""

    interaction: Literal["outputs", "norms"] = "outputs"
    """What two experts have in common. norms are the published ones."""


def needs(options: Options) -> frozenset[str]:
    """The sums over pairs of experts."""
    return INTERACTIONS[options.interaction]


def plan(
    stats: LayerStatistics,
    keep: int,
    protected: frozenset[int] = frozenset(),
    options: Options = Options(),
) -> LayerPlan:
    """Keep `keep` experts, equally many of each routing group; of equal sets the one that keeps
    lower experts."""
    if options.interaction == "outputs":
        table = stats.pair_product_sum
    else:
        counts = stats.pair_count
        table = torch.where(counts > 0, stats.pair_norm_sum / counts.where(counts > 0, 1), 0)
    if not bool(table.isfinite().all()):
        raise CompressionError(
            f"{stats.layer.name}: experts' outputs are not finite on the calibration data; try "
            "--dtype float32"
        )
    blocks = blocks_of(stats.layer, keep, protected)
    if count_subsets(blocks) <= MOST_SETS:
        subsets_kept = torch.tensor([*subsets(blocks)], dtype=torch.long)
        sets = torch.ones(len(subsets_kept), len(table), dtype=torch.float64)
        sets.scatter_(1, subsets_kept, 0.0)
        # of equal ones the highest experts go
        deleted = sets[int(rounded(((sets @ table) * sets).sum(1)).argmin())].bool()
    else:
        deleted = cheapest(table, blocks)
    kept = (~deleted).nonzero().flatten().tolist()
    total = float(table.sum())
    share = round(float(table[deleted][:, deleted].sum()) / total, 6) if total > 0 else 0.0
    return LayerPlan.keep(stats.layer, kept, decided_by="hope", figures={"deleted_share": share})


def cheapest(table: Tensor, blocks: list[Block]) -> Tensor:
    """Delete experts one by one, always the one that adds least, until each block has its number,
    then exchange a deleted one for a kept one of its block, always where it gains most, until none
    gains: -> [E], which are deleted."""
    deleted = torch.zeros(len(table), dtype=torch.bool)
    while True:
        candidates = torch.zeros_like(deleted)
        for block in blocks:
            free = list(block.free)
            candidates[free] = ~deleted[free] & bool((~deleted[free]).sum() > block.take)
        experts = candidates.nonzero().flatten()
        if not len(experts):
            break
        added = rounded((table.diagonal() + 2 * table[:, deleted].sum(1))[experts])
        deleted[experts[added == added.min()][-1]] = True  # of equal ones the higher goes
    while True:
        shared = table[:, deleted].sum(1)
        least = -ROUNDING * abs(float(shared[deleted].sum()))
        best: tuple[int, int] | None = None
        for block in blocks:
            inside = torch.tensor(block.free, dtype=torch.long)
            gone = inside[deleted[inside]]
            stay = inside[~deleted[inside]]
            back = table.diagonal()[gone] - 2 * shared[gone]
            forth = table.diagonal()[stay] + 2 * shared[stay]
            change = back[:, None] + forth - 2 * table[gone][:, stay]
            if change.numel() and float(change.min()) < least:
                least = float(change.min())
                position = int(change.argmin())
                best = int(gone[position // len(stay)]), int(stay[position % len(stay)])
        if best is None:
            return deleted
        deleted[best[0]] = False
        deleted[best[1]] = True
