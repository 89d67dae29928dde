"""REAM: experts join the salient ones most like them, a few groups taking all (Jha et al. 2026,
arXiv:2604.04356).

REAP's scores (arXiv:2510.13999) choose the centroids. From the most salient on, each takes the
experts nearest to it until its group has `group_size` (the paper's C = 16, for 128 experts), so
that most centroids stay as they are. Near is the mean of two similarities in [0, 1]: of the router
logits over the tokens, 1 - d / largest d between their unit vectors, and of the gated outputs, (1 +
cosine) / 2. A gate scales out of a token's own cosine, so, as in the authors' program, outputs
times softmax(logits) are compared in their mean over the tokens. A group is averaged by saliency,
an expert that no token reached counting like the least one that some did, after its neurons are put
in the centroid's order; the router keeps the centroid's row. Two things are our reading: neurons
are matched by weights alone, the authors match activations too, and each expert's saliency is over
all tokens and not a mean over batches."""

import torch
from pydantic import Field, field_validator
from torch import Tensor
from torch.nn.functional import normalize

from compressor.plugins import (
    FLOAT32,
    CompressionError,
    Group,
    LayerPlan,
    LayerStatistics,
    NamedOptions,
    as_float64,
    closeness,
    competing,
    float64_device,
    pairwise_distances,
    rounded,
)
from strategies.ranked import keep_salient, mean_over_routed

NEEDS = frozenset({"gated_norm_sum", "routed_count", "expert_outputs", "router_logits"})


class Options(NamedOptions):
    """Size and merging of groups."""

    group_size: int = Field(16, ge=0)
    """Most experts in a group, 2 or more. 0 sends each to its nearest centroid."""
    align: bool = True
    """Put neurons in the order of the centroid's first."""
    merge_routers: bool = False
    """Merge router rows, too, instead of keeping the centroid's."""

    @field_validator("group_size")
    @classmethod
    def _no_lone_expert(cls, size: int) -> int:
        if size == 1:
            raise ValueError("group_size is 1; it must be 2 or more, or 0 for no limit")
        return size


def similarity(stats: LayerStatistics, options: Options = Options()) -> tuple[str, Tensor]:
    """Similarity of the experts, for a report too: a label, and [E, E] from 0 to 1."""
    logits = as_float64(stats.router_logits)
    outputs = stats.expert_outputs
    router = closeness(pairwise_distances(normalize(logits, dim=0).T)).cpu()
    gates = logits.softmax(dim=1).to(float64_device(outputs.device))
    means = [gates[:, expert] @ as_float64(output) for expert, output in enumerate(outputs)]
    directions = normalize(torch.stack(means), dim=1)  # a mean's scale does not count
    gated = ((1 + directions @ directions.T) / 2).clamp(0, 1).cpu()
    return "similarity of gated outputs and router logits", torch.stack([router, gated]).mean(dim=0)


def grouped(
    table: Tensor, centroids: list[int], others: list[int], group_size: int
) -> dict[int, list[int]]:
    """Members by centroid, itself first; centroids are in the order in which they may choose,
    similarity is [E, E].

    Ties go to the lower expert. The groups must have room for all: len(centroids) * (group_size -
    1) >= len(others)."""
    values = rounded(table, FLOAT32)
    groups = {head: [head] for head in centroids}
    if centroids and not group_size:
        for expert in others:
            groups[max(sorted(centroids), key=lambda head: float(values[head, expert]))].append(
                expert
            )
        return groups
    free = sorted(others)
    for head in centroids:
        nearest = sorted(free, key=lambda expert: -float(values[head, expert]))[: group_size - 1]
        groups[head] += nearest
        free = [expert for expert in free if expert not in nearest]
    return groups


def score(stats: LayerStatistics, options: Options = Options()) -> Tensor:
    """REAP's saliency: [E]."""
    return mean_over_routed(stats.gated_norm_sum, stats.routed_count).cpu()


@torch.no_grad()
def plan(
    stats: LayerStatistics,
    keep: int,
    protected: frozenset[int] = frozenset(),
    options: Options = Options(),
) -> LayerPlan:
    """Keep the most salient experts of each routing group and merge the others into a few;
    protected stay alone.

    Where protected experts take every place, the others are dropped. Raises `CompressionError`
    where the groups of `group_size` have no room for all."""
    saliency = score(stats)
    kept = {group.members[0] for group in keep_salient(stats, saliency, keep, protected, "").groups}
    _, table = similarity(stats)
    order = rounded(saliency)
    reached = saliency[saliency > 0]
    weights = saliency.where(saliency > 0, reached.min() if len(reached) else 1.0).tolist()
    groups = [Group.single(expert) for expert in sorted(kept & protected)]
    joined = []
    for block in competing(stats.layer):
        heads = [expert for expert in block if expert in kept - protected]
        heads.sort(key=lambda expert: -float(order[expert]))
        others = [expert for expert in block if expert not in kept]
        if heads and options.group_size and len(others) > len(heads) * (options.group_size - 1):
            raise CompressionError(
                f"{stats.layer.name}: {len(heads)} groups of at most {options.group_size} have no "
                f"room for {len(heads) + len(others)} experts; raise group_size or keep more"
            )
        for head, members in grouped(table, heads, others, options.group_size).items():
            members.sort()
            joined += [float(table[head, expert]) for expert in members if expert != head]
            total = sum(weights[expert] for expert in members)
            shares = tuple(weights[expert] / total for expert in members)
            rows = (
                shares
                if options.merge_routers
                else tuple(float(expert == head) for expert in members)
            )
            aligned_to = head if options.align and len(members) > 1 else None
            groups.append(Group(tuple(members), shares, rows, head=aligned_to))
    figures: dict[str, float] = {"largest_group": max(len(group.members) for group in groups)}
    if joined:
        figures["mean_similarity"] = round(sum(joined) / len(joined), 6)
    by = "REAP's saliency, gated outputs and router logits"
    return LayerPlan.of(stats.layer, groups, decided_by=by, figures=figures)
