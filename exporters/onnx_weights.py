"""The tensors of a traced graph, put where they belong one layer after the other.

Every tensor has its place in the file of weights before the first is read, in the order of the graph, so the order of
reading changes no byte of it.
"""

import os
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compressor.errors import CompressionError, reason_of
from compressor.model.architecture import experts_modules
from compressor.model.loading import PartialModel, parent_and_name
from compressor.workdir.layer_files import put
from exporters.onnx_absent import recipe_of
from exporters.onnx_activation import activation
from exporters.onnx_experts import WeightFormat

INLINE_BYTES = 1024  # a tensor no larger than this stays in the graph, where optimisers can read it


class GraphFile:
    """A graph in the making: `program` is an onnx_ir model whose large weights are absent.

    They lie in the file `weights` beside the graph `name` where all tensors together have more than `external_bytes`,
    and in the graph itself otherwise.
    """

    def __init__(self, program: Any, folder: Path, name: str, weights: str, external_bytes: int) -> None:
        self.program, self.folder, self.name, self.weights = program, folder, name, weights
        self.values = dict(program.graph.initializers)
        self.recipes = {key: found for key, value in self.values.items() if (found := recipe_of(value)) is not None}
        self.made: dict[str, list[str]] = {}  # names of initialisers by the tensor that they are made of
        for key, recipe in self.recipes.items():
            self.made.setdefault(recipe.source, []).append(key)
        self.missing = set(self.recipes)
        self.external = sum(value.const_value.nbytes for value in self.values.values()) > external_bytes
        self.places, end = {}, 0
        for key, value in self.values.items() if self.external else ():
            if value.const_value.nbytes > INLINE_BYTES:
                self.places[key], end = end, end + value.const_value.nbytes
        if self.external:
            (folder / weights).touch()
            os.truncate(folder / weights, end)
            for key in self.places.keys() - self.recipes.keys():
                self._write(key, self.values[key].const_value.tobytes())

    @property
    def sources(self) -> tuple[str, ...]:
        """Names of the model's tensors that have to be put."""
        return tuple(self.made)

    def put(self, source: str, value: Tensor) -> None:
        """Take a tensor of the model; raises `CompressionError` for one of another shape or dtype than was traced."""
        import onnx_ir

        for key in self.made[source]:
            made, traced = self.recipes[key].made_of(value.detach()), self.values[key].const_value
            if tuple(made.shape) != tuple(traced.shape) or made.element_size() * made.numel() != traced.nbytes:
                raise CompressionError(
                    f"the tensor {source!r} was traced as {list(traced.shape)} and loaded as {list(made.shape)}; "
                    "please report this model"
                )
            if key in self.places:
                self._write(key, made.reshape(-1).view(torch.uint8).numpy().data)
            else:
                self.values[key].const_value = onnx_ir.tensor(made, name=key)
            self.missing.discard(key)

    def save(self) -> None:
        """Write the graph and check it. All tensors must have been put."""
        import onnx
        import onnx_ir

        if self.missing:
            raise CompressionError(
                f"the tensor {min(self.missing)!r} of the graph was not made; please report this model"
            )
        for key, place in self.places.items():
            value = self.values[key]
            stored = value.const_value
            value.const_value = onnx_ir.ExternalTensor(
                self.weights, place, stored.nbytes, stored.dtype, shape=stored.shape, name=key, base_dir=self.folder
            )
        onnx_ir.save(self.program, self.folder / self.name)
        try:
            onnx.checker.check_model(str(self.folder / self.name), full_check=True)
        except Exception as error:  # a class for each kind of fault
            raise CompressionError(f"the exported graph is not sound ONNX: {reason_of(error)}") from error

    def _write(self, key: str, content: Any) -> None:
        file = os.open(self.folder / self.weights, os.O_WRONLY)
        try:
            put(content, file, self.places[key])
        finally:
            os.close(file)


def put_all(
    graph: GraphFile, partial: PartialModel, sources: Iterable[str], weights: WeightFormat, nodes: Collection[str]
) -> None:
    """Put loaded tensors into the graph: as they are, or, of the experts modules in `nodes`, as their node wants them.

    Weights of experts must have been rounded if `weights` are.
    """
    wanted = list(sources)
    for name, experts in experts_modules(partial.model):
        own = [source for source in wanted if name in nodes and source.rpartition(".")[0] == name]
        kind = activation(experts) if own else None
        if kind is not None:
            tensors = weights.node(experts, kind)[1]
            for source in own:
                graph.put(source, tensors.pop(source.rpartition(".")[2]))
                wanted.remove(source)
    for source in wanted:
        graph.put(source, getattr(*parent_and_name(partial.model, source)))
