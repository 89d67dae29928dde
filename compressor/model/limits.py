"""What a router can take: how many experts may stay, and how they may be grouped."""

import math
from typing import Protocol

from compressor.errors import CompressionError


class Router(Protocol):
    """What decides which numbers of experts a router can take: of a model's layer, or of a layer's plan."""

    @property
    def experts(self) -> int: ...
    @property
    def top_k(self) -> int: ...
    @property
    def routing_groups(self) -> int: ...
    @property
    def chosen_groups(self) -> int: ...
    @property
    def experts_per_group(self) -> int: ...


def check_count(layer: Router, count: int, where: str) -> None:
    """Refuse a number of experts that the router cannot take; many routers would run wrong without a word."""
    if count > layer.experts:
        raise CompressionError(
            f"{where}: {count} experts asked for, it has {layer.experts}; ask for at most {layer.experts}"
        )
    if count < layer.top_k:
        raise CompressionError(
            f"{where}: {count} experts are fewer than the top-k of {layer.top_k}; keep at least {layer.top_k}"
        )
    groups = layer.routing_groups
    if groups > 1:
        if count % groups:
            raise CompressionError(
                f"{where}: {count} experts do not divide into its {groups} routing groups; keep a multiple of {groups}"
            )
        if count // groups < layer.experts_per_group:
            raise CompressionError(
                f"{where}: {count} experts leave {count // groups} in each of its {groups} routing groups, its "
                "router needs "
                f"{layer.experts_per_group}; keep at least {groups * layer.experts_per_group}"
            )
        if layer.chosen_groups * (count // groups) < layer.top_k:
            raise CompressionError(
                f"{where}: {count} experts leave {layer.chosen_groups * (count // groups)} within a token's "
                f"{layer.chosen_groups} routing "
                f"groups, fewer than the top-k of {layer.top_k}; keep at least "
                f"{math.ceil(layer.top_k / layer.chosen_groups) * groups}"
            )
