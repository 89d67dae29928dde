"""Both models over the same text, layer by layer: the source one layer ahead, the compressed one behind it.

While a layer of each is loaded, the compressed model's MoE block also runs on what the source's block is given, so
that corrections and merged routers count as they are stored. Never more than one layer of each model is in memory.
T tokens, E experts, H hidden.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from compressor.calibration.batches import sample_positions
from compressor.calibration.statistics import Collector
from compressor.errors import CompressionError
from compressor.model.architecture import MoeLayer, layers_by_unit
from compressor.model.opened import OpenModel
from compressor.model.streaming import LayerStream, LayerVisitor, Replay
from compressor.progress import Progress
from compressor.report.data import LayerMeasures
from compressor.report.measuring_experts import Likeness, compared, sample_size

VISITS = frozenset({"routed_count"})


@dataclass(slots=True)
class Gap:
    """How far outputs are from the source's, summed over tokens."""

    missed: float = 0.0  # ||y' - y||^2
    energy: float = 0.0  # ||y||^2
    cosines: float = 0.0
    tokens: int = 0

    def add(self, source: Tensor, ours: Tensor, width: int) -> None:
        """Count the rows of [..., H] each, or of [T H] laid end to end, which are `width` wide."""
        y, z = (_rows(value.detach(), width).float() for value in (source, ours))
        norms = y.norm(dim=-1).double() * z.norm(dim=-1).double()
        cosines = (y * z).sum(-1).double() / norms.where(norms > 0, 1)
        same = (y == z).all(dim=-1)  # rows of zeros among them, and rounding is no difference
        self.missed += float((z - y).square().sum(dtype=torch.float64))
        self.energy += float(y.square().sum(dtype=torch.float64))
        self.cosines += float(cosines.clamp(-1, 1).where(~same, 1).sum())
        self.tokens += len(y)

    @property
    def error(self) -> float | None:
        """||y' - y||^2 / ||y||^2; the numerator alone where y is zero, None without tokens or a finite value."""
        return _finite(self.missed / (self.energy or 1.0)) if self.tokens else None

    @property
    def cosine(self) -> float | None:
        """The mean over tokens; None without tokens or a finite value."""
        return _finite(self.cosines / self.tokens) if self.tokens else None


def _rows(value: Tensor, width: int) -> Tensor:
    return value.flatten(0, -2) if value.dim() > 1 else value.view(-1, width)


def _finite(value: float) -> float | None:
    return float(f"{value:.6g}") if math.isfinite(value) else None


def shares(counts: Tensor) -> tuple[float, ...]:
    """Each expert's share of the visits: [E] -> E numbers that sum to 1; zeros where there are none."""
    return tuple(round(share, 6) for share in (counts / counts.sum().clamp(min=1)).tolist())


def _width(model: Any) -> int:
    return int(model.config.get_text_config().hidden_size)


def _first(output: Any) -> Tensor:
    found: Tensor = output[0] if isinstance(output, tuple | list) else output
    return found


class _Watch:
    """One MoE layer of both models while the batches pass it; `source` is None where only the output is at hand."""

    def __init__(self, layer: MoeLayer, model: Any, sizes: list[int], seed: int) -> None:
        self.layer, self.model, self.sizes, self.seed = layer, model, sizes, seed
        self.after = Collector(layer, model, VISITS, torch.arange(0), sizes, seed)
        self.before: Collector | None = None
        self.block, self.stream = Gap(), Gap()
        self.measures = LayerMeasures(layer.name)
        self._handles: list[Any] = []
        self._output: Tensor | None = None

    @property
    def _in_unit(self) -> bool:
        """Whether the decoder layer itself holds router and experts, so that their part is what the experts put out."""
        return self.layer.block == self.layer.unit

    def attach(self, source: Any, layer: MoeLayer, likeness: Likeness) -> None:
        """Start watching the source's layer, which must be loaded."""
        positions = sample_positions(sum(self.sizes), sample_size(layer.experts), self.seed)
        self.before = Collector(layer, source, VISITS | likeness.needs, positions, self.sizes, self.seed)
        judged = source.get_submodule(layer.name if self._in_unit else layer.block)
        block = source.get_submodule(layer.block)
        self._handles = [
            block.register_forward_hook(self._after_block, with_kwargs=True, prepend=True),
            judged.register_forward_hook(self._keep, prepend=True),
        ]

    def detach(self) -> None:
        """Stop watching the source."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._output = [], None
        for collector in (self.before, self.after):
            if collector is not None:
                collector.detach()

    def _keep(self, module: Any, args: Any, output: Any) -> None:
        self._output = _first(output)

    def _after_block(self, module: Any, args: Any, kwargs: Any, output: Any) -> None:
        if self._output is not None and self._output.numel():
            self.block.add(self._output, self._ours(args, kwargs), _width(self.model))
        self._output = None

    def _ours(self, args: Any, kwargs: Any) -> Tensor:
        """What the compressed model's block puts out on the same arguments."""
        block, held = self.model.get_submodule(self.layer.block), list[Any]()
        experts = self.model.get_submodule(self.layer.name)
        handle = experts.register_forward_hook(lambda module, args, output: held.append(output))
        try:
            output = type(block).forward(block, *args, **kwargs)  # not the one that waits for other batches
        finally:
            handle.remove()
        return _first(held[-1] if self._in_unit else output)

    def finish(self) -> LayerMeasures:
        """What was measured; the compressed model's batches must have passed."""
        after = self.after.finish(None)
        found = self.measures
        return LayerMeasures(
            found.module, found.similarity, found.similarity_label, found.visits_before, shares(after.routed_count),
            self.block.error, self.block.cosine, self.stream.error, self.stream.cosine,
        )  # fmt: skip

    def finish_source(self, likeness: Likeness, source: Any) -> None:
        """Measure what the source alone shows, while its layer is loaded, and stop watching it."""
        assert self.before is not None
        self.detach()
        stats = self.before.finish(None)
        similarity, label = compared(likeness, stats, source)
        self.measures = LayerMeasures(self.layer.name, similarity, label, shares(stats.routed_count))
        self.before = None


class _Ahead(LayerVisitor):
    """The source's pass, which takes each layer before the compressed model's does."""

    def __init__(self, source: OpenModel, batches: Sequence[Tensor], likeness: Callable[[str], Likeness]) -> None:
        self.model, self.likeness = source.partial.model, likeness
        self.layers = {layer.name: layer for layer in source.architecture.layers}
        self.watches: list[_Watch] = []
        self.held: dict[int, Tensor] = {}  # what the layer put out, by batch
        self.batch = 0
        self.random = torch.get_rng_state()  # each model draws the same numbers
        wanted = layers_by_unit(source.architecture.layers)
        self.units = LayerStream(source.partial, batches, source.architecture.units, wanted).passing(self)

    def take(self, unit: str, watches: list[_Watch]) -> None:
        """Pass the next layer, and measure for the watches of its MoE layers what the source alone shows."""
        self.watches = watches
        handles = [_hook(self.model.get_submodule(unit), self._keep)] if watches else []
        state = torch.get_rng_state()
        torch.set_rng_state(self.random)
        try:
            next(self.units)
        finally:
            self.random = torch.get_rng_state()
            torch.set_rng_state(state)
            for handle in handles:
                handle.remove()
        for watch in watches:
            watch.finish_source(self.likeness(watch.layer.name), self.model)

    def loaded(self, unit: str) -> None:
        for watch in self.watches:
            watch.attach(self.model, self.layers[watch.layer.name], self.likeness(watch.layer.name))

    def entering(self, batch: int) -> None:
        self.batch = batch
        for watch in self.watches:
            if watch.before is not None:
                watch.before.detach()
                watch.before.enter(batch)

    def _keep(self, module: Any, args: Any, output: Any) -> None:
        self.held[self.batch] = _first(output)


@dataclass(slots=True)
class _Pass(LayerVisitor):
    """The pass of the compressed model, which takes the source's along."""

    output: OpenModel
    source: _Ahead | None
    sizes: list[int]  # tokens of each batch
    seed: int
    watches: list[_Watch] = field(default_factory=list)
    batch: int = 0  # the one that runs
    handles: list[Any] = field(default_factory=list)

    def before(self, unit: str, replay: Replay) -> None:
        """The source passes the layer first."""
        self.clear()
        model = self.output.partial.model
        layers = [layer for layer in self.output.architecture.layers if layer.unit == unit]
        self.watches = [_Watch(layer, model, self.sizes, self.seed) for layer in layers]
        if self.source is not None:
            self.source.take(unit, self.watches)
            if layers:
                self.handles.append(_hook(model.get_submodule(unit), self._compare))

    def entering(self, batch: int) -> None:
        self.batch = batch
        for watch in self.watches:
            watch.after.detach()
            watch.after.enter(batch)

    def _compare(self, module: Any, args: Any, output: Any) -> None:
        if self.source is not None and self.batch in self.source.held:
            before = self.source.held.pop(self.batch)
            for watch in self.watches:
                watch.stream.add(before, _first(output), _width(self.output.partial.model))

    def clear(self) -> None:
        """Forget the layer that has passed."""
        for handle in self.handles:
            handle.remove()
        for watch in self.watches:
            watch.detach()
        self.handles, self.watches = [], []
        if self.source is not None:
            self.source.held.clear()

    def close(self) -> None:
        """Give the source back."""
        self.clear()
        if self.source is not None:
            self.source.units.close()


def _hook(module: Any, hook: Callable[..., None]) -> Any:
    return module.register_forward_hook(hook, prepend=True)  # before the pass is cut short


def _refuse_different(source: OpenModel | None, output: OpenModel) -> None:
    """Refuse models that cannot go side by side."""
    if source is None:
        return
    one, two = ((m.architecture.units, [layer.name for layer in m.architecture.layers]) for m in (source, output))
    if one != two:
        raise CompressionError(
            f"{source.source.label} and {output.source.label} have different layers, so they are no source and its "
            "output; name the source with --model"
        )


def measure_layers(
    output: OpenModel,
    source: OpenModel | None,
    batches: Sequence[Tensor],
    likeness: Callable[[str], Likeness],
    progress: Progress,
    seed: int = 0,
) -> Iterator[LayerMeasures]:
    """Each MoE layer's measures in order, on batches of token ids [B, L]; without a source, the visits after alone."""
    _refuse_different(source, output)
    by_unit = layers_by_unit(output.architecture.layers)
    progress.start("measure", len(by_unit))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        ahead = None if source is None else _Ahead(source, batches, likeness)
        state = _Pass(output, ahead, [batch.numel() for batch in batches], seed)
        stream = LayerStream(output.partial, batches, output.architecture.units, by_unit)
        with closing(stream.passing(state)) as passed, closing(state):
            for unit in passed:
                for watch in state.watches:
                    yield watch.finish()
                if unit in by_unit:
                    progress.advance(unit)
