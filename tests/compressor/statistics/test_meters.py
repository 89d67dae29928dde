"""A new statistic is a meter and its registration: nothing that collects, combines or checks needs to know of it."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from compressor.plugins import LayerStatistics, fake_statistics
from compressor.statistics.meters import ExpertsCall, Sum
from compressor.statistics.statistics import STATISTICS, Collector, Statistic


class LargestInput(Sum):
    """[E] the largest absolute input of each expert."""

    def experts_called(self, call: ExpertsCall) -> None:
        sizes = call.hidden.abs().amax(1).double()
        for place in range(call.index.shape[1]):
            self.total.scatter_reduce_(0, call.index[:, place], sizes, "amax")

    def combine(self, scales: Sequence[float]) -> None:
        self.total = self.totals.amax(0)


def seen(stats: LayerStatistics, parts: list[Tensor], shares: Sequence[float]) -> LayerStatistics:
    """Statistics of these inputs [T, H], one source each if there are as many shares."""
    block = stats.weights.block
    model = torch.nn.Module()
    model.get_submodule = lambda name: {  # type: ignore[method-assign]
        stats.layer.name: stats.weights.experts, stats.layer.router: stats.weights.router, stats.layer.block: block
    }[name]  # fmt: skip
    model.config = None  # type: ignore[assignment]
    needs = frozenset({"largest_input", "routed_count"})
    collector = Collector(stats.layer, model, needs, 0, shares=shares)
    for source, part in enumerate(parts):
        collector.observe(torch.zeros(1, len(part)), torch.arange(0), source=min(source, len(shares) - 1))
        with torch.no_grad():
            block(part[None])
    return collector.finish()


def test_a_new_meter_is_collected_and_combined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(STATISTICS, "largest_input", Statistic("[E]", "largest input of its tokens", LargestInput))
    stats = fake_statistics()
    halves = [stats.inputs[:20].clone(), stats.inputs[20:].clone()]
    whole = seen(stats, halves, [20.0, 12.0])
    expected = torch.zeros(8, dtype=torch.float64)
    for token, experts in enumerate(stats.top_k_index.tolist()):
        for expert in experts:
            expected[expert] = max(expected[expert], float(stats.inputs[token].abs().max()))
    assert torch.equal(whole.values["largest_input"], expected)
    assert torch.equal(seen(stats, halves, [1.0]).values["largest_input"], expected)
