"""Making a plan: one pass over the layers collects what the strategy needs, and each layer is planned as it passes."""

from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from compressor.architecture import MoeLayer, build_meta
from compressor.calibration import Calibration, sample_positions
from compressor.errors import CompressionError
from compressor.memory import give_back
from compressor.model import OpenModel
from compressor.plan import CompressionPlan, LayerPlan, Source
from compressor.progress import Progress
from compressor.registry import Strategy
from compressor.statistics import (
    SAMPLE_TOKENS,
    Collector,
    LayerStatistics,
    needs_data,
)
from compressor.streaming import stream_layers

PACKAGES = ("moe-compressor", "torch", "transformers", "safetensors")


def versions() -> dict[str, str]:
    """Versions of what decides the bytes of an output."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


class _Routers:
    """Router modules of the smaller models, built on meta when a strategy asks for one."""

    def __init__(self, model: OpenModel) -> None:
        self.model, self.built = model, dict[int, Any]()

    def get(self, layer: MoeLayer, count: int) -> Any:
        if count not in self.built:
            self.built[count] = build_meta(self.model.architecture.with_experts(count), torch.float32)
        return self.built[count].get_submodule(layer.router)


def collect(
    model: OpenModel, needs: frozenset[str], calibration: Calibration | None, progress: Progress, seed: int = 0
) -> Iterator[LayerStatistics]:
    """Statistics of every MoE layer in order, each valid until the next is asked for; one layer is in memory at a time.

    Needs that are met by weights alone load the experts and run nothing.
    """
    routers = _Routers(model)
    if calibration is None:
        if needs_data(needs):
            raise CompressionError("this strategy needs calibration data; pass --calibration")
        yield from _from_weights(model, needs, routers, progress, seed)
    else:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            yield from _from_data(model, needs, calibration, routers, progress, seed)


def _from_weights(
    model: OpenModel, needs: frozenset[str], routers: _Routers, progress: Progress, seed: int
) -> Iterator[LayerStatistics]:
    layers, partial = model.architecture.layers, model.partial
    progress.start("plan", len(layers))
    for layer in layers:
        partial.load(tensor.key for tensor in layer.tensors if tensor.key.startswith(f"{layer.name}."))
        collector = Collector(layer, partial.model, needs, torch.zeros(0), [], seed)
        try:
            yield collector.finish(lambda count, layer=layer: routers.get(layer, count))
        finally:
            partial.release(layer.block)
            give_back()
        progress.advance(layer.name)


def _from_data(
    model: OpenModel, needs: frozenset[str], calibration: Calibration, routers: _Routers, progress: Progress, seed: int
) -> Iterator[LayerStatistics]:
    architecture, partial = model.architecture, model.partial
    by_unit: dict[str, list[MoeLayer]] = {}
    for layer in architecture.layers:
        by_unit.setdefault(layer.unit, []).append(layer)
    sizes = [batch.numel() for batch in calibration.batches]
    positions = sample_positions(sum(sizes), SAMPLE_TOKENS, seed)
    active: list[Collector] = []

    def before(unit: str) -> None:
        active[:] = [Collector(layer, partial.model, needs, positions, sizes, seed) for layer in by_unit.get(unit, ())]
        for collector in active:
            collector.attach()

    def entering(batch: int) -> None:
        for collector in active:
            collector.batch = batch

    progress.start("calibrate and plan", len(architecture.layers))
    passed = stream_layers(partial, calibration.batches, architecture.units, by_unit, before=before, entering=entering)
    try:
        for _ in passed:
            for collector in active:
                layer = collector.layer
                yield collector.finish(lambda count, layer=layer: routers.get(layer, count))
                progress.advance(layer.name)
    finally:
        for collector in active:
            collector.detach()
        passed.close()


def make_plan(
    model: OpenModel,
    strategy: Strategy,
    experts: int,
    options: Mapping[str, Any],
    calibration: Calibration | None,
    progress: Progress,
    seed: int = 0,
    protected: Mapping[str, frozenset[int]] | None = None,
) -> CompressionPlan:
    """Plan every layer with one strategy; nothing is written. `protected` experts, by layer name, stay as they are."""
    layers: list[LayerPlan] = []
    for stats in collect(model, strategy.needs, calibration, progress, seed):
        guarded = (protected or {}).get(stats.layer.name, frozenset())
        layers.append(strategy.plan_layer(stats, experts, guarded))
        del stats  # its samples need not outlive the layer
    order = {layer.name: position for position, layer in enumerate(model.architecture.layers)}
    return CompressionPlan(
        source=Source(model.source.name, model.source.revision, model.fingerprint),
        experts=experts,
        strategy=strategy.name,
        options=dict(options),
        calibration=None if calibration is None else calibration.identity,
        layers=tuple(sorted(layers, key=lambda layer: order[layer.module])),
        seed=seed,
        versions=versions(),
    )
