"""Ranked choice: an instant run-off among experts, each calibration token voting by its whole order
of router logits.

A token votes for the top-k experts of its order that are still there; the one with fewest votes
goes, and its voters turn to their next. As in NVIDIA's Model Optimizer: what counts is who would be
asked in the end, not who is asked now. T tokens, E experts, K top-k."""

import torch

from compressor.plugins import LayerPlan, LayerStatistics, blocks_of

NEEDS = frozenset({"router_orders"})


def plan(stats: LayerStatistics, keep: int, protected: frozenset[int] = frozenset()) -> LayerPlan:
    """Keep the last `keep` experts, equally many of each routing group; of equal votes the higher
    expert goes."""
    orders = stats.router_orders.long()
    layer = stats.layer
    alive = torch.ones(layer.experts, dtype=torch.bool)
    ballots = orders[:, : layer.top_k].clone()
    following = torch.full((len(orders),), layer.top_k)  # place of each token's next choice
    votes = first = torch.bincount(ballots.flatten(), minlength=layer.experts)
    blocks = blocks_of(layer, keep, protected)
    while True:
        candidates = []
        for block in blocks:
            left = [expert for expert in block.free if alive[expert]]
            candidates += left if len(left) > block.take else []
        if not candidates:
            break
        last = min(candidates, key=lambda expert: (int(votes[expert]), -expert))
        alive[last] = False
        rows, places = (ballots == last).nonzero(as_tuple=True)
        # the next expert of each of these orders that is alive, or -1
        turned = torch.full_like(rows, -1)
        waiting = torch.arange(len(rows))
        while len(waiting):
            waiting = waiting[following[rows[waiting]] < layer.experts]
            tokens = rows[waiting]
            expert = orders[tokens, following[tokens]]
            following[tokens] += 1
            turned[waiting[alive[expert]]] = expert[alive[expert]]
            waiting = waiting[~alive[expert]]
        ballots[rows, places] = turned
        votes = votes + torch.bincount(turned[turned >= 0], minlength=layer.experts)
    kept = alive.nonzero().flatten().tolist()
    share = round(float(first[alive].sum()) / max(1, ballots.numel()), 6)
    return LayerPlan.keep(
        layer, kept, decided_by="ranked-choice", figures={"kept_share_of_first_votes": share}
    )
