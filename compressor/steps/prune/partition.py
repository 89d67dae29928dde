"""Split experts into groups of alike experts: one solver for eq. 5 of arXiv:2407.09590.

E experts, G groups. Equation 5 minimises sum_i (within_i - across_i); within + across is the fixed
sum of all distances, so the same groups minimise the within-group sum alone: the objective here. Up
to `EXACT_LIMIT` free experts per routing block, dynamic programming over subsets proves the answer;
above that, agglomerative starts descend by single moves and swaps, and the best is perturbed
repeatedly. Labels [E] number each expert's group."""

import math
from collections.abc import Collection, Sequence
from typing import Literal

import torch
from torch import Tensor

from compressor.frozen import frozen
from compressor.tolerance import rounded, stable_argmin

# 3^12 subset pairs: a tenth of a second and 30 MB; each further expert triples both
EXACT_LIMIT = 14
# at 512 experts a few seconds; more gains a per cent or two where distances have no structure
KICKS = 128
KICKED_EXPERTS = 8
TOLERANCE = 1e-12  # a gain below this share of the cost it removes is rounding, and could cycle

Members = tuple[int, ...]  # experts of a group, ascending


@frozen
class Grouping:
    """A partition of the experts, with its cost.

    groups: every expert once, members ascending, groups ordered by their smallest member; without
    those of a block
        in which protected experts take all the groups.
    objective: sum of distances over unordered pairs within a group. exact: whether no partition
    under the same constraints is cheaper by more than rounding (`ties`); False means
        unproved, not worse.
    """

    groups: tuple[Members, ...]
    objective: float
    exact: bool


def group_experts(
    distances: Tensor,
    count: int,
    *,
    seed: int = 0,
    blocks: Sequence[Sequence[int]] | None = None,
    alone: Collection[int] = (),
    noise: Tensor | float = 0.0,
) -> Grouping:
    """Partition experts into `count` groups of least within-group distance (eq. 5): [E, E] ->
    Grouping.

    distances: symmetric, finite, none below 0. blocks: routing groups; no group crosses them and
    each gets count / len(blocks) groups. alone: protected experts, each a group of its own; where
    that leaves none for a block's others, these are dropped. noise: how far apart equal experts may
    come out by rounding, for each pair or for all; `rounded` says more."""
    table = distances.detach().cpu().double()
    table = (table / 2 + table.T / 2).fill_diagonal_(0)
    assert bool(table.isfinite().all()) and not bool((table < 0).any()), (
        "distances are finite, and none below 0"
    )
    generator = torch.Generator().manual_seed(seed)
    values = rounded(table, noise)
    partition = [range(len(table))] if blocks is None else blocks
    groups = []
    objective = cost = 0.0
    is_proved = True
    for block in partition:
        free = [expert for expert in sorted(block) if expert not in alone]
        groups += [(expert,) for expert in block if expert in alone]
        rest = count // len(partition) - (len(block) - len(free))
        assert 0 <= rest <= len(free), f"{rest} groups cannot be made of {len(free)} experts"
        if not rest:
            continue
        distances = values[free][:, free]
        is_small = len(free) <= EXACT_LIMIT
        labels = _solve(distances, rest) if is_small else search_labels(distances, rest, generator)
        is_proved &= is_small or is_least(distances, labels, rest)
        cost += labels_cost(distances, labels)
        objective += labels_cost(table[free][:, free], labels)
        for label in range(rest):
            members = (labels == label).nonzero().flatten().tolist()
            groups.append(tuple(free[member] for member in members))
    groups.sort()
    return Grouping(tuple(groups), objective, is_proved or cost == 0)


def _solve(distances: Tensor, count: int) -> Tensor:
    """Best labels; best[k, M] = min of w(S) + best[k-1, M - S] over S with M's top expert: [E, E]
    -> [E]."""
    experts = distances.shape[0]
    bits = (torch.arange(2**experts)[:, None] >> torch.arange(experts) & 1).double()
    # within-group sum of every subset, numbered as a bit mask
    weight = ((bits @ distances) * bits).sum(1) / 2
    best = torch.full((count + 1, weight.numel()), torch.inf, dtype=torch.float64)
    best[1, 1:] = weight[1:]
    # disjoint subsets, those of the lowest experts first
    inside = outside = torch.zeros(1, dtype=torch.long)
    for expert in range(experts - 2 if count > 2 else 0):
        inside = torch.cat((inside, inside + 2**expert, inside))
        outside = torch.cat((outside, outside, outside + 2**expert))
    for top in range(experts - 1):
        group = inside[: 3**top] + 2**top
        others = outside[: 3**top]
        # Experts above `top` form at most one group each, and the full set needs exactly `count`.
        for level in range(max(2, count - (experts - 1 - top)), min(count, top + 2)):
            best[level].scatter_reduce_(
                0, group + others, weight[group] + best[level - 1][others], "amin"
            )
    labels = torch.zeros(experts, dtype=torch.long)
    mask = 2**experts - 1
    for level in range(count, 1, -1):
        others = torch.arange(2 ** (mask.bit_length() - 1))
        others = others[(others & ~mask) == 0]
        costs = rounded(weight[mask - others] + best[level - 1][others])
        chosen = mask - int(others[costs.argmin()])
        labels[bits[chosen].bool()] = level - 1
        mask -= chosen
    return labels


def labels_cost(distances: Tensor, labels: Tensor) -> float:
    """Return the sum of distances within groups, over unordered pairs: [E, E], [E] -> scalar."""
    return float((distances * (labels[:, None] == labels)).sum()) / 2


def is_least(distances: Tensor, labels: Tensor, count: int) -> bool:
    """Return True if labels cost as little as the P shortest distances, P the fewest pairs `count`
    groups hold."""
    size, larger = divmod(len(labels), count)
    pairs = larger * math.comb(size + 1, 2) + (count - larger) * math.comb(size, 2)
    rows, columns = torch.triu_indices(len(labels), len(labels), 1)
    bound = float(distances[rows, columns].sort().values[:pairs].sum())
    return labels_cost(distances, labels) <= bound * (1 + TOLERANCE)


def search_labels(distances: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Good labels for many experts, the first found among equals: [E, E] -> [E]."""
    # the two groups with the least sum of distances are merged until `count` are left
    experts = distances.shape[0]
    links = distances.clone().fill_diagonal_(torch.inf)
    merged = torch.arange(experts)
    for _ in range(experts - count):
        keep, gone = sorted(divmod(int(links.argmin()), experts))
        links[keep] = links[:, keep] = links[keep] + links[gone]
        links[gone] = links[:, gone] = links[keep, keep] = torch.inf
        merged[merged == gone] = keep
    own = (merged == torch.arange(experts)).nonzero().flatten()
    starts = [torch.searchsorted(own, merged)]
    starts += [agglomerate(distances, count, linkage) for linkage in ("average", "complete")]
    tried = [_descend(distances, start, count) for start in starts]
    best = tried[stable_argmin(labels_cost(distances, labels) for labels in tried)]
    if is_least(distances, best, count):
        return best
    nearest = distances.argsort(dim=1, stable=True)[:, :KICKED_EXPERTS]
    for _ in range(KICKS):
        kicked = nearest[int(torch.randint(len(nearest), (1,), generator=generator))]
        shuffled = kicked[torch.randperm(len(kicked), generator=generator)]
        start = best.index_copy(0, kicked, best[shuffled])
        tried = [best, _descend(distances, start, count)]
        best = tried[stable_argmin(labels_cost(distances, labels) for labels in tried)]
    return best


def agglomerate(distances: Tensor, count: int, linkage: Literal["average", "complete"]) -> Tensor:
    """Return labels of `count` clusters, in the order of their lowest members, by scikit-learn: [E,
    E] -> [E].

    Nothing is random, and equally near pairs are joined in a fixed order, from the lowest position
    on."""
    from sklearn.cluster import AgglomerativeClustering

    if count == len(distances):  # of a single point scikit-learn makes no cluster
        return torch.arange(count)
    clustering = AgglomerativeClustering(count, metric="precomputed", linkage=linkage)
    labels = clustering.fit_predict(distances.numpy()).tolist()
    order = list(dict.fromkeys(labels))
    return torch.tensor([order.index(label) for label in labels])


def _descend(distances: Tensor, start: Tensor, count: int) -> Tensor:
    """Follow best improvements until no move or swap helps: [E, E], [E] -> [E]."""
    labels = start.clone()
    experts = labels.numel()
    table = torch.zeros(experts, count, dtype=torch.float64).index_add_(1, labels, distances)
    for _ in range(50 * experts):
        current = table.gather(1, labels[:, None])
        # expert e to group g gains table[e, g] - table[e, own], unless it leaves none behind
        gain = (table - current).scatter_(1, labels[:, None], torch.inf)
        gain[labels.bincount(minlength=count)[labels] == 1] = torch.inf
        expert, group = divmod(int(gain.argmin()), count)
        changes = [(expert, group)]
        if gain[expert, group] >= -TOLERANCE * current[expert]:
            # experts u, v trade groups: A + A^T - 2 D, A[u, v] = t[u, v's] - t[u, u's]
            gain = table[:, labels] - current
            gain = (gain + gain.T).sub_(distances, alpha=2)
            gain.masked_fill_(labels[:, None] == labels, torch.inf)
            first, second = divmod(int(gain.argmin()), experts)
            if gain[first, second] >= -TOLERANCE * (current[first] + current[second]):
                break
            changes = [(first, int(labels[second])), (second, int(labels[first]))]
        touched = {group for _, group in changes}
        for expert, group in changes:
            touched.add(int(labels[expert]))
            labels[expert] = group
        for group in touched:  # summed afresh, so that rounding does not pile up
            table[:, group] = distances[:, labels == group].sum(dim=1)
    return labels
