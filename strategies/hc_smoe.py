"""HC-SMoE: cluster experts bottom-up by mean output, then merge by routed tokens (Chen et al. 2025,
arXiv:2410.08589).

Two clusters are as far apart as their experts' mean outputs are on average. The paper keeps a
router row for every former expert; a stock model has one for each that is left, so rows are merged
alongside. Unlike the data-centric grouping, a merge made early is never undone."""

import torch

from compressor.plugins import (
    LayerPlan,
    LayerStatistics,
    MergeMethod,
    MergeOptions,
    agglomerate,
    blocks_of,
    rounded,
)
from strategies.data_centric import distances

NEEDS = frozenset({"expert_outputs"})


class Options(MergeOptions):
    """Merging of clusters."""

    merge: MergeMethod = "frequency"
    """How a group becomes one expert."""


@torch.no_grad()
def plan(
    stats: LayerStatistics,
    keep: int,
    protected: frozenset[int] = frozenset(),
    options: Options = Options(),
) -> LayerPlan:
    """Cluster within each routing group, then merge every cluster; protected experts stay alone."""
    table, noise = distances(stats.expert_outputs, "mean-output")
    table = table.cpu()
    values = rounded(table, noise)
    clusters: list[list[int]] = []
    for block in blocks_of(stats.layer, keep, protected):
        clusters += [[expert] for expert in block.fixed]
        if block.take:  # else protected experts take all places, and the others are dropped
            free = list(block.free)
            labels = agglomerate(values[free][:, free], block.take, "average")
            for label in range(block.take):
                positions = (labels == label).nonzero().flatten().tolist()
                clusters.append([free[position] for position in positions])
    within = sum(float(table[members][:, members].sum()) / 2 for members in clusters)
    figures = {"within_group_distance": round(within, 6), "largest_group": max(map(len, clusters))}
    return options.merged(
        stats, clusters, decided_by="mean outputs, average linkage", figures=figures
    )
