"""The split itself: an expert's neurons in S runs, its router row S times.

A loaded layer's tensors are split, and a checkpoint is seen as its split: the stock model of the split config, whose
parts are split as they are loaded. Everything that plans, corrects and writes a model sees sub-experts as experts, and
no split checkpoint is written for that.

E experts, I neurons of each, H hidden, S parts. Expert e becomes eS to eS + S - 1, so that routing groups of
neighbours stay together.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from compressor.model.architecture import build_meta
from compressor.model.experts import expert_parameters, parameter_names
from compressor.model.loading import PartialModel, set_tensor
from compressor.model.moe_layer import MoeLayer
from compressor.steps.cutting import cut_keys, reordered
from compressor.steps.tensors import refuse_overflow


@dataclass(frozen=True, slots=True)
class Factors:
    """S parts of an expert, and what a part's down projection and its entries beside the router's weight are times."""

    parts: int
    output: float
    selection: float = 1.0


def divided(layer: MoeLayer) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Keys of the tensors of a layer that count experts: those of the experts module, and those of its router."""
    keys = cut_keys(layer)
    inside = tuple(key for key in keys if key.startswith(f"{layer.name}."))
    return inside, tuple(key for key in keys if key not in inside)


@torch.no_grad()
def split_experts(experts: Any, layer: MoeLayer, order: Tensor, factors: Factors) -> dict[str, Tensor]:
    """The fused parameters of an experts module, [E * S, ...] by state-dict key, filled one part at a time.

    `order` [E, I] lists each expert's neurons, which its parts take in equal runs. A bias of the down projection is
    shared out evenly. Raises `CompressionError` on overflow of the stored dtype.
    """
    split, parts = dict[str, Tensor](), factors.parts
    shares = {"down_proj": factors.output, "down_proj_bias": factors.output / parts}
    for expert, neurons in enumerate(order.to(experts.down_proj.device).long()):
        own = expert_parameters(experts, expert)
        for place, run in enumerate(neurons.chunk(parts)):
            for name in parameter_names(experts):
                value, share = reordered(experts, name, own[name], run), shares.get(name, 1.0)
                if share != 1.0:
                    value = (value.float() * share).to(value.dtype)
                if name not in split:
                    split[name] = value.new_empty(len(order) * parts, *value.shape)
                split[name][expert * parts + place] = value
    for name in shares.keys() & split.keys():
        refuse_overflow(f"{layer.name}.{name}", split[name])
    return {f"{layer.name}.{name}": value for name, value in split.items()}


@torch.no_grad()
def split_beside(
    state: Mapping[str, Tensor], layer: MoeLayer, keys: Iterable[str], factors: Factors
) -> dict[str, Tensor]:
    """Those of a layer's other tensors that are asked for: router rows and biases repeated, tables of ids extended.

    What belongs to no routed expert stays behind the parts. A table of expert ids [V, K] becomes one of all their parts
    [V, K * S].
    """
    split, known, parts = dict[str, Tensor](), {tensor.key: tensor for tensor in layer.tensors}, factors.parts
    for key in keys:
        value = state[key]
        if (tensor := known.get(key)) is None:
            numbers = torch.arange(parts, dtype=value.dtype, device=value.device)
            split[key] = (value[..., None] * parts + numbers).flatten(-2)
            continue
        dim, experts = tensor.dim, layer.experts
        if factors.selection != 1.0 and value.numel() == value.shape[dim]:  # a bias: [E], [1, E]
            value = (value.float() * factors.selection).to(value.dtype)
        own, others = value.narrow(dim, 0, experts), value.narrow(dim, experts, value.shape[dim] - experts)
        split[key] = torch.cat([own.repeat_interleave(parts, dim), others], dim)
    return split


class SplitModel(PartialModel):
    """The split model on meta; `orders` are the neurons [E, I] of each layer's experts by its name, once known."""

    def __init__(
        self,
        stored: PartialModel,
        layers: Iterable[MoeLayer],
        config: Any,
        factors: Factors,
        orders: Mapping[str, Tensor] | None = None,
    ) -> None:
        """`layers` are those of the `stored` model, and `config` that of the split one."""
        self.stored, self.layers, self.config = stored, {layer.name: layer for layer in layers}, config
        self.factors, self.orders, self.checkpoint = factors, orders, stored.checkpoint
        self.dtype, self.device, self.quantizer = stored.dtype, stored.device, stored.quantizer
        self.model = build_meta(self.config, self.dtype)
        self.empty = {key: value.detach() for key, value in self.model.state_dict().items()}
        self.keys, self.plain_keys = stored.keys, stored.plain_keys
        self.conversions, self.plain_conversions = stored.conversions, stored.plain_conversions
        self.tied, self.ahead = dict(stored.tied), stored.ahead
        self.owners = {key: layer for layer in self.layers.values() for key in cut_keys(layer)}
        self._loaded, self.kept = set[str](), dict[str, Tensor]()
        self._fill_constant_buffers()

    def stream(self) -> None:
        """Have the stored model kept no more; its parts are cut again in each pass."""
        self.stored.stream()

    def ordered(self, orders: Mapping[str, Tensor]) -> "SplitModel":
        """The same with the order of all neurons known, so that experts can be loaded."""
        return SplitModel(self.stored, self.layers.values(), self.config, self.factors, orders)

    def computing_in(self, dtype: torch.dtype, device: torch.device) -> "SplitModel":
        """The same model, empty, in another dtype or on another device; itself if it is in both."""
        if (self.dtype, self.device) == (dtype, device):
            return self
        stored = self.stored.computing_in(dtype, device)
        return SplitModel(stored, self.layers.values(), self.config, self.factors, self.orders)

    def load(self, keys: Iterable[str]) -> None:
        """Fill these state-dict entries; raises `CompressionError` as for the stored model."""
        wanted = [key for key in keys if key not in self._loaded]
        split: dict[str, set[str]] = {}  # by layer
        for key in wanted:
            if (layer := self.owners.get(key)) is not None:
                split.setdefault(layer.name, set()).add(key)
        self._put(self._read([key for each in wanted if (key := self.tied.get(each, each)) not in self.owners]))
        for name, own in split.items():
            layer = self.layers[name]
            inside, beside = divided(layer)
            if not own.isdisjoint(inside):
                assert self.orders is not None, "the order of neurons is not known yet"
                self.stored.load(inside)
                experts = split_experts(self.stored.model.get_submodule(name), layer, self.orders[name], self.factors)
                self.stored.release(name)
                self._put(experts)
                self._loaded |= experts.keys()
            others = [key for key in beside if key in own]
            self._put(split_beside(self._read(others), layer, others, self.factors))
        self._settle(wanted)

    def read_ahead(self, keys: Iterable[str]) -> None:
        """Have a thread read what `load` of these entries will need of the stored model."""
        self.stored.read_ahead(key for key in keys if key not in self._loaded)

    def _read(self, keys: list[str]) -> dict[str, Tensor]:
        if not keys:
            return {}
        self.stored.load(keys)
        state = self.stored.model.state_dict()
        tensors = {key: state[key] for key in keys}
        for module in {key.rpartition(".")[0] for key in keys}:
            self.stored.release(module)
        return tensors

    def _put(self, tensors: Mapping[str, Tensor]) -> None:
        for key, value in tensors.items():
            set_tensor(self.model, key, value)
