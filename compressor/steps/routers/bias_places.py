"""Where a bias for each expert can go in a stock checkpoint: into a bias that the router has, or into its weight.

T tokens, E experts (and any rows beyond them), H width.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from compressor.model.architecture import MoeLayer, layers_by_unit
from compressor.model.opened import OpenModel
from compressor.model.streaming import LayerStream, LayerVisitor
from compressor.pathways.router_logits import Product, router_weight, watched

Kind = Literal["router bias", "selection bias", "router weight"]
RIDGE = 0.01  # of the mean square of a router's inputs


@dataclass(frozen=True, slots=True)
class BiasPlace:
    """The tensor of a layer's router that takes a bias.

    A router bias is added to the logits. A selection bias is added to the scores by which experts are chosen, and
    their weights stay as they are. A router weight takes b u', where u·x is close to 1 for what the router is given:
    `mean` and `deviation` say how close, over all tokens.
    """

    layer: str
    key: str
    kind: Kind
    direction: Tensor | None = None  # u [H]
    mean: float = 1.0
    deviation: float = 0.0

    def moved(self, own: Tensor, logits: Tensor, scores: Tensor) -> Tensor:
        """The tensor `own` with a change of the logits [E] in it; `scores` [E] is what that does to the scores."""
        if self.direction is not None:
            change = torch.outer(logits.double(), self.direction.to(logits.device))
        else:
            change = (scores if self.kind == "selection bias" else logits).double().reshape(own.shape)
        return (own.double() + change).to(own.dtype)


def bias_places(model: OpenModel, layers: Sequence[MoeLayer], batches: Sequence[Tensor]) -> list[BiasPlace]:
    """Where the biases of these MoE layers go, from one streamed pass of some text (token ids [B, L]).

    Layers that text does not reach, as those of images, have none.
    """
    seen = _Inputs(model, layers)
    units = model.architecture.units
    LayerStream(model.partial, batches, units, {layer.unit for layer in layers}).run(seen)
    return [_place(model, layer, seen.found[layer.name]) for layer in layers if layer.name in seen.found]


@dataclass(slots=True)
class _Sums:
    """What a layer's router is given: X'X [H, H], X'1 [H], and the bias that its product has."""

    squares: Tensor
    sums: Tensor
    tokens: int = 0
    bias: Tensor | None = None  # [E]


@dataclass(slots=True)
class _Inputs(LayerVisitor):
    model: OpenModel
    layers: Sequence[MoeLayer]
    found: dict[str, _Sums] = field(default_factory=dict)
    _watching: ExitStack = field(default_factory=ExitStack)

    def loaded(self, unit: str) -> None:
        for layer in layers_by_unit(self.layers).get(unit, ()):
            self._watching.enter_context(watched(self.model.partial.model, layer, self._adding(layer.name)))

    def passed(self, unit: str) -> None:
        self._watching.close()

    def _adding(self, name: str) -> Any:
        def add(product: Product) -> None:
            x = product.inputs.detach().double()
            width = x.shape[1]
            empty = _Sums(torch.zeros(width, width, dtype=torch.float64), torch.zeros(width, dtype=torch.float64))
            sums = self.found.setdefault(name, empty)
            sums.squares += (x.T @ x).cpu()
            sums.sums += x.sum(0).cpu()
            sums.tokens += len(x)
            sums.bias = None if product.bias is None else product.bias.detach().float().cpu()

        return add


def _place(model: OpenModel, layer: MoeLayer, seen: _Sums) -> BiasPlace:
    if (key := _bias(model, layer)) is not None:
        return BiasPlace(layer.name, key, "selection bias" if seen.bias is None else "router bias")
    square = seen.squares.diagonal().mean().clamp_min(torch.finfo(torch.float32).tiny)
    ridged = seen.squares + RIDGE * square * torch.eye(len(seen.sums), dtype=torch.float64)
    direction = torch.linalg.solve(ridged, seen.sums)
    mean = float(direction @ seen.sums) / seen.tokens
    spread = float(direction @ seen.squares @ direction) / seen.tokens - mean**2
    return BiasPlace(layer.name, router_weight(layer), "router weight", direction, mean, max(spread, 0.0) ** 0.5)


def _bias(model: OpenModel, layer: MoeLayer) -> str | None:
    """The state-dict key of the one tensor outside the experts with a bias for each expert, if there is one."""
    inside = f"{layer.block}."
    found = [
        tensor.key
        for tensor in layer.tensors
        if tensor.key.startswith(inside)
        and not tensor.key.startswith(f"{layer.name}.")
        and tensor.key.rpartition(".")[2].endswith("bias")
        and model.partial.empty[tensor.key].numel() == layer.experts + tensor.extra
    ]
    return found[0] if len(found) == 1 else None
