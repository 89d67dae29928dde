"""Variants of a model, with other decoder layers, that run side by side, one layer of one of them
in memory."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from compressor.model.architecture import build_meta
from compressor.model.constant_experts import Substitutes, substitute
from compressor.model.loading import set_tensor
from compressor.model.opened import OpenModel
from compressor.model.streaming import Forward, LayerVisitor

LayerTensors = Callable[[str], Mapping[str, Tensor] | None]
Around = Callable[[Any, str], AbstractContextManager[Any]]


@dataclass(frozen=True, slots=True, eq=False)
class Substitution:
    """A variant of a model: other tensors in its decoder layers, constants in place of experts, and
    changes of how layers compute.

    `tensors` returns tensors by state-dict key for a decoder layer that is loaded, or None to leave
    it unchanged. All other tensors of a layer are the model's own. `around` returns a context in
    which each forward of a decoder layer runs, such as one with hooks: it takes the live model that
    holds the layer, and the layer's name."""

    tensors: LayerTensors | None = None
    experts: int | None = None  # None: the model's number
    constants: Mapping[str, Substitutes] = field(default_factory=dict)  # by experts module
    around: Around | None = None


AS_IT_IS = Substitution()


class SmallerModel:
    """The stock model on meta, possibly with fewer experts, of which one decoder layer at a time is
    filled."""

    def __init__(self, model: OpenModel, experts: int | None) -> None:
        self.partial = model.partial
        architecture = model.architecture
        config = architecture.config if experts is None else architecture.with_experts(experts)
        self.model = build_meta(config, model.partial.dtype)
        self.filled: str | None = None
        self._constants: Mapping[str, Substitutes] = {}

    def fill(self, decoder_layer: str, tensors: Mapping[str, Tensor]) -> Forward:
        """Fill a layer with these tensors and the base's others, which must be loaded; return its
        forward.

        Tensors are shared, not copied.
        """
        base = self.partial.model
        for key in self.partial.keys_under(decoder_layer):
            value = tensors[key] if key in tensors else base.get_parameter_or_buffer(key)
            set_tensor(self.model, key, value)
        layer = self.model.get_submodule(decoder_layer)
        for name, module in layer.named_modules(prefix=decoder_layer):
            for key in module._non_persistent_buffers_set:
                module._buffers[key] = base.get_submodule(name)._buffers[key]
        self.filled = decoder_layer
        forward: Forward = layer.forward
        return forward

    def put_constants(self, constants: Mapping[str, Substitutes]) -> None:
        """Substitute constants, by experts module, for experts of the filled layer."""
        self._constants = constants
        for name, substitutes in constants.items():
            values = substitutes.values.to(self.partial.device, self.partial.dtype)
            substitute(self.model.get_submodule(name), replace(substitutes, values=values))

    def release(self) -> None:
        """Empty the filled layer, if there is one."""
        if self.filled is not None:
            for key in self.partial.keys_under(self.filled):
                empty = self.model.get_parameter_or_buffer(key).to("meta")
                set_tensor(self.model, key, empty)
        for name in self._constants:
            substitute(self.model.get_submodule(name), None)
        self.filled = None
        self._constants = {}


class SideBySide(LayerVisitor):
    """Passes every batch through the layers of its own variant, on the outputs of that variant's
    earlier layers.

    `variants` are the substitutions by batch. Batches of a variant follow one another, so that only
    one variant of a layer is in memory beside the model's."""

    repeatable = True

    def __init__(self, model: OpenModel, variants: Sequence[Substitution]) -> None:
        self.model = model
        self.variants = variants
        self._smaller: dict[int | None, SmallerModel] = {}  # by experts
        self._filled: Substitution | None = None  # the variant whose layer is ready
        self._live = model.partial.model  # that holds that layer

    def wrap_forward(self, decoder_layer: str, layer_forward: Forward) -> Forward:
        variant = self.variants[self.at.batch]
        if variant is not self._filled:
            self.on_layer_end(decoder_layer)
            tensors = variant.tensors(decoder_layer) if variant.tensors else None
            names = [layer.name for layer in self.at.moe_layers if layer.name in variant.constants]
            if tensors is not None or names:
                if variant.experts not in self._smaller:
                    self._smaller[variant.experts] = SmallerModel(self.model, variant.experts)
                smaller = self._smaller[variant.experts]
                smaller.fill(decoder_layer, tensors or {})
                smaller.put_constants({name: variant.constants[name] for name in names})
                self._live = smaller.model
            self._filled = variant
        forward = layer_forward
        if self._live is not self.model.partial.model:
            forward = self._live.get_submodule(decoder_layer).forward
        if variant.around is None:
            return forward
        context = variant.around(self._live, decoder_layer)

        def changed(*args: Any, **kwargs: Any) -> Any:
            with context:
                return forward(*args, **kwargs)

        return changed

    def on_layer_end(self, decoder_layer: str) -> None:
        for smaller in self._smaller.values():
            smaller.release()
        self._filled = None
        self._live = self.model.partial.model
