"""Good groups of many experts: several starts descend by single moves, swaps and regroupings; the best is kicked.

E experts, G groups. Labels [E] number each expert's group.
"""

import torch
from torch import Tensor

from compressor.ties import least

RANDOM_STARTS = 4
KICKS = 128  # at 512 experts a few seconds; more gains a per cent or two where distances have no structure
KICKED_EXPERTS = 8
TOLERANCE = 1e-12  # a gain below this share of the cost it removes is rounding, and could cycle

Changes = list[tuple[int, int]]  # (expert, its new group)


def cost(distances: Tensor, labels: Tensor) -> float:
    """Within-group sum over unordered pairs: [E, E], [E] -> scalar."""
    return float((distances * (labels[:, None] == labels)).sum()) / 2


def is_least(distances: Tensor, labels: Tensor, count: int) -> bool:
    """Whether labels cost as little as the P shortest distances, P the fewest pairs `count` groups hold."""
    size, larger = divmod(len(labels), count)
    pairs = larger * size * (size + 1) // 2 + (count - larger) * size * (size - 1) // 2
    upper = torch.triu_indices(len(labels), len(labels), 1)
    bound = float(distances[upper[0], upper[1]].sort().values[:pairs].sum())
    return cost(distances, labels) <= bound * (1 + TOLERANCE)


def search(distances: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Good labels for many experts, the first found among equals: [E, E] -> [E]."""
    starts = [_agglomerate(distances, count, linkage) for linkage in ("sum", "average", "complete")]
    starts += [_scatter(distances, count, generator) for _ in range(RANDOM_STARTS)]
    best = _cheapest(distances, [_descend(distances, start, count) for start in starts])
    nearest = distances.argsort(dim=1, stable=True)[:, :KICKED_EXPERTS]
    for _ in range(0 if is_least(distances, best, count) else KICKS):
        kicked = nearest[int(torch.randint(len(nearest), (1,), generator=generator))]
        shuffled = kicked[torch.randperm(len(kicked), generator=generator)]
        best = _cheapest(distances, [best, _descend(distances, best.index_copy(0, kicked, best[shuffled]), count)])
    return best


def _cheapest(distances: Tensor, found: list[Tensor]) -> Tensor:
    """The labels [E] of least cost, the first of equal ones."""
    return found[least(cost(distances, labels) for labels in found)]


def _agglomerate(distances: Tensor, count: int, linkage: str) -> Tensor:
    """Merge the closest two groups until `count` are left: [E, E] -> [E]."""
    experts = distances.shape[0]
    links = distances.clone().fill_diagonal_(torch.inf)
    sizes = torch.ones(experts, dtype=torch.float64)
    labels = torch.arange(experts)
    for _ in range(experts - count):
        keep, gone = sorted(divmod(int(links.argmin()), experts))
        if linkage == "complete":
            merged = torch.maximum(links[keep], links[gone])
        elif linkage == "average":
            merged = (sizes[keep] * links[keep] + sizes[gone] * links[gone]) / (sizes[keep] + sizes[gone])
        else:
            merged = links[keep] + links[gone]
        links[keep] = links[:, keep] = merged
        links[gone] = links[:, gone] = links[keep, keep] = torch.inf
        sizes[keep] += sizes[gone]
        labels[labels == gone] = keep
    return torch.searchsorted((labels == torch.arange(experts)).nonzero().flatten(), labels)


def _scatter(distances: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Farthest-point seeds, then each expert to the group it adds least to: [E, E] -> [E]."""
    experts = distances.shape[0]
    labels = torch.full((experts,), -1)
    table = torch.zeros(experts, count, dtype=torch.float64)
    reach = torch.full((experts,), torch.inf, dtype=torch.float64)
    seed = int(torch.randint(experts, (1,), generator=generator))
    for label in range(count):
        labels[seed] = label
        table[:, label] = distances[seed]
        reach = torch.minimum(reach, distances[seed]).index_fill(0, torch.tensor(seed), -torch.inf)
        seed = int(reach.argmax())
    for expert in torch.randperm(experts, generator=generator).tolist():
        if labels[expert] < 0:
            labels[expert] = label = int(table[expert].argmin())
            table[:, label] += distances[expert]
    return labels


def _descend(distances: Tensor, start: Tensor, count: int) -> Tensor:
    """Follow best improvements until no move, swap or regrouping helps: [E, E], [E] -> [E]."""
    labels = start.clone()
    table = torch.zeros(labels.numel(), count, dtype=torch.float64).index_add_(1, labels, distances)
    for _ in range(50 * labels.numel()):
        changes = _best_move(table, labels) or _best_swap(distances, table, labels) or _best_regrouping(table, labels)
        if not changes:
            break
        touched = {int(labels[expert]) for expert, _ in changes} | {group for _, group in changes}
        for expert, group in changes:
            labels[expert] = group
        for group in touched:  # summed afresh, so that rounding does not pile up
            table[:, group] = distances[:, (labels == group).nonzero().flatten()].sum(dim=1)
    return labels


def _best_move(table: Tensor, labels: Tensor) -> Changes:
    """Expert e to group g, gain table[e, g] - table[e, own]: [E, G], [E] -> one change, or none."""
    own = table.gather(1, labels[:, None])
    lonely = labels.bincount(minlength=table.shape[1])[labels] == 1
    gain = (table - own).scatter_(1, labels[:, None], torch.inf).masked_fill_(lonely[:, None], torch.inf)
    expert, group = divmod(int(gain.argmin()), table.shape[1])
    return [(expert, group)] if gain[expert, group] < -TOLERANCE * own[expert] else []


def _best_swap(distances: Tensor, table: Tensor, labels: Tensor) -> Changes:
    """Experts u, v trade groups: gain A + A^T - 2 D, A[u, v] = t[u, v's] - t[u, u's]: changes or none."""
    own = table.gather(1, labels[:, None])
    gain = table[:, labels] - own
    gain = (gain + gain.T).sub_(distances, alpha=2).masked_fill_(labels[:, None] == labels, torch.inf)
    one, two = divmod(int(gain.argmin()), labels.numel())
    better = gain[one, two] < -TOLERANCE * (own[one] + own[two])
    return [(one, int(labels[two])), (two, int(labels[one]))] if better else []


def _best_regrouping(table: Tensor, labels: Tensor) -> Changes:
    """Merge groups a, b and set one expert e apart in the freed group: [E, G], [E] -> changes, or none."""
    count = table.shape[1]
    own = table.gather(1, labels[:, None]).flatten()
    between = torch.zeros(count, count, dtype=torch.float64).index_add_(0, labels, table)
    between.fill_diagonal_(torch.inf)  # distances across every two groups
    outside = between.clone()
    heaviest = int(own.argmax())
    outside[labels[heaviest]] = outside[:, labels[heaviest]] = torch.inf
    inside = between[labels] - own[:, None] - table  # e stays, the rest of its group a joins b
    inner, target = divmod(int(inside.argmin()), count)
    first, second = divmod(int(between.argmin()), count)
    apart = own.masked_fill((labels == first) | (labels == second), -torch.inf)
    other = int(apart.argmax())
    far_first, far_second = divmod(int(outside.argmin()), count)
    gain, expert, source, target = min(
        (float(inside[inner, target]), inner, int(labels[inner]), target),
        (float(between[first, second] - apart[other]), other, first, second),
        (float(outside[far_first, far_second] - own[heaviest]), heaviest, far_first, far_second),
    )
    if gain >= -TOLERANCE * float(own[expert]):
        return []
    joining = (labels == source).nonzero().flatten().tolist()
    return [(member, target) for member in joining if member != expert] + [(expert, source)]
