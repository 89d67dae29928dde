"""Which tensors of a decoder layer are trained, the float32 masters that stand for them, and what is stored of them.

A tensor trained whole has one master. One that LoRA trains (Hu et al., arXiv:2106.09685) has two, its factors, and
stays what it was itself: W = W0 + (alpha / r) B A, with alpha = 2 r. W is [..., M, N], A [..., r, N], B [..., M, r]; a
fused tensor of experts has its own factors for each of them. The gradient of a weight is in memory anyway while its
layer is trained, so the factors' gradients follow by the chain rule.
"""

import hashlib
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from compressor.checkpoint.reader import TORCH_DTYPES
from compressor.errors import CompressionError
from compressor.model.architecture import MoeLayer, layers_by_unit
from compressor.model.experts import parameter_names
from compressor.model.opened import OpenModel
from compressor.steps.distill.step import Distill
from compressor.surgery.conversion import saved_names
from compressor.surgery.tensors import refuse_overflow

Masters = dict[str, Tensor]  # by name: a state-dict key, or one of a key's factors
FACTORS = ("lora_A", "lora_B")
SCALE = 2.0  # LoRA's alpha / r


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
            pair = begin_factors(tuple(own[key].shape), rank, generator)
            masters.update(zip(_names(key), (value.to(own[key].device) for value in pair), strict=True))
        return masters

    def values(self, own: Mapping[str, Tensor], masters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The layer's tensors in float32 that these masters stand for; `own` are those that it was read with."""
        found = {key: masters[key] for key in self.whole}
        return found | {key: merged(own[key], *_pair(masters, key)) for key in self.factored}

    def gradients(self, masters: Mapping[str, Tensor], dense: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
        """The masters' gradients of those of the layer's tensors, of which None is nothing."""
        found = dict[str, Tensor]()
        for key in self.whole:
            gradient = dense[key]
            found[key] = torch.zeros_like(masters[key]) if gradient is None else gradient.detach().float()
        for key in self.factored:
            pair, gradient = _pair(masters, key), dense[key]
            made = map(torch.zeros_like, pair) if gradient is None else factor_gradients(gradient.detach(), *pair)
            found.update(zip(_names(key), made, strict=True))
        return found


def _names(key: str) -> tuple[str, ...]:
    return tuple(f"{key}.{name}" for name in FACTORS)


def _pair(masters: Mapping[str, Tensor], key: str) -> tuple[Tensor, Tensor]:
    first, second = (masters[name] for name in _names(key))
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
    matrices = {
        f"{layer.name}.{name}" for layer in layers for name in parameter_names(model.get_submodule(layer.name))[:2]
    }
    matrices |= {
        f"{name}.weight"
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and not f"{name}.".startswith((*routers, *experts))
    }
    return TrainedLayer(unit, whole, tuple(key for key in own if key in matrices))


def begin_factors(shape: tuple[int, ...], rank: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """A and B of a weight of this shape in float32: A uniform in ±1 / sqrt(N), B zero, so that W is W0 at first."""
    *experts, rows, columns = shape
    first = torch.rand(*experts, rank, columns, generator=generator) * 2 - 1
    return first / math.sqrt(columns), torch.zeros(*experts, rows, rank)


def merged(weight: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """W in float32, of W0, A and B."""
    return torch.baddbmm(
        weight.float().reshape(-1, *weight.shape[-2:]),
        second.reshape(-1, *second.shape[-2:]),
        first.reshape(-1, *first.shape[-2:]),
        alpha=SCALE,
    ).view(weight.shape)


def factor_gradients(gradient: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """dL/dA = (alpha / r) B^T dL/dW, [..., r, N], and dL/dB = (alpha / r) dL/dW A^T, [..., M, r]."""
    wide = gradient.float()
    return SCALE * (second.mT @ wide), SCALE * (wide @ first.mT)


def stored_dtypes(model: OpenModel, layers: Sequence[TrainedLayer]) -> dict[str, torch.dtype]:
    """The dtype in which each trained tensor is stored, by state-dict key.

    Raises `CompressionError` for one that is stored quantised, or in a way that transformers would not write.
    """
    found = dict[str, torch.dtype]()
    for layer in layers:
        direct, others = _divided(model, layer.keys)
        empty = model.partial.empty
        found.update({key: _plain_dtype(model, key, name, empty[key]) for key, name in direct.items()})
        dtypes = {
            _plain_dtype(model, others[0], *saved) for saved in _saved(model, {key: empty[key] for key in others})
        }
        if len(dtypes) > 1:
            raise CompressionError(f"{others[0]} is stored in several dtypes, so it cannot be written back; convert it")
        found.update(dict.fromkeys(others, *dtypes))
    return found


def stored_tensors(
    model: OpenModel, values: Mapping[str, Tensor], dtypes: Mapping[str, torch.dtype]
) -> dict[str, Tensor]:
    """A decoder layer's trained tensors by the names and in the dtypes of the checkpoint."""
    made = {key: refuse_overflow(key, value.to(dtypes[key])) for key, value in values.items()}
    direct, others = _divided(model, tuple(made))
    found = {name: made[key] for key, name in direct.items()}
    return found | {name: value.contiguous() for name, value in _saved(model, {key: made[key] for key in others})}


def _divided(model: OpenModel, keys: Collection[str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """The stored tensor of each key that is stored as the model has it, and the keys that are stored otherwise."""
    known = model.partial.keys
    direct = {key: name for name, key in known.targets.items() if key in keys and known.patterns[name] is None}
    return direct, tuple(key for key in keys if key not in direct)


def _saved(model: OpenModel, tensors: Mapping[str, Tensor]) -> list[tuple[str, Tensor]]:
    """Tensors that are stored otherwise, together, as transformers would write them."""
    try:
        return list(saved_names(model.partial.model, dict(tensors))) if tensors else []
    except Exception as error:  # a conversion that takes more than these raises what it likes
        raise _unknown_storage(next(iter(tensors))) from error


def _plain_dtype(model: OpenModel, key: str, name: str, value: Tensor) -> torch.dtype:
    info = model.checkpoint.tensors.get(name)
    alike = info is not None and info.shape == tuple(value.shape)
    dtype = TORCH_DTYPES.get(info.dtype, torch.int8) if info is not None else torch.int8
    if alike and dtype.is_floating_point and dtype.itemsize > 1:
        return dtype
    if model.layout.quantized:
        raise CompressionError(
            f"tensor {name!r} is stored quantised, so nothing can be trained into it; distill the model before it is "
            "quantised, or train what is not, as the option train: router does"
        )
    raise _unknown_storage(key)


def _unknown_storage(key: str) -> CompressionError:
    return CompressionError(
        f"{key} is not stored as transformers would write it, so it cannot be written back; load the checkpoint with "
        "transformers and save it anew"
    )
