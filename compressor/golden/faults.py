"""Faults that converted models have, as variants of a sound one.

T tokens, K top-k, E experts.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from compressor.errors import CompressionError
from compressor.frozen import frozen
from compressor.golden.fingerprints import gate_and_up
from compressor.model.architecture import another_top_k
from compressor.model.constant_experts import Substitutes
from compressor.model.moe_layer import MoeLayer, layers_by_decoder_layer
from compressor.model.opened import OpenModel
from compressor.model.router_logits import Product, Score, router_weight, watched, weights_of
from compressor.model.substitution import AS_IT_IS, Around, LayerTensors, Substitution

EQUAL = 1e-2  # share by which sums of normalised gate weights may differ
SCORES: tuple[Score, ...] = ("softmax", "sigmoid")
SCALES = (0.5, 2.0, 0.0)

Plant = Callable[[Any, MoeLayer], AbstractContextManager[None]]  # (live model, a loaded layer)

SHIFTED = (
    "experts are shifted by one against their router",
    "the router's rows are shifted by one against its experts",
)
# sentence, what happens to tensors, to those of experts or of what chooses them, and by how much
TENSOR_FAULTS: tuple[tuple[str, str, bool, float], ...] = (
    # tensors of at least so many dimensions: with biases, and weights alone
    ("gate and up projections are swapped", "swap", True, 2),
    ("gate and up projections are swapped", "swap", True, 3),
    # tensors of so many dimensions
    ("the experts' bias is missing", "zero", True, 2),
    ("the router's bias is missing", "zero", False, 1),
    (SHIFTED[False], "shift", False, 1),
    (SHIFTED[True], "shift", True, -1),
    (SHIFTED[False], "shift", False, -1),
    (SHIFTED[True], "shift", True, 1),
)


@frozen
class Fault:
    """A variant of a model, the sentence that names it, and what is added to token ids."""

    sentence: str = ""
    variant: Substitution = AS_IT_IS
    inputs: int = 0  # of prompts
    outputs: int = 0  # of answers


@frozen
class FaultMaker:
    """Makes faults of some MoE layers of a model, beside its constants."""

    model: OpenModel
    layers: Sequence[MoeLayer]
    constants: Mapping[str, Substitutes]

    def all(self) -> Iterator[Fault]:
        """Yield the faults that a model can have in these layers."""
        for fault in TENSOR_FAULTS:
            yield self._in_tensors(*fault)
        layer = self.layers[0]
        for by, how in ((1, "more"), (-1, "less")):
            if 1 <= layer.top_k + by <= layer.experts:
                sentence = f"each token is routed to one expert {how} (num_experts_per_tok)"
                yield self._fault(sentence, around=partial(self._in_layers, partial(_top_k, by)))
        with suppress(CompressionError):  # of a router without logits
            router_weight(layer)
            for has_factor, score, normalised in product((True, False), SCORES, (True, False)):
                how = "normalised" if normalised else "not normalised"
                lack = "" if has_factor else ", and lack the model's factor (routed_scaling_factor)"
                gated = partial(_gated, score, normalised, has_factor)
                sentence = f"gate weights are {score} scores that are {how}{lack}"
                yield self._fault(sentence, around=partial(self._in_layers, gated))
        for scale in SCALES:
            yield self.scaled(scale)

    def scaled(self, by: float) -> Fault:
        """Return a wrong scale of the experts' outputs."""
        sentence = f"experts' down projections are multiplied by about {by:.3g}"
        return self._in_tensors(sentence, "scale", True, by)

    def _fault(
        self, sentence: str, tensors: LayerTensors | None = None, around: Around | None = None
    ) -> Fault:
        where = f" in layer {self.layers[0].index}" if len(self.layers) == 1 else ""
        variant = Substitution(tensors, constants=self.constants, around=around)
        return Fault(sentence + where, variant)

    def _in_tensors(self, sentence: str, how: str, of_experts: bool, by: float) -> Fault:
        live = self.model.partial.model

        def tensors(decoder_layer: str) -> Mapping[str, Tensor] | None:
            changed = dict[str, Tensor]()
            for layer in layers_by_decoder_layer(self.layers).get(decoder_layer, ()):
                experts = live.get_submodule(layer.name)
                for tensor in layer.tensors:
                    key = tensor.key
                    value = live.get_parameter_or_buffer(key)
                    if key.startswith(f"{layer.name}.") is not of_experts:
                        continue
                    if how == "swap" and "gate_up" in key and value.dim() >= by:
                        pair, dim = gate_and_up(experts, value)
                        changed[key] = pair.flip(dim).reshape(value.shape)
                    elif how == "zero" and value.dim() == by:
                        changed[key] = torch.zeros_like(value)
                    elif how == "shift" and (of_experts or value.dim() > 1):
                        rows = torch.arange(value.shape[tensor.dim], device=value.device)
                        rows[: layer.experts] = rows[: layer.experts].roll(int(by))
                        changed[key] = value.index_select(tensor.dim, rows)
                    elif how == "scale" and key.endswith("down_proj"):
                        changed[key] = value * by
            return changed or None

        return self._fault(sentence, tensors)

    @contextmanager
    def _in_layers(self, plant: Plant, live: Any, decoder_layer: str) -> Iterator[None]:
        """Plant something into each of the layers within a live decoder layer."""
        with ExitStack() as changes:
            for layer in layers_by_decoder_layer(self.layers).get(decoder_layer, ()):
                changes.enter_context(plant(live, layer))
            yield


def _top_k(by: int, live: Any, layer: MoeLayer) -> AbstractContextManager[None]:
    router, block = map(live.get_submodule, (layer.router, layer.block))
    return another_top_k(router, block, live.config, layer.top_k + by)


@contextmanager
def _gated(
    score: Score, normalised: bool, has_factor: bool, live: Any, layer: MoeLayer
) -> Iterator[None]:
    """Compute gate weights [T, K] in another way, with the model's own factor or without."""
    logits = list[Tensor]()

    def show(call: Product) -> None:
        logits.append(call.logits.flatten(0, -2))

    def choose(module: Any, args: Any, kwargs: Any) -> tuple[Any, dict[str, Any]]:
        """Change the weights that experts are called with."""
        values: list[Any] = [*args, *kwargs.values()]
        index, weights = values[1:3]
        chosen = index.clamp(max=layer.experts - 1)
        scores = weights_of(logits[-1], score).gather(1, chosen)
        factor = weights.float().sum(-1)
        if factor.max() - factor.min() > EQUAL * factor.max():  # the model does not normalise them
            factor = weights.float() / scores
        if normalised:
            scores = scores / scores.sum(-1, keepdim=True)
        if has_factor:
            scores = scores * factor.median()
        values[2] = scores.to(weights.dtype)
        return tuple(values), {}

    experts = live.get_submodule(layer.name)
    with (
        watched(live, layer, show),
        experts.register_forward_pre_hook(choose, with_kwargs=True),
    ):
        yield
