"""Faults that converted models have, planted in the live layers of a sound one.

T tokens, K top-k, E experts.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from compressor.errors import CompressionError
from compressor.model.architecture import another_top_k
from compressor.model.loading import set_tensor
from compressor.model.moe_layer import MoeLayer
from compressor.model.opened import OpenModel
from compressor.model.router_logits import Product, Score, find_score, router_weight, watched, weights_of

EQUAL = 1e-2  # share by which sums of normalised gate weights may differ
SCORES: tuple[Score, ...] = ("softmax", "sigmoid")
SCALES = (0.5, 2.0, 0.0)

Plant = Callable[[Any, MoeLayer], AbstractContextManager[None]]  # (live model, a loaded layer)


@dataclass(frozen=True, slots=True)
class Cause:
    """The likeliest cause of a difference."""

    name: str
    sentence: str


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault in all layers or in one; by default, none."""

    name: str = ""
    sentence: str = ""
    plant: Plant | None = None
    layer: MoeLayer | None = None
    inputs: int = 0  # added to the token ids of prompts
    outputs: int = 0  # added to the token ids of answers


@contextmanager
def choosing(model: Any, layer: MoeLayer, choose: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Iterator[None]:
    """Change the index and the weights [T, K] that experts are called with."""

    def changed(module: Any, args: Any, kwargs: Any) -> tuple[Any, dict[str, Any]]:
        values: list[Any] = [*args, *kwargs.values()]
        values[1:3] = choose(*values[1:3])
        return tuple(values), {}

    with model.get_submodule(layer.name).register_forward_pre_hook(changed, with_kwargs=True):
        yield


@contextmanager
def _replacing(model: Any, layer: MoeLayer, change: Callable[[Any, MoeLayer], Mapping[str, Tensor]]) -> Iterator[None]:
    """Replace tensors of the layer by others of the same shape."""
    changed = change(model, layer)
    before = {key: model.get_parameter_or_buffer(key) for key in changed}
    for key, value in changed.items():
        set_tensor(model, key, value)
    try:
        yield
    finally:
        for key, value in before.items():
            set_tensor(model, key, value)


def _tensors(model: Any, layer: MoeLayer, of_experts: bool) -> dict[str, Tensor]:
    """Return the tensors with a row for each expert, of the experts or of what chooses them, by state-dict key."""
    keys = [tensor.key for tensor in layer.tensors if tensor.key.startswith(f"{layer.name}.") is of_experts]
    return {key: model.get_parameter_or_buffer(key) for key in keys}


def _no_biases(model: Any, layer: MoeLayer, of_experts: bool) -> dict[str, Tensor]:
    """Return zeros for vectors: one for each expert, or one number for each."""
    tensors = _tensors(model, layer, of_experts)
    return {key: torch.zeros_like(value) for key, value in tensors.items() if value.dim() == 1 + of_experts}


def _other_rows(model: Any, layer: MoeLayer, by: int) -> dict[str, Tensor]:
    """Return the router's matrices with their rows moved."""
    tensors = _tensors(model, layer, False)
    return {key: value.roll(by, 0) for key, value in tensors.items() if value.dim() > 1}


def gate_and_up(experts: Any, value: Tensor) -> tuple[Tensor, int]:
    """Return a fused gate and up parameter [E, ...] with a dimension for the two, and the number of that."""
    dim = 2 if experts.is_transposed and value.dim() > 2 else 1
    if experts.is_concatenated:
        return value.unflatten(dim, (2, -1)), dim
    return value.unflatten(dim, (-1, 2)), dim + 1


def _swapped(model: Any, layer: MoeLayer, dims: tuple[int, ...] = (2, 3)) -> dict[str, Tensor]:
    """Return experts' parameters of so many dimensions with gate for up, and up for gate."""
    experts = model.get_submodule(layer.name)
    swapped = dict[str, Tensor]()
    for key, value in _tensors(model, layer, True).items():
        if "gate_up" in key and value.dim() in dims:
            pair, dim = gate_and_up(experts, value)
            swapped[key] = pair.flip(dim).reshape(value.shape)
    return swapped


def _scaled_down(model: Any, layer: MoeLayer, by: float) -> dict[str, Tensor]:
    """Return scaled down projections of the experts."""
    tensors = _tensors(model, layer, True)
    return {key: value * by for key, value in tensors.items() if key.endswith("down_proj")}


def _permuted(experts: int, by: int, index: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Choose other experts: `by` further on, or with 0 in reverse order; skipped choices stay."""
    others = (index + by) % experts if by else experts - 1 - index
    return torch.where(index < experts, others, index), weights


def _scaled(by: float, expert: int, index: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Scale the outputs of one expert."""
    return index, torch.where(index == expert, weights * by, weights)


@contextmanager
def _gated(score: Score, normalised: bool, scaled: bool, model: Any, layer: MoeLayer) -> Iterator[None]:
    """Compute gate weights in another way, with the model's own factor or without."""
    logits = list[Tensor]()

    def show(call: Product) -> None:
        logits.append(call.logits.flatten(0, -2))

    def choose(index: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        chosen = index.clamp(max=layer.experts - 1)
        scores = weights_of(logits[-1], score).gather(1, chosen)
        factor = weights.float().sum(-1)
        if factor.max() - factor.min() > EQUAL * factor.max():  # the model does not normalise them
            own = weights_of(logits[-1], find_score(logits[-1], chosen, weights)).gather(1, chosen)
            factor = weights.float() / own
        changed = scores / scores.sum(-1, keepdim=True) if normalised else scores
        return index, (changed * (factor.median() if scaled else 1.0)).to(weights.dtype)

    with watched(model, layer, show), choosing(model, layer, choose):
        yield


def _another_top_k(by: int, model: Any, layer: MoeLayer) -> AbstractContextManager[None]:
    router, block = map(model.get_submodule, (layer.router, layer.block))
    return another_top_k(router, block, model.config, layer.top_k + by)


def faults_of(model: OpenModel) -> list[Fault]:
    """Return the faults that a model can have in its MoE layers."""
    layer = model.architecture.layers[0]
    live = model.partial.model
    faults = list[Fault]()
    has_bias = live.get_submodule(layer.name).has_bias
    for dims in ((2, 3), (3,))[: 1 + has_bias]:  # with biases, and weights alone
        if _swapped(live, layer):
            plant = partial(_replacing, change=partial(_swapped, dims=dims))
            faults.append(Fault("gate and up swapped", "gate and up projections are swapped", plant))
    for of_experts, whose in ((True, "the experts'"), (False, "the router's")):
        if _no_biases(live, layer, of_experts):
            plant = partial(_replacing, change=partial(_no_biases, of_experts=of_experts))
            faults.append(Fault("bias dropped", f"{whose} bias is missing", plant))
    for by, how in ((1, "one too many"), (-1, "one too few")):
        if 1 <= layer.top_k + by <= layer.experts:
            sentence = f"each token is routed to {how} of the experts (num_experts_per_tok)"
            faults.append(Fault("top-k", sentence, partial(_another_top_k, by)))
    for by in (1, -1):
        plant = partial(_replacing, change=partial(_other_rows, by=by))
        faults.append(Fault("router shifted", "the router's rows are shifted by one against its experts", plant))
    for by in (1, -1, 0):
        how = "shifted by one" if by else "in reverse order"
        plant = partial(choosing, choose=partial(_permuted, layer.experts, by))
        faults.append(Fault("experts permuted", f"experts are {how} against their router", plant))
    return [*faults, *map(scaled, SCALES), *_gate_faults(layer)]


def scaled(by: float) -> Fault:
    """Return a wrong scale of the experts' outputs."""
    plant = partial(_replacing, change=partial(_scaled_down, by=by))
    return Fault("scale", f"experts' down projections are multiplied by about {by:.3g}", plant)


def _gate_faults(layer: MoeLayer) -> list[Fault]:
    """Return ways to make gate weights of a router's logits, if it has any."""
    try:
        router_weight(layer)
    except CompressionError:
        return []
    faults = list[Fault]()
    for scaled, score, normalised in product((True, False), SCORES, (True, False)):
        how = "normalised" if normalised else "not normalised"
        factor = "" if scaled else ", and lack the model's factor (routed_scaling_factor)"
        sentence = f"gate weights are {score} scores that are {how}{factor}"
        faults.append(Fault(f"gates {how}", sentence, partial(_gated, score, normalised, scaled)))
    return faults


def in_layers(faults: Sequence[Fault], layers: Sequence[MoeLayer]) -> list[Fault]:
    """Return these faults in one layer each."""
    placed = list[Fault]()
    for layer, fault in product(layers, faults):
        placed.append(replace(fault, layer=layer, sentence=f"{fault.sentence} in layer {layer.index}"))
    return placed


def of_expert(layer: MoeLayer, expert: int) -> list[Fault]:
    """Return faults of one expert: it outputs zeros, or at a wrong scale."""
    faults = list[Fault]()
    for scale in SCALES:
        how = f"multiplied by about {scale:g}" if scale else "zero"
        plant = partial(choosing, choose=partial(_scaled, scale, expert))
        name = "scale" if scale else "expert zeroed"
        faults.append(Fault(name, f"outputs of expert {expert} in layer {layer.index} are {how}", plant, layer))
    return faults


def of_vocabulary() -> list[Fault]:
    """Return shifts of the vocabulary: of prompts, of answers, and of both."""
    faults = list[Fault]()
    for by, inputs, outputs in product((1, -1), (True, False), (True, False)):
        if inputs or outputs:
            sentence = "the vocabulary is shifted by one"
            faults.append(Fault("vocabulary shifted", sentence, inputs=-by * inputs, outputs=by * outputs))
    return faults
