"""Experts that output a constant (MoNE, Zhang et al. 2025, arXiv:2507.00390): their forward and
checkpoints.

The router keeps all its rows. A token routed to such an expert gets the gate weight times the
expert's constant, and nothing is renormalised. vLLM reads the same names: the config's
`approximate_experts` maps a decoder layer's number to expert ids, and `<experts
prefix>.<id>.approx_value` [H] is the constant; experts keep their numbers."""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compressor.checkpoint.reader import Checkpoint, TensorInfo, config_field
from compressor.errors import CompressionError
from compressor.model.experts import UNCHANGED, Change, apply_expert, expert_parameters, routed
from compressor.model.layout import Role
from compressor.model.moe_layer import MoeLayer

FIELD = "approximate_experts"
SUFFIX = ".approx_value"
NOT_STOCK = (
    "experts that are constants (config field approximate_experts) are served by vLLM from 0.33 "
    "on; earlier versions load them without a message and compute something else, and stock "
    "transformers cannot load them"
)
CONSTANT = re.compile(rf"(.+)\.(\d+){re.escape(SUFFIX)}")  # a layer's experts, and the expert


@dataclass(frozen=True, slots=True, eq=False)
class Substitutes:
    """The constants of a layer: `values` [D, H] of the experts `dropped`, ascending.

    `rows` maps a kept expert to its row in the experts module's tensors; by default, that is its
    number."""

    dropped: tuple[int, ...]
    values: Tensor
    rows: Mapping[int, int] | None = None


def substituted_forward(
    experts: Any,
    substitutes: Substitutes | None,
    hidden: Tensor,
    index: Tensor,
    weights: Tensor,
    change: Change = UNCHANGED,
) -> Tensor:
    """Return the output of an experts module with its constants: hidden [T, H], index and weights
    [T, K] -> [T, H].

    `change` is applied to what matrices are multiplied by.
    """
    substitutes = substitutes or Substitutes((), hidden[:0])
    constants = dict(zip(substitutes.dropped, substitutes.values, strict=True))
    result = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
    for expert, rows, slots in routed(weights, index):
        gate = weights[rows, slots, None]
        if expert in constants:
            output = gate.float() * constants[expert].float()
        else:
            row = expert if substitutes.rows is None else substitutes.rows[expert]
            parameters = expert_parameters(experts, row)
            output = (apply_expert(experts, parameters, hidden[rows], change=change) * gate).float()
        result.index_add_(0, rows, output)
    return result.to(hidden.dtype)


def substitute(experts: Any, substitutes: Substitutes | None) -> None:
    """Make a live experts module compute with these constants; with None, as stock does."""
    experts.__dict__.pop("forward", None)
    if substitutes is not None and substitutes.dropped:
        experts.forward = partial(substituted_forward, experts, substitutes)


def is_replaced(role: Role, substitutes: Mapping[str, Substitutes]) -> bool:
    """Return True for a stored tensor of an expert that a constant replaces; a router keeps all its
    tensors."""
    if role.kind != "expert" or role.is_router or role.layer not in substitutes:
        return False
    return role.expert in substitutes[role.layer].dropped


def number_in(name: str) -> int | None:
    """Return the only whole number in a module's name, as vLLM finds a layer's; None if there is
    not exactly one."""
    numbers = [int(part) for part in name.split(".") if part.isdecimal()]
    return numbers[0] if len(numbers) == 1 else None


def declared(raw_config: Mapping[str, Any]) -> dict[int, tuple[int, ...]]:
    """Return the ids of experts that are constants in config.json, ascending, by decoder layer."""
    by_layer = config_field(raw_config, FIELD) or {}
    return {int(layer): tuple(sorted(experts)) for layer, experts in by_layer.items() if experts}


class SubstitutedCheckpoint(Checkpoint):
    """A checkpoint with constants that reads as one without: a kept expert's tensors replace
    missing ones.

    They are never computed with, for `substitutes` of the layer take their place.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.constants: dict[tuple[int, int], TensorInfo] = {}  # by layer and expert
        self.stored = dict(self.tensors)  # the tensors of the files
        prefixes = {}
        for name, info in self.stored.items():
            match = CONSTANT.fullmatch(name)
            layer = number_in(match[1]) if match else None
            if match and layer is not None:
                prefixes[layer] = match[1]
                self.constants[layer, int(match[2])] = info
                del self.tensors[name]
        wanted = declared(self.raw_config)
        pairs = {(layer, expert) for layer, experts in wanted.items() for expert in experts}
        odd = pairs ^ self.constants.keys()
        if odd:
            layer, expert = min(odd)
            message = f"has a constant, but {FIELD} does not name it"
            if (layer, expert) in pairs:
                message = "has no constant"
            raise CompressionError(
                f"expert {expert} of layer {layer} {message}; download the checkpoint again"
            )
        for layer, experts in wanted.items():
            prefix = prefixes[layer]
            weights = defaultdict(list)  # of the experts that are kept
            for name, info in [*self.tensors.items()]:
                number, _, rest = name.removeprefix(f"{prefix}.").partition(".")
                if name.startswith(f"{prefix}.") and number.isdecimal():
                    weights[int(number)].append((rest, info))
            for expert in experts:
                for rest, info in weights[min(weights)]:
                    name = f"{prefix}.{expert}.{rest}"
                    self.tensors[name] = replace(info, name=name)

    def substitutes(
        self, layers: Sequence[MoeLayer], dtype: torch.dtype, device: Any
    ) -> dict[str, Substitutes]:
        """Return the constants of these layers by experts module, in the dtype for computing."""
        result = {}
        for layer in layers:
            experts = sorted(expert for index, expert in self.constants if index == layer.index)
            if experts:
                infos = [self.constants[layer.index, expert] for expert in experts]
                values = torch.stack([self._map([info])[info.name] for info in infos])
                result[layer.name] = Substitutes(tuple(experts), values.to(device, dtype))
        return result
