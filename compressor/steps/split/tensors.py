"""The split itself: an expert's neurons in S runs, its router row S times.

A loaded layer's tensors are split, and a checkpoint is seen as its split: the stock model of the
split config, whose parts are split as they are loaded. Everything that plans, corrects and writes a
model sees sub-experts as experts, and no split checkpoint is written for that.

E experts, I neurons of each, H hidden, S parts. Expert e becomes eS to eS + S - 1, so that routing
groups of neighbours stay together."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from compressor.frozen import frozen
from compressor.model.architecture import build_meta
from compressor.model.experts import expert_parameters, parameter_names
from compressor.model.loading import PartialModel, set_tensor
from compressor.model.moe_layer import MoeLayer
from compressor.steps.cutting import Tensors, cut_keys, reordered
from compressor.steps.tensors import refuse_overflow


@frozen
class Factors:
    """S parts of an expert, and what a part's down projection and its entries beside the router's
    weight are times."""

    parts: int
    output: float
    selection: float = 1.0


@torch.no_grad()
def split_experts(experts: Any, layer: MoeLayer, order: Tensor, factors: Factors) -> Tensors:
    """Return the fused parameters of an experts module, [E * S, ...] by state-dict key, filled one
    part at a time.

    `order` [E, I] lists each expert's neurons, which its parts take in equal runs. A bias of the
    down projection is shared out evenly. Raises `CompressionError` on overflow of the stored dtype.
    """
    split = {}
    shares = {"down_proj": factors.output, "down_proj_bias": factors.output / factors.parts}
    for expert, neurons in enumerate(order.to(experts.down_proj.device).long()):
        parameters = expert_parameters(experts, expert)
        for part, run in enumerate(neurons.chunk(factors.parts)):
            for name in parameter_names(experts):
                value = reordered(experts, name, parameters[name], run)
                if shares.get(name, 1.0) != 1.0:
                    value = (value.float() * shares[name]).to(value.dtype)
                if name not in split:
                    split[name] = value.new_empty(len(order) * factors.parts, *value.shape)
                split[name][expert * factors.parts + part] = value
    for name in shares.keys() & split.keys():
        refuse_overflow(f"{layer.name}.{name}", split[name])
    return {f"{layer.name}.{name}": value for name, value in split.items()}


@torch.no_grad()
def split_beside(key: str, value: Tensor, layer: MoeLayer, factors: Factors) -> Tensor:
    """Return a layer's tensor beside its experts, for their parts: a router's rows and biases are
    repeated.

    What belongs to no routed expert stays behind the parts. A table of expert ids [V, K] becomes
    one of all their parts [V, K * S]."""
    tensor = next((tensor for tensor in layer.tensors if tensor.key == key), None)
    if tensor is None:
        numbers = torch.arange(factors.parts, dtype=value.dtype, device=value.device)
        return (value[..., None] * factors.parts + numbers).flatten(-2)
    if factors.selection != 1.0 and value.numel() == value.shape[tensor.dim]:  # a bias: [E], [1, E]
        value = (value.float() * factors.selection).to(value.dtype)
    routed, others = value.tensor_split([layer.experts], tensor.dim)
    return torch.cat([routed.repeat_interleave(factors.parts, tensor.dim), others], tensor.dim)


class SplitModel(PartialModel):
    """The split model on meta; `orders` are the neurons [E, I] of each layer's experts by its name,
    once known."""

    def __init__(
        self,
        stored: PartialModel,
        layers: Iterable[MoeLayer],
        config: Any,
        factors: Factors,
        orders: Tensors | None = None,
    ) -> None:
        """`layers` are those of the `stored` model, and `config` that of the split one."""
        vars(self).update(vars(stored))  # the fields below are its own
        self.stored = stored
        self.layers = {layer.name: layer for layer in layers}
        self.config = config
        self.factors = factors
        self.orders = orders
        self.model = build_meta(config, stored.dtype)
        self.empty = {key: value.detach() for key, value in self.model.state_dict().items()}
        self.owners = {key: layer for layer in self.layers.values() for key in cut_keys(layer)}
        self._loaded = set[str]()
        self.kept = dict[str, Tensor]()
        self.resident = False
        self._fill_constant_buffers()

    def stream(self) -> None:
        """Stop keeping the stored model in memory; its parts are cut again in each pass."""
        self.stored.stream()

    def computing_in(self, dtype: torch.dtype, device: torch.device) -> "SplitModel":
        """Return the same model, empty, in another dtype or on another device; itself if it is in
        both."""
        stored = self.stored.computing_in(dtype, device)
        if stored is self.stored:
            return self
        return SplitModel(stored, self.layers.values(), self.config, self.factors, self.orders)

    def load(self, keys: Iterable[str]) -> None:
        """Fill these state-dict entries; raises `CompressionError` as for the stored model."""
        missing = [key for key in keys if key not in self._loaded]
        plain = []
        of_layers = dict[str, list[str]]()
        for key in missing:
            if key in self.owners:
                of_layers.setdefault(self.owners[key].name, []).append(key)
            else:
                plain.append(self.tied.get(key, key))
        for key, value in self._read([key for key in plain if key not in self.owners]).items():
            set_tensor(self.model, key, value)
        for name, layer_keys in of_layers.items():
            layer = self.layers[name]
            beside = [key for key in layer_keys if not key.startswith(f"{name}.")]
            if beside != layer_keys:
                assert self.orders is not None, "the order of neurons is not known yet"
                self.stored.load(self.stored.keys_under(name))
                module = self.stored.model.get_submodule(name)
                experts = split_experts(module, layer, self.orders[name], self.factors)
                self.stored.release(name)
                for key, value in experts.items():
                    set_tensor(self.model, key, value)
                self._loaded |= experts.keys()
            for key, value in self._read(beside).items():
                set_tensor(self.model, key, split_beside(key, value, layer, self.factors))
        self._settle(missing)

    def read_ahead(self, keys: Iterable[str]) -> None:
        """Have a thread read what `load` of these entries will need of the stored model."""
        self.stored.read_ahead(key for key in keys if key not in self._loaded)

    def _read(self, keys: list[str]) -> Tensors:
        if not keys:
            return {}
        self.stored.load(keys)
        state = self.stored.model.state_dict()
        tensors = {key: state[key] for key in keys}
        for module in {key.rpartition(".")[0] for key in keys}:
            self.stored.release(module)
        return tensors
