"""Which tensors of a decoder layer a recovery trains, and what stands for them while it does: float32 masters.

A tensor trained whole has one master. One that LoRA trains has two, its factors, and stays what it was itself.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from compressor.errors import CompressionError
from compressor.model.architecture import MoeLayer, layers_by_unit
from compressor.model.experts import parameter_names
from compressor.model.opened import OpenModel
from compressor.steps.distill import lora
from compressor.steps.distill.step import Distill

Masters = dict[str, Tensor]  # by name: a state-dict key, or one of a key's factors
FACTORS = ("lora_A", "lora_B")


@dataclass(frozen=True, slots=True)
class TrainedLayer:
    """State-dict keys of what is trained of the decoder layer `unit`: `whole`, or through LoRA's factors."""

    unit: str
    whole: tuple[str, ...]
    factored: tuple[str, ...] = ()

    @property
    def keys(self) -> tuple[str, ...]:
        """All of them."""
        return (*self.whole, *self.factored)

    def begin(self, own: Mapping[str, Tensor], rank: int, seed: int) -> Masters:
        """Masters that leave the layer's `own` tensors as they are."""
        masters = {key: own[key].detach().to(torch.float32, copy=True) for key in self.whole}
        for key in self.factored:
            digest = hashlib.sha256(f"{seed} {key}".encode()).digest()  # no factor hangs on which others there are
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:6], "big"))
            pair = lora.begin(tuple(own[key].shape), rank, generator)
            masters.update(zip(_factors(key), (value.to(own[key].device) for value in pair), strict=True))
        return masters

    def values(self, own: Mapping[str, Tensor], masters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The layer's tensors in float32 that these masters stand for; `own` are those that it was read with."""
        found = {key: masters[key] for key in self.whole}
        return found | {key: lora.merged(own[key], *_pair(masters, key)) for key in self.factored}

    def gradients(self, masters: Mapping[str, Tensor], dense: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
        """The masters' gradients of those of the layer's tensors, of which None is nothing."""
        found = dict[str, Tensor]()
        for key in self.whole:
            gradient = dense[key]
            found[key] = torch.zeros_like(masters[key]) if gradient is None else gradient.detach().float()
        for key in self.factored:
            pair, gradient = _pair(masters, key), dense[key]
            made = map(torch.zeros_like, pair) if gradient is None else lora.factor_gradients(gradient.detach(), *pair)
            found.update(zip(_factors(key), made, strict=True))
        return found


def _factors(key: str) -> tuple[str, ...]:
    return tuple(f"{key}.{name}" for name in FACTORS)


def _pair(masters: Mapping[str, Tensor], key: str) -> tuple[Tensor, Tensor]:
    first, second = (masters[name] for name in _factors(key))
    return first, second


def trained_layers(model: OpenModel, options: Distill) -> tuple[TrainedLayer, ...]:
    """What the method trains, in the order of the decoder layers; those of which nothing is trained are left out.

    `experts`: the experts' tensors and the routers' parameters; `router`: those of the routers alone; `lora`: factors
    of every linear layer and of the experts' matrices, and the routers' parameters whole; `all`: every floating-point
    parameter. What lies outside the decoder layers (embeddings, head, the last norm) is never trained. Raises
    `CompressionError` for a tensor that another layer shares.
    """
    by_unit, whole = layers_by_unit(model.architecture.layers), model.partial.model
    parameters = {key for key, value in whole.named_parameters() if value.is_floating_point()}
    shared = {*model.partial.tied, *model.partial.tied.values()}
    found = []
    for unit in model.architecture.units:
        own = [key for key in model.partial.keys_under(unit) if key in parameters]
        chosen = _chosen(whole, unit, own, by_unit.get(unit, []), options.train)
        for key in chosen.keys:
            if key in shared:
                raise CompressionError(f"{key} is shared by two layers, so it cannot be trained as one of them")
        if chosen.keys:
            found.append(chosen)
    return tuple(found)


def _chosen(model: nn.Module, unit: str, own: list[str], layers: list[MoeLayer], method: str) -> TrainedLayer:
    if method == "all":
        return TrainedLayer(unit, tuple(own))
    routers = tuple(f"{layer.router}." for layer in layers)
    whole = tuple(key for key in own if key.startswith(routers))
    if method == "router":
        return TrainedLayer(unit, whole)
    experts = tuple(f"{layer.name}." for layer in layers)
    if method == "experts":
        return TrainedLayer(unit, (*(key for key in own if key.startswith(experts)), *whole))
    matrices = {f"{layer.name}.{name}" for layer in layers for name in _matrices(model.get_submodule(layer.name))}
    matrices |= {
        f"{name}.weight"
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and not f"{name}.".startswith((*routers, *experts))
    }
    return TrainedLayer(unit, whole, tuple(key for key in own if key in matrices))


def _matrices(experts: nn.Module) -> tuple[str, str]:
    up, down, *_ = parameter_names(experts)
    return up, down
