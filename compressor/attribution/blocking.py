"""Experts that routers may not choose: what is chosen, and steered, without them.

A blocked expert's logit is minus infinity from the router's matrix product on, and again after
whatever is added to scores, such as a correction bias. So its router chooses, and weighs, as if it
had never had that expert."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from compressor.attribution.tracing import plain, router_width
from compressor.errors import CompressionError
from compressor.model.architecture import Architecture
from compressor.model.moe_layer import MoeLayer, check_count
from compressor.model.router_logits import PRODUCTS
from compressor.model.streaming import Forward, LayerVisitor

LABEL = re.compile(r"L(\d+) ?E(\d+)")  # decoder layer and expert, as reports name them
# operations that may lift a logit or score from minus infinity
MOVING = {"add", "iadd", "radd", "sub", "tanh"}

Blocked = Mapping[str, Sequence[int]]  # experts by experts module


def read_blocked(architecture: Architecture, labels: Sequence[str]) -> dict[str, list[int]]:
    """Return the experts named by labels such as L1E9; raises `CompressionError` where routers
    can't do without."""
    blocked: dict[str, list[int]] = {}
    for label in labels:
        match = LABEL.fullmatch(label.strip())
        if match is None:
            raise CompressionError(
                f"--without {label!r} names no expert; write layer and number, as in L1E9,L4E14"
            )
        number, expert = map(int, match.groups())
        layers = [
            layer
            for layer in architecture.layers
            if layer.index == number and expert < layer.experts
        ]
        if not layers:
            counts = ", ".join(
                f"{layer.experts} in L{layer.index}" for layer in architecture.layers
            )
            raise CompressionError(
                f"--without {label.strip()}: there is no such expert; there are {counts}"
            )
        for layer in layers:
            blocked.setdefault(layer.name, []).append(expert)
    for layer in architecture.layers:
        groups = Counter(
            expert * layer.routing_groups // layer.experts
            for expert in {*blocked.get(layer.name, ())}
        )
        # as if of every group, so that one can't run dry
        lost = max(groups.values(), default=0) * layer.routing_groups
        if lost:
            check_count(layer, layer.experts - lost, f"--without {','.join(labels)}: {layer.name}")
    return {name: sorted({*experts}) for name, experts in blocked.items()}


class _Masked(TorchFunctionMode):
    """Keeps the blocked experts' logits and scores at minus infinity while a router runs."""

    def __init__(self, layer: MoeLayer, blocked: Sequence[int]) -> None:
        super().__init__()
        self.width = router_width(layer)
        self.blocked = torch.tensor(blocked)
        self.has_logits = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if (
            not isinstance(result, Tensor)
            or not result.is_floating_point()
            or result.shape[-1:] != (self.width,)
        ):
            return result
        name = func.__name__
        if not self.has_logits and name in PRODUCTS:
            self.has_logits = True
            result = plain(result).clone()  # the trace keeps the logits that are decomposed
        elif not self.has_logits or name.strip("_") not in MOVING:
            return result
        return result.index_fill_(-1, self.blocked.to(result.device), -torch.inf)


@dataclass
class Blocking(LayerVisitor):
    """Blocks experts of every layer that passes; the first visitor, so that others see what is
    left."""

    blocked: Blocked

    def wrap_forward(self, decoder_layer: str, layer_forward: Forward) -> Forward:
        """The layer's forward with routers that do without the blocked experts."""
        layers = [layer for layer in self.at.moe_layers if layer.name in self.blocked]

        def masked(layer: MoeLayer, router_forward: Forward, /, *args: Any, **kwargs: Any) -> Any:
            with _Masked(layer, self.blocked[layer.name]):
                return router_forward(*args, **kwargs)

        def forward(*args: Any, **kwargs: Any) -> Any:
            with ExitStack() as stack:
                for layer in layers:
                    router: Any = self.at.model.get_submodule(layer.router)
                    router.forward = partial(masked, layer, router.forward)
                    stack.callback(router.__dict__.pop, "forward", None)
                return layer_forward(*args, **kwargs)

        return forward
