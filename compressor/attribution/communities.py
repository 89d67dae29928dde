"""Experts that are routed to together over layers, and the communities that they form.

T tokens, R routers in model order, E experts, K top-k. Chance would send n_i * n_j / T tokens through expert i of one
router and expert j of the next one, of which n_i and n_j tokens are routed to each.
"""

from collections.abc import Collection, Iterable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from compressor.attribution.figures import Together
from compressor.distributed.ranks import here

NOTABLE = 3.0  # standard deviations of a Poisson count by which two experts exceed chance
FOLLOWING = 8  # experts of the next router that are kept for each expert

Expert = tuple[int, int]  # number of its router among the receivers, and its own


def routed_together(chosen: Collection[Tensor], valid: Tensor, experts: int, tokens: int) -> tuple[Together, ...]:
    """Pairs of experts of consecutive routers that meet in more tokens than by chance, of batches [T, R, K].

    `chosen` are this rank's batches, and `tokens` those of all ranks. `valid` [R, K] marks the slots that a router
    uses. Of every expert those of the next router are kept with which the excess is greatest. Memory is that of two
    routers' choices and one table [E, E].
    """
    found: list[Together] = []
    for first, second in pairwise(range(len(valid))):
        table = torch.zeros(experts + 2, experts, dtype=torch.float64, device=valid.device)
        for batch in chosen:
            one, other = (_visited(batch[:, number][:, valid[number]], experts) for number in (first, second))
            table += torch.cat([one.T @ other, one.sum(0)[None], other.sum(0)[None]]).double()
        counts, visits = here().all_reduce(table).split([experts, 2])  # of tokens, so exact in any order
        expected = visits[0][:, None] * visits[1] / tokens
        excess = counts - expected
        excess[excess <= NOTABLE * expected.sqrt()] = 0
        values, following = excess.sort(descending=True, stable=True)
        for expert, (row, others) in enumerate(zip(values.tolist(), following.tolist(), strict=True)):
            kept = zip(row[:FOLLOWING], others, strict=False)
            found += [Together(first, expert, other, value / tokens) for value, other in kept if value > 0]
    return tuple(found)


def _visited(chosen: Tensor, experts: int) -> Tensor:
    """[T, K] -> [T, E]: 1 for each chosen expert."""
    return torch.zeros(len(chosen), experts, device=chosen.device).scatter_(1, chosen, 1.0)


def communities(experts: Iterable[Expert], together: Sequence[Together], seed: int = 0) -> dict[Expert, int]:
    """The number of each expert's community: Louvain's method on the excess over chance, the largest community first.

    An expert that goes with no other is a community of its own. Blondel et al. 2008, arXiv:0803.0476.
    """
    import networkx as nx

    order = {expert: number for number, expert in enumerate(experts)}
    graph = nx.Graph()
    graph.add_nodes_from(order.values())  # numbers: sets of them are walked through in the same order in every process
    for pair in together:
        ends = (pair.receiver, pair.expert), (pair.receiver + 1, pair.following)
        graph.add_edge(*(order[end] for end in ends), weight=pair.excess)
    made = [sorted(members) for members in nx.community.louvain_communities(graph, seed=seed)] if order else []
    ranked = sorted(made, key=lambda members: (-len(members), members))
    place = {member: number for number, members in enumerate(ranked) for member in members}
    return {expert: place[number] for expert, number in order.items()}
