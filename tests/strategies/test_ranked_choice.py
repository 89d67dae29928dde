"""The run-off against one over lists of ballots, and the router's orders against sorted logits."""

from pathlib import Path

import torch
from hypothesis import given
from hypothesis import strategies as st

from strategies import ranked_choice
from tests.support.opened_models import batches, opened, plain_calls, statistics
from tests.support.plans import kept
from tests.support.strategy_runs import layer_statistics


def run_off(orders: list[list[int]], top_k: int, keep: int, groups: int, protected: frozenset[int]) -> list[int]:
    """Counting all ballots anew each time."""
    experts = len(orders[0])
    alive, size = set(range(experts)), experts // groups
    while len(alive) > keep:
        votes = [0] * experts
        for order in orders:
            for expert in [each for each in order if each in alive][:top_k]:
                votes[expert] += 1
        crowded = [
            e for e in alive if sum(o // size == e // size for o in alive) > keep // groups and e not in protected
        ]
        alive.remove(min(crowded, key=lambda expert: (votes[expert], -expert)))
    return sorted(alive)


@given(st.data())
def test_the_run_off(data: st.DataObject) -> None:
    groups = data.draw(st.sampled_from([1, 2]))
    experts = 2 * data.draw(st.integers(1, 4))
    top_k = data.draw(st.integers(1, experts // 2))
    keep = groups * data.draw(st.integers(-(-top_k // groups), experts // groups))
    orders = data.draw(st.lists(st.permutations(range(experts)), min_size=1, max_size=12))
    protected = frozenset(data.draw(st.sets(st.integers(0, experts // groups - 1), max_size=min(1, keep // groups))))
    values = {"router_orders": torch.tensor(orders, dtype=torch.int16)}
    blocks = {"routing_groups": groups, "chosen_groups": groups}
    stats = layer_statistics(values, len(orders), experts=experts, top_k=top_k, **blocks)
    assert kept(ranked_choice.plan(stats, keep, protected)) == run_off(orders, top_k, keep, groups, protected)


def test_orders_are_those_of_the_routers_logits(tmp_path: Path) -> None:
    stock, model = opened("mixtral", tmp_path)
    parts = batches(stock)
    found, calls = statistics(model, {"router_orders"}, parts), plain_calls(stock, model.architecture, parts)
    for layer in model.architecture.layers:
        logits = torch.cat([output[0].reshape(-1, layer.experts) for output in calls[layer.name].router_outputs])
        orders = found[layer.name].router_orders
        assert len(orders) == 36
        assert orders.tolist() == logits.argsort(dim=-1, descending=True).tolist()
