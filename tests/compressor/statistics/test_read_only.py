"""Statistics that a strategy must not write into: each way of writing that is noticed, and what is named then."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from compressor.errors import CompressionError
from compressor.model.moe_layer import MoeLayer
from compressor.recipe.plan import LayerPlan
from compressor.recipe.registry import Strategy
from compressor.statistics.statistics import LayerStatistics, RouterArguments

LAYER = MoeLayer("model.layers.3.experts", "block", "router", "unit", 3, experts=4, top_k=2)

NOTICED: dict[str, Callable[[Tensor], Any]] = {
    "an entry": lambda x: x.__setitem__(0, 1e9),
    "mul_": lambda x: x.mul_(2),
    "out=": lambda x: torch.add(x, 1, out=x),
    "one of several out=": lambda x: torch.sort(x.clone(), out=(x, torch.empty(x.shape, dtype=torch.long))),
    "foreach": lambda x: torch._foreach_mul_([torch.ones(1), x], 2),
    "a flat view": lambda x: x.view(-1).zero_(),
    "an alias": lambda x: torch.ops.aten.alias(x).zero_(),
    "expanded": lambda x: x.expand(2, *x.shape).zero_(),
    "detach": lambda x: x.detach().zero_(),
    "another class": lambda x: x.as_subclass(Tensor).zero_(),
    "vmap": lambda x: torch.func.vmap(lambda row: row.zero_())(x),
}

UNNOTICED: dict[str, Callable[[Tensor], Any]] = {
    "a clone": lambda x: x.clone().zero_(),
    "a sum": lambda x: (x + 0).zero_(),
    "reading": lambda x: (x.numpy().sum(), x.tolist(), x[0], x @ x.mT, x.sort(), x.float().mean()),
    "numpy, which is a view": lambda x: x.numpy().fill(0),
}


def statistics() -> LayerStatistics:
    """One with tensors in every place."""
    live = torch.ones(4)
    held = LayerStatistics(LAYER, 2, {"inputs": torch.ones(2, 3)})
    arguments = RouterArguments((torch.ones(2, 3), live), {"mask": torch.ones(2)}, {0: 0, 1: None, "mask": 0})
    values = {"routed_count": torch.ones(4, 4), "router_arguments": arguments, "heldout": held}
    return LayerStatistics(LAYER, 2, values, by_source=(LayerStatistics(LAYER, 1, {"norm_sum": torch.ones(4)}),))


def planned(stats: LayerStatistics, write: Callable[[LayerStatistics], Any]) -> LayerPlan:
    """What a strategy makes that writes somewhere first."""

    def plan(stats: LayerStatistics, keep: int, protected: frozenset[int] = frozenset()) -> LayerPlan:
        write(stats)
        return LayerPlan.keep(stats.layer, range(keep))

    return Strategy("careless", plan, frozenset()).plan_layer(stats, 2)


def fault(name: str) -> str:
    return (
        rf"^model\.layers\.3\.experts: strategy 'careless' changed the statistic '{name}', which the next "
        r"strategy reads too; clone\(\) it before writing to it$"
    )


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("way", NOTICED)
def test_a_plan_whose_strategy_has_written_to_a_statistic_is_refused(way: str, mode: Callable[[], Any]) -> None:
    stats = statistics()
    with pytest.raises(CompressionError, match=fault("routed_count")), mode():
        planned(stats, lambda stats: NOTICED[way](stats.routed_count))


@pytest.mark.parametrize("way", UNNOTICED)
def test_reading_and_writing_to_a_copy_is_no_fault(way: str) -> None:
    assert planned(statistics(), lambda stats: UNNOTICED[way](stats.routed_count)).dropped == (2, 3)


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("routed_count", lambda stats: stats.values["routed_count"]),
        ("heldout.inputs", lambda stats: stats.heldout.inputs),
        (r"by_source\[0\].norm_sum", lambda stats: stats.by_source[0].norm_sum),
        ("router_arguments", lambda stats: stats.router_arguments.positional[0]),
        ("router_arguments", lambda stats: stats.router_arguments.by_keyword["mask"]),
    ],
)
def test_every_tensor_of_a_layers_statistics_is_looked_at(
    name: str, place: Callable[[LayerStatistics], Tensor]
) -> None:
    with pytest.raises(CompressionError, match=fault(name)):
        planned(statistics(), lambda stats: place(stats).mul_(2))


def test_a_strategy_that_tries_others_goes_no_further_on_what_one_has_changed() -> None:
    def trying(stats: LayerStatistics, keep: int, protected: frozenset[int] = frozenset()) -> LayerPlan:
        with pytest.raises(CompressionError, match=fault("routed_count")):
            planned(stats, lambda stats: stats.routed_count.zero_())
        return LayerPlan.keep(stats.layer, range(keep))

    with pytest.raises(CompressionError, match="strategy 'trying' changed the statistic 'routed_count'"):
        Strategy("trying", trying, frozenset()).plan_layer(statistics(), 2)


def test_the_containers_of_a_layers_statistics_are_read_only() -> None:
    stats: Any = statistics()
    with pytest.raises(TypeError):
        stats.values["routed_count"] = None
    with pytest.raises(TypeError):
        stats.router_arguments.by_keyword["mask"] = None
    with pytest.raises(AttributeError):
        stats.routed_count = None
    assert set(stats.values) == {"routed_count", "router_arguments", "heldout"}
    assert set(stats.adding(rank_change=torch.zeros(4)).values) == {*stats.values, "rank_change"}
    assert replace(stats, tokens=5).routed_count is stats.routed_count
