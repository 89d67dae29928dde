"""From a checkpoint to a graph on disk with what the stock model says beside it: in memory, or layer by layer."""

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from compressor.errors import CompressionError
from compressor.memory import give_back
from compressor.model.loading import PartialModel
from compressor.model.opened import OpenModel
from compressor.progress import Progress
from exporters.onnx_absent import traced_model
from exporters.onnx_experts import LayerRoute, use_nodes
from exporters.onnx_graph import export_graph, trace_inputs
from exporters.onnx_layers import forget_scales, observe_streamed, round_layer, unit_of
from exporters.onnx_options import ExportOptions
from exporters.onnx_quantized_experts import FORMATS
from exporters.onnx_reference import Reference, observe
from exporters.onnx_weights import GraphFile, put_all

GRAPH, WEIGHTS = "model.onnx", "model.onnx.data"


@dataclass(frozen=True, slots=True)
class Made:
    """A graph on disk: its facts, and what it will be held to."""

    nodes: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    routes: tuple[LayerRoute, ...]
    owners: Mapping[str, str]  # of each large initialiser the model's tensor that it is made of
    reference: Reference  # of the stock model, with its rounded weights where they are rounded
    original: Reference | None  # before rounding, where weights are rounded


@dataclass(frozen=True, slots=True)
class _Writing:
    """What it takes to put a layer's tensors into the graph."""

    graph: GraphFile
    routes: tuple[LayerRoute, ...]
    options: ExportOptions
    by_unit: Mapping[str | None, Sequence[str]]  # the tensors that are wanted; of no layer under None

    def put(self, partial: PartialModel, unit: str) -> None:
        """Put a loaded layer's tensors, its experts rounded already."""
        nodes = {route.layer for route in self.routes if route.reason is None}
        put_all(self.graph, partial, self.by_unit.get(unit, ()), FORMATS[self.options.quantize], nodes)
        forget_scales(partial, unit)

    def put_rest(self, partial: PartialModel) -> None:
        """Load, put and give back what belongs to no layer, one tensor at a time."""
        for source in self.by_unit.get(None, ()):
            partial.load([source])
            put_all(self.graph, partial, [source], FORMATS[self.options.quantize], ())
            partial.release(source.rpartition(".")[0])
            give_back()


def write_graph(opened: OpenModel, content: Path, options: ExportOptions, layered: bool, progress: Progress) -> Made:
    """Ask the stock model everything, and write the graph with its weights into the folder `content`."""
    if options.past and not opened.partial.model.can_generate():
        kind = type(opened.partial.model).__name__
        raise CompressionError(f"{kind} does not generate text, so it has no cache; pass --no-past")
    return (_layer_by_layer if layered else _in_memory)(opened, content, options, progress)


def _traced(opened: OpenModel, content: Path, options: ExportOptions, progress: Progress) -> _Writing:
    """The graph with the places of its weights, which are absent."""
    progress.start("tracing", 2)
    inner, weights = opened.partial, FORMATS[options.quantize]
    model, mode = traced_model(PartialModel(inner.checkpoint, inner.config, inner.dtype, inner.device), weights)
    routes = use_nodes(model, options.fallback, options.dtype == "fp16", weights)
    progress.advance("experts")
    program = export_graph(model, trace_inputs(model, options.past, mode), options.opset)
    graph = GraphFile(program, content, GRAPH, WEIGHTS, options.external_bytes)
    progress.advance("graph")
    units = opened.architecture.units
    by_unit: dict[str | None, list[str]] = {}
    for source in graph.sources:
        by_unit.setdefault(unit_of(source, units), []).append(source)
    return _Writing(graph, routes, options, by_unit)


def _layer_by_layer(opened: OpenModel, content: Path, options: ExportOptions, progress: Progress) -> Made:
    """One layer in memory at a time, which is written while the stock model passes it."""
    weights = FORMATS[options.quantize]
    writing = _traced(opened, content, options, progress)
    original = None
    if weights.rounded is not None:
        original = observe_streamed(opened, False, 0, progress, lambda partial, unit: None)

    def shown(partial: PartialModel, unit: str) -> None:
        round_layer(partial, unit, weights)
        writing.put(partial, unit)

    reference = observe_streamed(opened, options.past, options.tokens, progress, shown)
    return _made(opened, writing, reference, original)


def _in_memory(opened: OpenModel, content: Path, options: ExportOptions, progress: Progress) -> Made:
    """The stock model whole; its layers go one after the other as they are written."""
    partial, weights, units = opened.partial, FORMATS[options.quantize], opened.architecture.units
    _load(partial, units, progress)
    original = None
    if weights.rounded is not None:
        with _in_float32(partial.model):
            original = observe(partial.model, past=False, tokens=0)
        round_layer(partial, "", weights)
    progress.start("observing the stock model", 1)
    with _in_float32(partial.model):
        reference = observe(partial.model, options.past, options.tokens, units)
    progress.advance("reference logits")
    writing = _traced(opened, content, options, progress)
    for unit in units:
        writing.put(partial, unit)
        partial.release(unit)
    return _made(opened, writing, reference, original)


def _made(opened: OpenModel, writing: _Writing, reference: Reference, original: Reference | None) -> Made:
    """Put what lies outside the layers, and save."""
    writing.put_rest(opened.partial)
    opened.partial.release("")
    file = writing.graph
    file.save()
    graph = file.program.graph
    made = Made(
        nodes=sum(1 for _ in graph.all_nodes()),
        inputs=tuple(value.name for value in graph.inputs),
        outputs=tuple(value.name for value in graph.outputs),
        routes=writing.routes,
        owners={key: recipe.source for key, recipe in file.recipes.items()},
        reference=reference,
        original=original,
    )
    gc.collect()
    give_back()
    return made


def _load(partial: PartialModel, units: tuple[str, ...], progress: Progress) -> None:
    """Fill the whole stock model, one decoder layer at a time."""
    progress.start("loading", len(units) + 1)
    for unit in units:
        partial.load(partial.keys_under(unit))
        progress.advance(unit)
    partial.load(partial.empty)
    progress.advance("embeddings and head")


@contextmanager
def _in_float32(model: nn.Module) -> Iterator[None]:
    """The model with its rounded weights in float32, and afterwards in its own dtypes again, without a change."""
    own = {name: value.dtype for name, value in (*model.named_parameters(), *model.named_buffers())}
    model.float()
    try:
        yield
    finally:
        for name, value in (*model.named_parameters(), *model.named_buffers()):
            value.data = value.data.to(own[name])
