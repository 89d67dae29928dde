"""Collecting statistics: one pass over the layers measures what strategies need, each source's tokens apart."""

from collections.abc import Callable, Iterator
from contextlib import closing
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from compressor.data.batches import Calibration, sample_rows
from compressor.distributed.ranks import here
from compressor.errors import CompressionError
from compressor.memory import give_back
from compressor.model.architecture import Architecture, MoeLayer, build_meta
from compressor.model.opened import OpenModel
from compressor.model.streaming import LayerVisitor, Pass
from compressor.progress import Progress
from compressor.statistics.statistics import (
    RECONSTRUCTION,
    SAMPLE_TOKENS,
    Collector,
    LayerStatistics,
    combined,
    needs_data,
    needs_heldout,
)

Part = tuple[int, bool]  # number of the source, whether held out
Routers = Callable[[MoeLayer, int], Any]  # the router module of a layer in a model with so many experts


def smaller_routers(architecture: Architecture) -> Routers:
    """Router modules of the models with fewer experts, each such model built once, on meta."""
    built = cache(lambda count: build_meta(architecture.with_experts(count), torch.float32))
    return lambda layer, count: built(count).get_submodule(layer.router)


class Observers:
    """One layer's collectors: one for each source's tokens, and one for those held out of each, where needed."""

    def __init__(
        self,
        model: OpenModel,
        layer: MoeLayer,
        needs: frozenset[str],
        calibration: Calibration,
        routers: Routers,
        seed: int,
        per_source: bool = False,
    ) -> None:
        self.model, self.layer, self.needs, self.routers = model.partial.model, layer, needs, routers
        self.shares, self.seed, self.per_source = calibration.weights, seed, per_source
        self.parts = [
            (calibration.source_of(number), number in calibration.heldout) for number in range(len(calibration.batches))
        ]
        self.rows: dict[int, tuple[int, Tensor]] = {}  # of each batch its number of tokens, and which are sampled
        for part in sorted(set(self.parts)):
            numbers = [number for number, own in enumerate(self.parts) if own == part]
            sizes = [calibration.batches[number].numel() for number in numbers]
            rows = sample_rows(sizes, round(SAMPLE_TOKENS * self.shares[part[0]]), seed)
            self.rows.update(zip(numbers, zip(sizes, rows, strict=True), strict=True))
        self.collectors = {part: self._collector(part) for part in sorted(set(self.parts))}
        self.seen: dict[int, Collector] = {}  # what each batch has shown, until it is added to its part's
        self.active: Collector | None = None

    def _collector(self, part: Part, more: frozenset[str] = frozenset()) -> Collector:
        needs = RECONSTRUCTION if part[1] else self.needs
        return Collector(self.layer, self.model, needs | more, self.seed)

    def enter(self, batch: int) -> None:
        """The batch of this number is about to run: observe it."""
        self.detach()
        part = self.parts[batch]
        if part[1] and not needs_heldout(self.needs):
            return
        if here().is_alone:  # batches run in their order
            self._add()
        # every rank is to know what the router is called with, to restore the others' samples of held-out tokens
        more = frozenset({"router_arguments"} if needs_heldout(self.needs) else ())
        self.active = self.seen[batch] = self._collector(part, more)
        self.active.enter(*self.rows[batch])

    def detach(self) -> None:
        """Stop observing."""
        if self.active is not None:
            self.active.detach()
        self.active = None

    def _add(self) -> None:
        """Add what batches have shown, in their order, to what their parts have."""
        for batch, collector in sorted(self.seen.items()):
            self.collectors[self.parts[batch]].absorb(collector)
        self.seen.clear()

    def _gather(self) -> None:
        """Add up the sums of all ranks' batches, and bring their samples together in the order of the batches."""
        like = {name: meter for collector in self.seen.values() for name, meter in collector.meters.items()}
        own = {
            f"{batch:09}/{name}/{place:09}": value
            for batch, collector in self.seen.items()
            for name, meter in collector.meters.items()
            for place, value in enumerate(meter.samples())
        }
        samples: dict[tuple[int, str], list[Tensor]] = {}
        for rank, tensors in enumerate(here().all_gather_tensors(own)):
            for key, value in sorted(tensors.items()) if rank != here().rank else ():
                batch, name, _ = key.split("/")
                samples.setdefault((int(batch), name), []).append(value)
        for (number, name), values in samples.items():
            if number not in self.seen:
                self.seen[number] = self._collector(self.parts[number])
            if (meter := self.seen[number].meters.get(name)) is not None:
                meter.restore(values, like.get(name, meter))
        self._add()
        for collector in self.collectors.values():
            collector.all_reduce()

    def finish(self) -> LayerStatistics:
        """The statistics of the layer, with the held-out tokens' among them where they are needed.

        Of several ranks the first has them, of the batches of all; the others get the bare layer.
        """
        self.detach()
        if not here().is_alone:
            self._gather()
            if not here().is_first:
                return LayerStatistics(self.layer, seed=self.seed)
        self._add()

        smaller = partial(self.routers, self.layer)
        fit, held = (
            {source: collector for (source, other), collector in self.collectors.items() if other is heldout}
            for heldout in (False, True)
        )

        def together(parts: dict[int, Collector]) -> Collector:
            return combined(list(parts.values()), [self.shares[source] for source in parts])

        judged = needs_heldout(self.needs)
        heldout = together(held).finish(smaller) if judged else None
        whole = together(fit)
        several = self.per_source and len(fit) > 1
        own = {n: held[n].finish(smaller) for n in held} if several and judged and len(held) > 1 else {}
        parts = tuple(fit[n].finish(smaller, own.get(n, heldout)) for n in fit) if several else ()
        return whole.finish(smaller, heldout, parts)


def collect(
    model: OpenModel,
    needs: frozenset[str],
    calibration: Calibration | None,
    progress: Progress,
    seed: int = 0,
    per_source: bool = False,
    end: LayerVisitor | None = None,
) -> Iterator[LayerStatistics]:
    """Statistics of every MoE layer in order, each valid until the next is asked for; one layer is in memory at a time.

    Needs that are met by weights alone load the experts and run nothing. `per_source` keeps each calibration source's
    own statistics too. For the sake of a visitor `end` the batches go on to the model's output.
    """
    routers = smaller_routers(model.architecture)
    if calibration is None:
        if needs_data(needs):
            raise CompressionError("this strategy needs calibration data; pass --calibration")
        yield from _from_weights(model, needs, routers, progress, seed)
        return
    if needs_heldout(needs) and not calibration.heldout:
        raise CompressionError("this strategy needs held-out calibration tokens, and none were held out")
    watching = _Watching(lambda layer: Observers(model, layer, needs, calibration, routers, seed, per_source))
    to_end, batches = end is not None, calibration.batches
    one = Pass(model, batches, progress, "calibrate and plan", seed, to_end=to_end, shared=True)
    with closing(one.layers(watching, *([end] if end else []))) as passed:
        try:
            for _ in passed:
                for seen in watching.active:
                    yield seen.finish()
                watching.active = []  # before their layer's memory is given back
        finally:
            for seen in watching.active:
                seen.detach()


def _from_weights(
    model: OpenModel, needs: frozenset[str], routers: Routers, progress: Progress, seed: int
) -> Iterator[LayerStatistics]:
    layers = model.architecture.layers
    if not here().is_first:
        yield from (LayerStatistics(layer, seed=seed) for layer in layers)
        return
    progress.start("plan", len(layers))
    for layer in layers:
        model.partial.load(tensor.key for tensor in layer.tensors if tensor.key.startswith(f"{layer.name}."))
        collector = Collector(layer, model.partial.model, needs, seed)
        try:
            yield collector.finish(partial(routers, layer))
        finally:
            model.partial.release(layer.block)
            give_back()
        progress.advance(layer.name)


class _Watching(LayerVisitor):
    """Has the observers of each layer watch the batches that pass it."""

    def __init__(self, observers: Callable[[MoeLayer], Observers]) -> None:
        self.observers, self.active = observers, list[Observers]()

    def loaded(self, unit: str) -> None:
        self.active = [self.observers(layer) for layer in self.at.moe_layers]

    def entering(self, batch: int) -> None:
        for observers in self.active:
            observers.enter(batch)
