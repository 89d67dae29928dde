"""Router-guided: merge experts into the frequent expert whose router logits are most alike
(arXiv:2310.01334)."""

import torch
from torch import Tensor

from compressor.plugins import (
    LayerPlan,
    LayerStatistics,
    MergeMethod,
    MergeOptions,
    as_float64,
    competing,
    keep_best,
)
from strategies.ream import grouped

NEEDS = frozenset({"routed_count", "router_logits"})


class Options(MergeOptions):
    """`align` puts neurons in the dominant expert's order; unless `merge_routers`, only its router
    row stays."""

    merge: MergeMethod = "frequency"
    """How a group becomes one expert."""
    merge_routers: bool = False
    """Merge router rows, too, instead of keeping the leading expert's."""
    align: bool = True
    """Put neurons in the order of the leading expert's first."""


def score(stats: LayerStatistics, options: Options) -> Tensor:
    """Tokens routed to each expert: [E]."""
    return stats.routed_count


def similarities(logits: Tensor) -> Tensor:
    """Cosine of every two experts' router logits over the tokens: [S, E] -> [E, E]; 0 without
    tokens."""
    columns = torch.nn.functional.normalize(as_float64(logits), dim=0)
    return columns.T @ columns


@torch.no_grad()
def plan(
    stats: LayerStatistics,
    keep: int,
    protected: frozenset[int] = frozenset(),
    options: Options = Options(),
) -> LayerPlan:
    """Keep the experts with most routed tokens of each routing block and merge the others into
    them.

    Without sampled tokens all are equally alike: the first dominant expert takes them.
    """
    kept = keep_best(stats, stats.routed_count, keep, protected)
    dominant = frozenset(group.members[0] for group in kept.groups)
    table = similarities(stats.router_logits).cpu()
    groups = {head: [head] for head in sorted(dominant)}
    for block in competing(stats.layer):
        heads = [expert for expert in block if expert in dominant - protected]
        others = [expert for expert in block if expert not in dominant]
        groups |= grouped(table, heads, others, 0)
    joined = [
        float(table[expert, head]) for head, members in groups.items() for expert in members[1:]
    ]
    figures = {"mean_similarity": round(sum(joined) / len(joined), 6)} if joined else {}
    return options.merged(stats, list(groups.values()), decided_by="router_logits", figures=figures)
