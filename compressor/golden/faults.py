"""Faults that converted models have, planted in the live layers of a sound one.

T tokens, K top-k, E experts.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from compressor.errors import CompressionError
from compressor.golden.fingerprints import gate_and_up
from compressor.golden.measure import Variant
from compressor.model.architecture import another_top_k
from compressor.model.loading import set_tensor
from compressor.model.moe_layer import MoeLayer
from compressor.model.router_logits import Product, Score, router_weight, watched, weights_of
from compressor.model.streaming import PassPosition

EQUAL = 1e-2  # share by which sums of normalised gate weights may differ
SCORES: tuple[Score, ...] = ("softmax", "sigmoid")
SCALES = (0.5, 2.0, 0.0)

Plant = Callable[[Any, MoeLayer], AbstractContextManager[None]]  # (live model, a loaded layer)
Choose = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # of index and gate weights [T, K]


def fault(sentence: str, plant: Plant, layers: Sequence[MoeLayer], **shifts: int) -> Variant:
    """Return a fault in these layers."""
    where = f" in layer {layers[0].index}" if len(layers) == 1 else ""
    return Variant(partial(_planted, plant, layers), sentence + where, **shifts)


@contextmanager
def _planted(plant: Plant, layers: Sequence[MoeLayer], position: PassPosition) -> Iterator[None]:
    with ExitStack() as changes:
        for layer in position.moe_layers:
            if layer in layers:
                changes.enter_context(plant(position.model, layer))
        yield


@contextmanager
def _choosing(choose: Choose, model: Any, layer: MoeLayer) -> Iterator[None]:
    """Change the index and the weights that experts are called with."""

    def changed(module: Any, args: Any, kwargs: Any) -> tuple[Any, dict[str, Any]]:
        values: list[Any] = [*args, *kwargs.values()]
        values[1:3] = choose(*values[1:3])
        return tuple(values), {}

    with model.get_submodule(layer.name).register_forward_pre_hook(changed, with_kwargs=True):
        yield


@contextmanager
def _replacing(
    change: Callable[[Any, MoeLayer], Mapping[str, Tensor]], model: Any, layer: MoeLayer
) -> Iterator[None]:
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


def _tensors(of_experts: bool, model: Any, layer: MoeLayer) -> dict[str, Tensor]:
    """Return the tensors with a row for each expert, of the experts or of what chooses them, by
    state-dict key."""
    keys = [
        tensor.key
        for tensor in layer.tensors
        if tensor.key.startswith(f"{layer.name}.") is of_experts
    ]
    return {key: model.get_parameter_or_buffer(key) for key in keys}


def _no_biases(of_experts: bool, model: Any, layer: MoeLayer) -> dict[str, Tensor]:
    """Return zeros for vectors: one for each expert, or one number for each."""
    tensors = _tensors(of_experts, model, layer)
    return {
        key: torch.zeros_like(value)
        for key, value in tensors.items()
        if value.dim() == 1 + of_experts
    }


def _other_rows(by: int, model: Any, layer: MoeLayer) -> dict[str, Tensor]:
    """Return the router's matrices with their rows moved."""
    tensors = _tensors(False, model, layer)
    return {key: value.roll(by, 0) for key, value in tensors.items() if value.dim() > 1}


def _swapped(dims: Sequence[int], model: Any, layer: MoeLayer) -> dict[str, Tensor]:
    """Return experts' parameters of so many dimensions with gate for up, and up for gate."""
    experts = model.get_submodule(layer.name)
    swapped = dict[str, Tensor]()
    for key, value in _tensors(True, model, layer).items():
        if "gate_up" in key and value.dim() in dims:
            pair, dim = gate_and_up(experts, value)
            swapped[key] = pair.flip(dim).reshape(value.shape)
    return swapped


def _scaled_down(by: float, model: Any, layer: MoeLayer) -> dict[str, Tensor]:
    """Return scaled down projections of the experts."""
    tensors = _tensors(True, model, layer)
    return {key: value * by for key, value in tensors.items() if key.endswith("down_proj")}


def _permuted(experts: int, by: int, index: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Choose the experts `by` further on; skipped choices stay."""
    return torch.where(index < experts, (index + by) % experts, index), weights


@contextmanager
def _gated(
    score: Score, normalised: bool, scaled: bool, model: Any, layer: MoeLayer
) -> Iterator[None]:
    """Compute gate weights in another way, with the model's own factor or without."""
    logits = list[Tensor]()

    def show(call: Product) -> None:
        logits.append(call.logits.flatten(0, -2))

    def choose(index: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        chosen = index.clamp(max=layer.experts - 1)
        scores = weights_of(logits[-1], score).gather(1, chosen)
        factor = weights.float().sum(-1)
        if factor.max() - factor.min() > EQUAL * factor.max():  # the model does not normalise them
            factor = weights.float() / scores
        if normalised:
            scores = scores / scores.sum(-1, keepdim=True)
        if scaled:
            scores = scores * factor.median()
        return index, scores.to(weights.dtype)

    with watched(model, layer, show), _choosing(choose, model, layer):
        yield


def _another_top_k(by: int, model: Any, layer: MoeLayer) -> AbstractContextManager[None]:
    router, block = map(model.get_submodule, (layer.router, layer.block))
    return another_top_k(router, block, model.config, layer.top_k + by)


def faults_of(layers: Sequence[MoeLayer]) -> list[Variant]:
    """Return the faults that a model can have in these of its MoE layers."""
    layer = layers[0]
    plants = list[tuple[str, Plant]]()
    for dims in ((2, 3), (3,)):  # with biases, and weights alone
        plants.append(
            ("gate and up projections are swapped", partial(_replacing, partial(_swapped, dims)))
        )
    for of_experts, whose in ((True, "the experts'"), (False, "the router's")):
        plants.append(
            (f"{whose} bias is missing", partial(_replacing, partial(_no_biases, of_experts)))
        )
    for by, how in ((1, "more"), (-1, "less")):
        if 1 <= layer.top_k + by <= layer.experts:
            sentence = f"each token is routed to one expert {how} (num_experts_per_tok)"
            plants.append((sentence, partial(_another_top_k, by)))
    for by in (1, -1):
        plant = partial(_replacing, partial(_other_rows, by))
        plants.append(("the router's rows are shifted by one against its experts", plant))
        plant = partial(_choosing, partial(_permuted, layer.experts, by))
        plants.append(("experts are shifted by one against their router", plant))
    plants += _gate_faults(layer)
    faults = [fault(sentence, plant, layers) for sentence, plant in plants]
    return [*faults, *(scaled(by, layers) for by in SCALES)]


def scaled(by: float, layers: Sequence[MoeLayer]) -> Variant:
    """Return a wrong scale of the experts' outputs."""
    sentence = f"experts' down projections are multiplied by about {by:.3g}"
    return fault(sentence, partial(_replacing, partial(_scaled_down, by)), layers)


def _gate_faults(layer: MoeLayer) -> list[tuple[str, Plant]]:
    """Return ways to make gate weights of a router's logits, if it has any."""
    try:
        router_weight(layer)
    except CompressionError:
        return []
    faults = list[tuple[str, Plant]]()
    for scaled, score, normalised in product((True, False), SCORES, (True, False)):
        how = "normalised" if normalised else "not normalised"
        factor = "" if scaled else ", and lack the model's factor (routed_scaling_factor)"
        sentence = f"gate weights are {score} scores that are {how}{factor}"
        faults.append((sentence, partial(_gated, score, normalised, scaled)))
    return faults


def of_vocabulary() -> list[Variant]:
    """Return shifts of the vocabulary: of prompts, of answers, and of both."""
    shifts = list(product((1, -1), ((1, 1), (1, 0), (0, 1))))
    sentence = "the vocabulary is shifted by one"
    return [
        Variant(sentence=sentence, inputs=-by * first, outputs=by * last)
        for by, (first, last) in shifts
    ]
