"""A checkpoint seen as its split: the stock model of the split config, whose parts are split as they are loaded.

Everything that plans, corrects and writes a model sees sub-experts as experts, and no split checkpoint is written
for that. Of the stored model one decoder layer's experts are in memory beside those that are made of them.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from compressor.errors import CompressionError
from compressor.model.architecture import Architecture, MoeLayer, build_meta
from compressor.model.loading import PartialModel, set_tensor
from compressor.steps.split.shape import SplitShape
from compressor.steps.split.tensors import Factors, divided, split_beside, split_experts


class SplitModel(PartialModel):
    """The split model on meta; `orders` are the neurons [E, I] of each layer's experts by its name, once known."""

    def __init__(
        self,
        stored: PartialModel,
        architecture: Architecture,
        shape: SplitShape,
        factors: Factors,
        orders: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.stored, self.architecture, self.shape = stored, architecture, shape
        self.factors, self.orders = factors, orders
        self.checkpoint, self.config = stored.checkpoint, shape.architecture.config
        self.dtype, self.device, self.quantizer = stored.dtype, stored.device, stored.quantizer
        self.model = build_meta(self.config, self.dtype)
        self.empty = {key: value.detach() for key, value in self.model.state_dict().items()}
        self.keys, self.plain_keys = stored.keys, stored.plain_keys
        self.conversions, self.plain_conversions = stored.conversions, stored.plain_conversions
        self.tied, self.ahead = dict(stored.tied), stored.ahead
        self.owners: dict[str, MoeLayer] = {
            key: layer for layer in architecture.layers for keys in divided(layer) for key in keys
        }
        self._loaded = set[str]()
        self._fill_constant_buffers()

    def ordered(self, orders: Mapping[str, Tensor]) -> "SplitModel":
        """The same with the order of all neurons known, so that experts can be loaded."""
        return SplitModel(self.stored, self.architecture, self.shape, self.factors, orders)

    def computing_in(self, dtype: torch.dtype, device: torch.device) -> "SplitModel":
        """The same model, empty, in another dtype or on another device; itself if it is in both."""
        if (self.dtype, self.device) == (dtype, device):
            return self
        stored = self.stored.computing_in(dtype, device)
        return SplitModel(stored, self.architecture, self.shape, self.factors, self.orders)

    def load(self, keys: Iterable[str]) -> None:
        """Fill these state-dict entries; raises `CompressionError` as for the stored model."""
        wanted = [key for key in keys if key not in self._loaded]
        owned: dict[str, set[str]] = {}
        for key in wanted:
            if (layer := self.owners.get(key)) is not None:
                owned.setdefault(layer.name, set()).add(key)
        plain = [source for key in wanted if (source := self.tied.get(key, key)) not in self.owners]
        self._take(plain, self._read(plain))
        layers = {layer.name: layer for layer in self.architecture.layers}
        for name, asked in owned.items():
            self._split(layers[name], asked)
        self._settle(wanted)

    def read_ahead(self, keys: Iterable[str]) -> None:
        """Have a thread read what `load` of these entries will need of the stored model."""
        self.stored.read_ahead(key for key in keys if key not in self._loaded)

    def _read(self, keys: list[str]) -> dict[str, Tensor]:
        """Tensors of the stored model, which gives them away."""
        if not keys:
            return {}
        self.stored.load(keys)
        state = self.stored.model.state_dict()
        found = {key: state[key] for key in keys}
        for module in {key.rpartition(".")[0] for key in keys}:
            self.stored.release(module)
        return found

    def _take(self, keys: Iterable[str], values: Mapping[str, Tensor]) -> None:
        for key in keys:
            set_tensor(self.model, key, values[key])

    def _split(self, layer: MoeLayer, asked: set[str]) -> None:
        """Make what is asked for of a layer's tensors that count experts."""
        inside, beside = divided(layer)
        if asked & set(inside):
            if self.orders is None:
                raise CompressionError(f"{layer.name}: the order of its neurons is not known yet; please report this")
            self.stored.load(inside)
            experts = self.stored.model.get_submodule(layer.name)
            made = split_experts(experts, layer, self.orders[layer.name], self.shape.parts, self.factors)
            self.stored.release(layer.name)
            self._take(made, made)
            self._loaded |= made.keys()
        if others := [key for key in beside if key in asked]:
            made = split_beside(self._read(others), layer, others, self.shape.parts, self.factors)
            self._take(made, made)
