"""The split itself, on a loaded layer's tensors: an expert's neurons in S runs, its router row S times.

E experts, I neurons of each, H hidden, S parts. Expert e becomes eS to eS + S - 1, so that routing groups of
neighbours stay together.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from compressor.model.architecture import MoeLayer
from compressor.model.experts import expert_parameters, parameter_names
from compressor.surgery.cutting import cut_keys, reordered
from compressor.surgery.tensors import refuse_overflow


@dataclass(frozen=True, slots=True)
class Factors:
    """What a part's down projection, and its entries beside the router's weight, are multiplied by."""

    output: float
    selection: float = 1.0


@torch.no_grad()
def split_layer(
    experts: Any, state: Mapping[str, Tensor], layer: MoeLayer, order: Tensor, parts: int, factors: Factors
) -> dict[str, Tensor]:
    """New tensors, by state-dict key, of all that counts experts in a layer; `state` holds the present ones.

    `order` [E, I] lists each expert's neurons, which its parts take in equal runs. A bias of the down projection is
    shared out evenly. Raises `CompressionError` on overflow of the stored dtype.
    """
    _, beside = divided(layer)
    return split_experts(experts, layer, order, parts, factors) | split_beside(state, layer, beside, parts, factors)


def divided(layer: MoeLayer) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Keys of the tensors of a layer that count experts: those of the experts module, and those of its router."""
    keys = cut_keys(layer)
    inside = tuple(key for key in keys if key.startswith(f"{layer.name}."))
    return inside, tuple(key for key in keys if key not in inside)


@torch.no_grad()
def split_experts(experts: Any, layer: MoeLayer, order: Tensor, parts: int, factors: Factors) -> dict[str, Tensor]:
    """The fused parameters of an experts module, [E * S, ...] by state-dict key."""
    fused = _split_experts(experts, order, parts, factors.output)
    made = {f"{layer.name}.{name}": value for name, value in fused.items()}
    for key in (key for key in made if ".down_proj" in key):
        refuse_overflow(key, made[key])
    return made


@torch.no_grad()
def split_beside(
    state: Mapping[str, Tensor], layer: MoeLayer, keys: Iterable[str], parts: int, factors: Factors
) -> dict[str, Tensor]:
    """Those of a layer's other tensors that are asked for: router rows and biases repeated, tables of ids extended."""
    made, known = dict[str, Tensor](), {tensor.key: tensor for tensor in layer.tensors}
    for key in keys:
        value = state[key]
        if (tensor := known.get(key)) is None:
            made[key] = _split_table(value, parts)
            continue
        beside = factors.selection != 1.0 and value.numel() == value.shape[tensor.dim]  # a bias: [E], [1, E]
        own = (value.float() * factors.selection).to(value.dtype) if beside else value
        made[key] = _repeated(own, tensor.dim, layer.experts, parts)
    return made


def _split_experts(experts: Any, order: Tensor, parts: int, scale: float) -> dict[str, Tensor]:
    """The fused parameters [E * S, ...], filled one part at a time."""
    made = dict[str, Tensor]()
    for expert, neurons in enumerate(order.to(experts.down_proj.device).long()):
        own = expert_parameters(experts, expert)
        for place, run in enumerate(neurons.chunk(parts)):
            for name in parameter_names(experts):
                value = reordered(experts, name, own[name], run)
                share = {"down_proj": scale, "down_proj_bias": scale / parts}.get(name, 1.0)
                if share != 1.0:
                    value = (value.float() * share).to(value.dtype)
                if name not in made:
                    made[name] = value.new_empty(len(order) * parts, *value.shape)
                made[name][expert * parts + place] = value
    return made


def _repeated(value: Tensor, dim: int, experts: int, parts: int) -> Tensor:
    """Each expert's entry `parts` times side by side along `dim`, then what belongs to no routed expert."""
    own, others = value.narrow(dim, 0, experts), value.narrow(dim, experts, value.shape[dim] - experts)
    return torch.cat([own.repeat_interleave(parts, dim), others], dim)


def _split_table(table: Tensor, parts: int) -> Tensor:
    """Expert ids [V, K] -> the ids of all their parts [V, K * S]."""
    return (table[..., None] * parts + torch.arange(parts, dtype=table.dtype, device=table.device)).flatten(-2)
