"""Experts that output a constant (MoNE, Zhang et al. 2025, arXiv:2507.00390): their forward, and such checkpoints.

The router keeps all its rows. A token that it sends to such an expert gets the gate weight times the expert's constant,
and nothing is renormalised. The names are those that vLLM reads: the config's `approximate_experts` maps a decoder
layer's number to expert ids, and `<experts prefix>.<id>.approx_value` [H] is the constant; experts keep their numbers.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compressor.checkpoint.reader import Checkpoint, TensorInfo
from compressor.errors import CompressionError
from compressor.model.experts import apply_expert, expert_parameters, routed
from compressor.model.layout import Role
from compressor.model.moe_layer import MoeLayer

FIELD, SUFFIX = "approximate_experts", ".approx_value"
NOT_STOCK = (
    "experts that are constants (config field approximate_experts) are served by vLLM, and stock transformers cannot "
    "load them"
)
MOST_CONSTANTS = 2**17  # of all layers: more than any model has experts


@dataclass(frozen=True, slots=True, eq=False)
class Substitutes:
    """The constants of a layer: `values` [D, H] of the experts `dropped`, ascending.

    `rows` says at which row of the experts module's tensors a kept expert stands; without it at its own number.
    """

    dropped: tuple[int, ...]
    values: Tensor
    rows: Mapping[int, int] | None = None


def substituted_forward(
    experts: Any, substitutes: Substitutes, hidden: Tensor, index: Tensor, weights: Tensor
) -> Tensor:
    """What an experts module outputs with its constants: hidden [T, H], index and weights [T, K] -> [T, H]."""
    place = {expert: number for number, expert in enumerate(substitutes.dropped)}
    rows_of = substitutes.rows
    result = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
    for expert, rows, slots in routed(weights, index):
        gate = weights[rows, slots, None]
        if expert in place:
            found = gate.float() * substitutes.values[place[expert]].float()
        else:
            row = expert if rows_of is None else rows_of[expert]
            found = (apply_expert(experts, expert_parameters(experts, row), hidden[rows]) * gate).float()
        result.index_add_(0, rows, found)
    return result.to(hidden.dtype)


def substitute(experts: Any, substitutes: Substitutes | None) -> None:
    """Have a live experts module compute with these constants from now on; with None as stock does again."""
    experts.__dict__.pop("forward", None)
    if substitutes is not None and substitutes.dropped:
        experts.forward = partial(substituted_forward, experts, substitutes)


def is_replaced(role: Role, substitutes: Mapping[str, Substitutes]) -> bool:
    """Whether a stored tensor is of an expert that a constant stands for; a router keeps all that it has."""
    if role.kind != "expert" or role.is_router or role.layer not in substitutes:
        return False
    return role.expert in substitutes[role.layer].dropped


def number_in(name: str) -> int | None:
    """The one whole number among the parts of a module's name, as vLLM finds a layer's; None if there is not one."""
    numbers = [int(part) for part in name.split(".") if part.isdecimal() and len(part) < 10]
    return numbers[0] if len(numbers) == 1 else None


def declared(raw_config: Mapping[str, Any]) -> dict[int, tuple[int, ...]]:
    """Expert ids by decoder layer, ascending, as config.json declares them; raises `CompressionError` for nonsense."""
    nodes = (raw_config, *(value for value in raw_config.values() if isinstance(value, dict)))
    content = next((node[FIELD] for node in nodes if node.get(FIELD) is not None), None)
    if content is None:
        return {}
    found: dict[int, tuple[int, ...]] = {}
    usable = isinstance(content, dict) and len(content) <= MOST_CONSTANTS
    listed: list[tuple[Any, Any]] = list(content.items()) if usable else [(content, None)]
    for layer, experts in listed:
        right = isinstance(layer, str) and re.fullmatch(r"\d{1,6}", layer) and isinstance(experts, list)
        if not right or len(experts) > MOST_CONSTANTS or not all(type(expert) is int for expert in experts):
            raise CompressionError(
                f"config.json: {FIELD} should give a list of expert numbers for each layer's number; restore it"
            )
        if len(set(experts)) < len(experts):
            raise CompressionError(f"config.json: {FIELD} names an expert of layer {layer} twice; restore it")
        if experts:
            found[int(layer)] = tuple(sorted(experts))
    return found


class SubstitutedCheckpoint(Checkpoint):
    """A checkpoint with constants that reads as one without: a missing expert's tensors are those of a kept one.

    They are never computed with, for `substitutes` of the layer take their place.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.constants: dict[tuple[int, int], TensorInfo] = {}  # by layer and expert
        self.stored = dict(self.tensors)  # what the files really hold
        wanted = declared(self.raw_config)
        prefixes: dict[int, str] = {}
        for name, info in self.stored.items():
            if not name.endswith(SUFFIX):
                continue
            prefix, _, number = name.removesuffix(SUFFIX).rpartition(".")
            if (layer := number_in(prefix)) is None or not re.fullmatch(r"[0-9]{1,6}", number):
                raise CompressionError(f"tensor {name!r} names no layer and expert; download the checkpoint again")
            if prefixes.setdefault(layer, prefix) != prefix:
                raise CompressionError(f"layer {layer} has constants as {prefix!r} and as {prefixes[layer]!r}")
            self.constants[layer, int(number)] = info
            del self.tensors[name]
        pairs = {(layer, expert) for layer, experts in wanted.items() for expert in experts}
        if odd := sorted(pairs ^ self.constants.keys()):
            layer, expert = odd[0]
            fault = "has no constant" if odd[0] in pairs else f"has a constant, but {FIELD} does not name it"
            raise CompressionError(f"expert {expert} of layer {layer} {fault}; download the checkpoint again")
        for layer, experts in wanted.items():
            self._stand_in(prefixes[layer], experts)

    def _stand_in(self, prefix: str, experts: Sequence[int]) -> None:
        """Let the tensors of a kept expert stand for those of the experts that are constants."""
        pattern = re.compile(rf"{re.escape(prefix)}\.(\d{{1,6}})\.(.+)")
        kept: dict[int, list[tuple[str, TensorInfo]]] = {}
        for name, info in self.stored.items():
            if (found := pattern.fullmatch(name)) and not name.endswith(SUFFIX):
                kept.setdefault(int(found[1]), []).append((found[2], info))
        if not kept or kept.keys() & set(experts):
            raise CompressionError(f"{prefix}: an expert has weights and a constant, or none has weights; restore it")
        for expert in experts:
            for rest, info in kept[min(kept)]:
                name = f"{prefix}.{expert}.{rest}"
                self.tensors[name] = replace(info, name=name)

    def substitutes(self, layers: Sequence[MoeLayer], dtype: torch.dtype, device: Any) -> dict[str, Substitutes]:
        """The constants of these layers by experts module, in the dtype for computing; refuses what is no constant."""
        by_index = {layer.index: layer for layer in layers}
        places: dict[int, list[int]] = {}
        for layer, expert in sorted(self.constants):
            if layer not in by_index or expert >= by_index[layer].experts:
                raise CompressionError(f"config.json: {FIELD} names expert {expert} of layer {layer}; there is none")
            places.setdefault(layer, []).append(expert)
        found = {}
        for layer, experts in places.items():
            values = [self._map([info])[info.name] for info in (self.constants[layer, expert] for expert in experts)]
            if len({value.shape for value in values}) > 1 or values[0].dim() != 1:
                raise CompressionError(f"{by_index[layer].name}: its constants differ in shape; restore them")
            found[by_index[layer].name] = Substitutes(tuple(experts), torch.stack(values).to(device, dtype))
        return found
