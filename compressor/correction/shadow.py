"""The smaller model's own decoder layers, standing in for the original's while calibration batches pass them."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from compressor.model.architecture import build_meta
from compressor.model.loading import parent_and_name, set_tensor
from compressor.model.opened import OpenModel


class SmallerLayers:
    """The stock model with fewer experts on meta; one decoder layer of it at a time is filled and takes over."""

    def __init__(self, model: OpenModel, experts: int) -> None:
        self.partial = model.partial
        self.model = build_meta(model.architecture.with_experts(experts), model.partial.dtype)
        self.forwards: dict[str, Callable[..., Any]] = {}  # of the layer that is filled
        self.empty = {key: value.detach() for key, value in self.model.state_dict().items()}

    def enter(self, unit: str, cut: Mapping[str, torch.Tensor]) -> None:
        """Fill a layer with the cut tensors and, for the rest, the original's own, which must be loaded.

        Tensors are shared, not copied.
        """
        original = self.partial.model.get_submodule(unit)
        for key in self.partial.keys_under(unit):
            module, name = parent_and_name(self.partial.model, key)
            set_tensor(self.model, key, cut[key] if key in cut else getattr(module, name))
        module = self.model.get_submodule(unit)
        for name, part in module.named_modules():
            for key in part._non_persistent_buffers_set:
                part._buffers[key] = original.get_submodule(name)._buffers[key]
        self.forwards[unit] = module.forward

    def leave(self, unit: str) -> None:
        """Empty the layer."""
        del self.forwards[unit]
        for key in self.partial.keys_under(unit):
            set_tensor(self.model, key, self.empty[key])

    def get(self, module: str) -> Any:
        """A module of the smaller model by its name."""
        return self.model.get_submodule(module)
