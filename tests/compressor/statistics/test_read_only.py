"""Statistics are read-only, as all strategies share them."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from compressor.model.moe_layer import MoeLayer
from compressor.statistics.statistics import LayerStatistics, RouterArguments

LAYER = MoeLayer("model.layers.3.experts", "block", "router", "unit", 3, experts=4, top_k=2)


def statistics() -> LayerStatistics:
    """One with tensors in every place."""
    held = LayerStatistics(LAYER, 2, {"inputs": torch.ones(2, 3)})
    arguments = RouterArguments((torch.ones(2, 3), torch.ones(4)), {"mask": torch.ones(2)}, {0: 0, 1: None, "mask": 0})
    values = {"routed_count": torch.ones(4, 4), "router_arguments": arguments, "heldout": held}
    return LayerStatistics(LAYER, 2, values)


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
