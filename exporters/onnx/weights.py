"""From a checkpoint to a graph on disk: its tensors are put where they belong one layer after the other.

Every tensor has its place in the file of weights before the first is read, in the order of the graph, so the order of
reading changes no byte of it.
"""

import gc
import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compressor.errors import CompressionError, reason_of
from compressor.memory import give_back
from compressor.model.architecture import experts_modules
from compressor.model.loading import PartialModel, parent_and_name
from compressor.model.opened import OpenModel
from compressor.progress import Progress
from compressor.workdir.layer_files import put
from exporters.onnx.moe import SCALES, LayerRoute, activation, moe_node, round_experts, use_nodes
from exporters.onnx.quantise import Scheme
from exporters.onnx.reference import Reference, observe, unit_of
from exporters.onnx.trace import export_graph, recipe_of, trace_inputs, traced_model

GRAPH, WEIGHTS = "model.onnx", "model.onnx.data"
INLINE_BYTES = 1024  # a tensor no larger than this stays in the graph, where optimisers can read it


class GraphFile:
    """A graph in the making: `program` is an onnx_ir model whose large weights are absent.

    They lie in a file of their own beside the graph where all tensors together have more than `external_bytes`, and in
    the graph itself otherwise.
    """

    def __init__(self, program: Any, folder: Path, external_bytes: int) -> None:
        self.program, self.folder = program, folder
        self.values = dict(program.graph.initializers)
        self.recipes = {key: found for key, value in self.values.items() if (found := recipe_of(value)) is not None}
        self.made: dict[str, list[str]] = {}  # names of initialisers by the tensor that they are made of
        for key, recipe in self.recipes.items():
            self.made.setdefault(recipe.source, []).append(key)
        self.external = sum(value.const_value.nbytes for value in self.values.values()) > external_bytes
        self.places, end = {}, 0
        for key, value in self.values.items() if self.external else ():
            if value.const_value.nbytes > INLINE_BYTES:
                self.places[key], end = end, end + value.const_value.nbytes
        if self.external:
            (folder / WEIGHTS).touch()
            os.truncate(folder / WEIGHTS, end)
            for key in self.places.keys() - self.recipes.keys():
                self._write(key, self.values[key].const_value.tobytes())

    def put(self, source: str, value: Tensor) -> None:
        """Take a tensor of the model, of the shape and dtype that was traced."""
        import onnx_ir

        for key in self.made[source]:
            made, traced = self.recipes[key].made_of(value.detach()), self.values[key].const_value
            assert tuple(made.shape) == tuple(traced.shape) and made.nbytes == traced.nbytes, source
            if key in self.places:
                self._write(key, made.reshape(-1).view(torch.uint8).numpy().data)
            else:
                self.values[key].const_value = onnx_ir.tensor(made, name=key)

    def save(self) -> None:
        """Write the graph and check it. All tensors must have been put."""
        import onnx
        import onnx_ir

        for key, place in self.places.items():
            value = self.values[key]
            stored = value.const_value
            value.const_value = onnx_ir.ExternalTensor(
                WEIGHTS, place, stored.nbytes, stored.dtype, shape=stored.shape, name=key, base_dir=self.folder
            )
        onnx_ir.save(self.program, self.folder / GRAPH)
        try:
            onnx.checker.check_model(str(self.folder / GRAPH), full_check=True)
        except Exception as error:  # a class for each kind of fault
            raise CompressionError(f"the exported graph is not sound ONNX: {reason_of(error)}") from error

    def _write(self, key: str, content: Any) -> None:
        file = os.open(self.folder / WEIGHTS, os.O_WRONLY)
        try:
            put(content, file, self.places[key])
        finally:
            os.close(file)


def put_all(
    graph: GraphFile, partial: PartialModel, sources: Iterable[str], scheme: Scheme | None, nodes: Collection[str]
) -> None:
    """Put loaded tensors into the graph: as they are, or, of the experts modules in `nodes`, as their node wants them.

    With a scheme the weights of experts must have been rounded.
    """
    wanted = list(sources)
    for name, experts in experts_modules(partial.model):
        own = [source for source in wanted if name in nodes and source.rpartition(".")[0] == name]
        kind = activation(experts) if own else None
        if kind is not None:
            tensors = moe_node(experts, kind, scheme)[1]
            for source in own:
                graph.put(source, tensors.pop(source.rpartition(".")[2]))
                wanted.remove(source)
    for source in wanted:
        graph.put(source, getattr(*parent_and_name(partial.model, source)))


@dataclass(frozen=True, slots=True)
class Written:
    """A graph on disk: its facts, and what it will be held to."""

    nodes: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    routes: tuple[LayerRoute, ...]
    owners: Mapping[str, str]  # of each large initialiser the model's tensor that it is made of
    reference: Reference  # of the stock model, with its rounded weights where they are rounded
    original: Reference | None  # before rounding, where weights are rounded


def write_graph(
    opened: OpenModel,
    folder: Path,
    progress: Progress,
    scheme: Scheme | None = None,
    past: bool = True,
    tokens: int = 0,
    opset: int = 20,
    fallback: str = "batched_mm",
    external_bytes: int = 0,
) -> Written:
    """Trace the model, ask the stock one everything, and write each layer's weights while the questions pass it.

    Two layers, the graph and the embedding are the most that is in memory.
    """
    inner = opened.partial
    if past and not inner.model.can_generate():
        kind = type(inner.model).__name__
        raise CompressionError(f"{kind} does not generate text, so it has no cache; pass --no-past")
    progress.start("tracing", 2)
    empty = PartialModel(inner.checkpoint, inner.config, inner.dtype, inner.device)
    model, mode = traced_model(empty, scheme)
    routes = use_nodes(model, fallback, scheme)
    progress.advance("experts")
    graph = GraphFile(export_graph(model, trace_inputs(model, past, mode), opset), folder, external_bytes)
    progress.advance("graph")
    by_unit: dict[str | None, list[str]] = {}
    for source in graph.made:
        by_unit.setdefault(unit_of(source, opened.architecture.units), []).append(source)
    nodes = {route.layer for route in routes if route.reason is None}

    def shown(partial: PartialModel, unit: str) -> None:
        own = [experts for name, experts in experts_modules(partial.model) if name.startswith(f"{unit}.")]
        for experts in own:
            if scheme is not None:
                round_experts(experts, scheme)
        put_all(graph, partial, by_unit.get(unit, ()), scheme, nodes)
        for experts in own:
            vars(experts).pop(SCALES, None)
        give_back()

    original = None if scheme is None else observe(opened, False, 0, progress)
    reference = observe(opened, past, tokens, progress, shown)
    for source in by_unit.get(None, ()):  # what belongs to no layer, one tensor at a time
        inner.load([source])
        put_all(graph, inner, [source], scheme, ())
        inner.release(source.rpartition(".")[0])
        give_back()
    inner.release("")
    graph.save()
    program = graph.program.graph
    written = Written(
        nodes=sum(1 for _ in program.all_nodes()),
        inputs=tuple(value.name for value in program.inputs),
        outputs=tuple(value.name for value in program.outputs),
        routes=routes,
        owners={key: recipe.source for key, recipe in graph.recipes.items()},
        reference=reference,
        original=original,
    )
    gc.collect()
    give_back()
    return written
