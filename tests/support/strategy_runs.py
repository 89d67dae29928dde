"""Layers with made-up statistics, and strategies run on whole tiny models beside a plain forward; test support."""

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compressor.model.moe_layer import MoeLayer
from compressor.progress import Silent
from compressor.recipe.plan import LayerPlan
from compressor.recipe.registry import load_strategy
from compressor.statistics.statistics import LayerStatistics
from tests.support.opened_models import Calls, batches, calibration, one_expert, opened, plain_calls
from tests.support.plans import by_hand, make_plan

GROUPED: dict[str, Any] = {"routing_groups": 2, "chosen_groups": 1, "experts_per_group": 2}


def moe_layer(experts: int = 8, top_k: int = 2, index: int = 1, part: str = "mlp", **groups: int) -> MoeLayer:
    decoder_layer = f"model.layers.{index}"
    block = f"{decoder_layer}.{part}"
    return MoeLayer(f"{block}.experts", block, f"{block}.gate", decoder_layer, index, experts, top_k, **groups)


def layer_statistics(values: Mapping[str, Any], tokens: int = 9, **layer: int) -> LayerStatistics:
    """Statistics of a made-up layer; lists become float64 tensors."""
    tensors = {}
    for name, value in values.items():
        tensors[name] = torch.tensor(value, dtype=torch.float64) if isinstance(value, list) else value
    return LayerStatistics(moe_layer(**layer), tokens, tensors)


def members(plan: LayerPlan) -> list[tuple[int, ...]]:
    return [group.members for group in plan.groups]


def shares(counts: list[int]) -> list[float]:
    """Each count's share of their sum; equal shares of none."""
    total = sum(counts)
    return [count / total if total else 1 / len(counts) for count in counts]


@dataclass(frozen=True)
class PlannedLayer:
    """A layer as a strategy planned it, its stock experts, and what a plain forward called."""

    layer: MoeLayer
    plan: LayerPlan
    experts: Any
    calls: Calls

    def blocks(self) -> list[range]:
        """Experts of each routing group."""
        size = self.layer.experts // self.layer.routing_groups
        return [range(begin, begin + size) for begin in range(0, self.layer.experts, size)]

    def outputs(self) -> list[Tensor]:
        """[T, H] of each expert on every token, in float64."""
        hidden = self.calls.joined()[0]
        return [one_expert(self.experts, expert, hidden).double() for expert in range(self.layer.experts)]


def planned_layers(
    name: str, folder: Path, strategy: str, keep: int = 4, protect: int | None = None, **options: Any
) -> Iterator[PlannedLayer]:
    """Plan a model twice, to the same plan; with `protect`, that expert of the first layer is protected."""
    stock, model = opened(name, folder)
    parts = batches(stock)
    first = model.architecture.layers[0]
    protected = None if protect is None else {first.name: frozenset({protect})}
    loaded, text = load_strategy(strategy, options), calibration(parts)
    made, again = (make_plan(model, loaded, keep, options, text, Silent(), protected=protected) for _ in range(2))
    assert by_hand(made).to_json() == by_hand(again).to_json()
    calls = plain_calls(stock, model.architecture, parts)
    for layer, plan in zip(model.architecture.layers, made.layers, strict=True):
        experts = copy.deepcopy(stock.get_submodule(layer.name))  # whose calls are not noted among the forward's
        yield PlannedLayer(layer, plan, experts, calls[layer.name])
