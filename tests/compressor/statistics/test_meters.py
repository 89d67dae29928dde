"""A new statistic is a meter and its registration: nothing that collects, combines or checks needs to know of it."""

from typing import Any

import pytest
import torch
from torch import Tensor

from compressor.plugins import LayerStatistics
from compressor.plugins.testing import fake_statistics
from compressor.statistics.meters import METERS, ExpertsCall, RoutedCount, statistics_table
from compressor.statistics.statistics import ALL, Collector, combined


class LargestInput(RoutedCount):
    """[E] the largest absolute input of each expert."""

    name, meaning = "largest_input", "largest absolute value among the inputs of its tokens"

    def experts_called(self, call: ExpertsCall) -> None:
        sizes = call.hidden.abs().amax(1).double()
        for place in range(call.index.shape[1]):
            self.total.scatter_reduce_(0, call.index[:, place], sizes, "amax")

    def absorb(self, other: Any, scale: float) -> None:
        self.total = torch.maximum(self.total, other.total)


def seen(stats: LayerStatistics, parts: list[Tensor]) -> Collector:
    """A collector that these inputs [T, H] have passed."""
    block = stats.weights.block
    model = torch.nn.Module()
    model.get_submodule = lambda name: {  # type: ignore[method-assign]
        stats.layer.name: stats.weights.experts, stats.layer.router: stats.weights.router, stats.layer.block: block
    }[name]  # fmt: skip
    needs = frozenset({"largest_input", "routed_count"})
    collector = Collector(stats.layer, model, needs, 0)
    for part in parts:
        collector.enter(len(part), torch.arange(0))
        with torch.no_grad():
            block(part[None])
        collector.detach()
    return collector


def test_a_new_meter_is_collected_and_combined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METERS, "largest_input", LargestInput)  # type: ignore[arg-type]
    stats = fake_statistics()
    halves = [stats.inputs[:20].clone(), stats.inputs[20:].clone()]
    collectors = [seen(stats, [half]) for half in halves]
    whole = combined(collectors, [20.0, 12.0]).finish(None)
    expected = torch.zeros(8, dtype=torch.float64)
    for token, experts in enumerate(stats.top_k_index.tolist()):
        for expert in experts:
            expected[expert] = max(expected[expert], float(stats.inputs[token].abs().max()))
    assert torch.equal(whole.values["largest_input"], expected)
    assert torch.equal(seen(stats, halves).finish(None).values["largest_input"], expected)
    assert ("largest_input", "[E]", LargestInput.meaning) in statistics_table()


def test_every_meter_says_what_it_measures() -> None:
    assert set(METERS) == ALL
    for name, meter in METERS.items():
        assert meter.name == name and meter.meaning and "|" not in meter.meaning
