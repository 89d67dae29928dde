"""From a checkpoint to a graph on disk: its tensors are put where they belong one layer after the other.

Every tensor has its place in the file of weights before the first is read, in the order of the graph, so the order of
reading changes no byte of it.
"""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from compressor.errors import CompressionError, reason_of
from compressor.memory import give_back
from compressor.model.architecture import experts_modules
from compressor.model.loading import PartialModel, parent_and_name
from compressor.model.opened import OpenModel
from compressor.progress import Progress
from compressor.steps.workdir import put
from exporters.onnx.moe import SCALES, LayerRoute, moe_node, round_experts, use_nodes
from exporters.onnx.reference import Reference, observe, unit_of
from exporters.onnx.trace import export_graph, recipe_of, trace_inputs, traced_model

if TYPE_CHECKING:
    from exporters.onnx import ExportOptions

GRAPH, WEIGHTS = "model.onnx", "model.onnx.data"
INLINE_BYTES = 1024  # a tensor no larger than this stays in the graph, where optimisers can read it


class GraphFile:
    """A graph in the making: `program` is an onnx_ir model whose large weights are absent.

    They go to a file of their own if all tensors together have more than `external_bytes`, and to the graph otherwise.
    """

    def __init__(self, program: Any, folder: Path, external_bytes: int) -> None:
        self.program, self.folder = program, folder
        self.values = dict(program.graph.initializers)
        self.recipes = {key: found for key, value in self.values.items() if (found := recipe_of(value)) is not None}
        self.made: dict[str, list[str]] = {}  # names of initialisers by the tensor that they are made of
        for key, recipe in self.recipes.items():
            self.made.setdefault(recipe.source, []).append(key)
        sizes, end = {key: value.const_value.nbytes for key, value in self.values.items()}, 0
        self.places: dict[str, int] = {}  # in the file of weights
        if sum(sizes.values()) > external_bytes:
            for key, nbytes in sizes.items():
                if nbytes > INLINE_BYTES:
                    self.places[key], end = end, end + nbytes
            (folder / WEIGHTS).touch()
            os.truncate(folder / WEIGHTS, end)
            for key in self.places.keys() - self.recipes.keys():
                self._write(key, self.values[key].const_value.tobytes())

    def put(self, source: str, value: Tensor) -> None:
        """Take a tensor of the model, of the shape and dtype that was traced."""
        import onnx_ir

        for key in self.made[source]:
            content, traced = self.recipes[key].made_of(value.detach()), self.values[key].const_value
            assert tuple(content.shape) == tuple(traced.shape) and content.nbytes == traced.nbytes, source
            if key in self.places:
                self._write(key, content.reshape(-1).view(torch.uint8).numpy().data)
            else:
                self.values[key].const_value = onnx_ir.tensor(content, name=key)

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
        with (self.folder / WEIGHTS).open("r+b") as file:
            put(content, file.fileno(), self.places[key])


def write_graph(
    opened: OpenModel, folder: Path, options: "ExportOptions", progress: Progress
) -> tuple[GraphFile, tuple[LayerRoute, ...], Reference, Reference | None]:
    """Trace the model, observe the stock one, and write each layer's weights while its cases pass them.

    Returns the graph, how each MoE layer is written, the stock model's logits (with rounded weights where they are
    rounded), and those before rounding if so. At most two layers, the graph and the embedding are in memory.
    """
    scheme = options.scheme
    inner = opened.partial
    if options.past and not inner.model.can_generate():
        kind = type(inner.model).__name__
        raise CompressionError(f"{kind} does not generate text, so it has no cache; pass --no-past")
    progress.start("tracing", 2)
    empty = PartialModel(inner.checkpoint, inner.config, inner.dtype, inner.device)
    model, mode = traced_model(empty, scheme)
    routes = use_nodes(model, options.fallback, scheme)
    progress.advance("experts")
    program = export_graph(model, trace_inputs(model, options.past, mode), options.opset)
    graph = GraphFile(program, folder, options.external_bytes)
    progress.advance("graph")
    by_unit: dict[str | None, list[str]] = {}
    for source in graph.made:
        by_unit.setdefault(unit_of(source, opened.architecture.units), []).append(source)
    nodes = {route.layer for route in routes if route.reason is None}

    def shown(partial: PartialModel, unit: str) -> None:
        tensors = dict[str, Tensor]()  # of MoE nodes, which are not those of the model
        for name, experts in experts_modules(partial.model):
            if not name.startswith(f"{unit}."):
                continue
            if scheme is not None:
                round_experts(experts, scheme)
            if name in nodes:
                tensors |= {f"{name}.{key}": value for key, value in moe_node(experts, scheme)[1].items()}
            vars(experts).pop(SCALES, None)
        for source in by_unit.get(unit, ()):
            value = tensors.pop(source) if source in tensors else getattr(*parent_and_name(partial.model, source))
            graph.put(source, value)
        give_back()

    original = None if scheme is None else observe(opened, False, 0, progress)
    reference = observe(opened, options.past, options.tokens, progress, shown)
    for source in by_unit.get(None, ()):  # what belongs to no layer, one tensor at a time
        inner.load([source])
        graph.put(source, getattr(*parent_and_name(inner.model, source)))
        inner.release(source.rpartition(".")[0])
        give_back()
    inner.release("")
    graph.save()
    return graph, routes, reference, original
