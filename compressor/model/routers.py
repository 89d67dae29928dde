"""Routers: finding one in the stock model, what it says of itself, and how many experts it can take."""

import math
from typing import Any, Protocol

from torch import nn

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
    groups, chosen, top_k = layer.routing_groups, layer.chosen_groups, layer.top_k
    own, needed = count // groups, layer.experts_per_group  # of each group
    if count > layer.experts:
        fault = f"asked for, it has {layer.experts}; ask for at most {layer.experts}"
    elif top_k < 1:
        fault = f"with a top-k of {top_k} would never be asked; correct it to 1 at the least"
    elif count < top_k:
        fault = f"are fewer than the top-k of {top_k}; keep at least {top_k}"
    elif groups > 1 and count % groups:
        fault = f"do not divide into its {groups} routing groups; keep a multiple of {groups}"
    elif groups > 1 and own < needed:
        fault = f"leave {own} in each of its {groups} routing groups, its router needs {needed}; keep at least "
        fault += f"{groups * needed}"
    elif groups > 1 and chosen * own < top_k:
        fault = f"leave {chosen * own} within a token's {chosen} routing groups, fewer than the top-k of {top_k}; "
        fault += f"keep at least {math.ceil(top_k / chosen) * groups}"
    else:
        return
    raise CompressionError(f"{where}: {count} experts {fault}")


def takes(layer: Router, count: int) -> bool:
    """Whether the router can take that many experts."""
    try:
        check_count(layer, count, "")
    except CompressionError:
        return False
    return True


def find_router(block: nn.Module, experts: nn.Module, prefix: str, keys: set[str]) -> tuple[str, nn.Module]:
    """The one child of an MoE block, beside its experts, that owns expert-sized tensors."""
    routers = [
        (name, child)
        for name, child in block.named_children()
        if child is not experts and any(key.startswith(f"{prefix}{name}.") for key in keys)
    ]
    if len(routers) != 1:
        raise CompressionError(
            f"MoE block {prefix[:-1]!r} has {len(routers)} routers beside its experts; one is supported"
        )
    return routers[0]


def top_k_of(router: nn.Module, block: nn.Module, config: Any) -> int:
    """Experts that a token visits."""
    text = config.get_text_config()
    named = [(owner, "top_k") for owner in (router, block)]
    for owner in (getattr(router, "config", text), text):
        named += [(owner, name) for name in ("num_experts_per_tok", "top_k_experts", "moe_topk")]
    for owner, name in named:
        if isinstance(value := getattr(owner, name, None), int):
            if value < 1:
                raise CompressionError(
                    f"the config sends a token to {value} experts ({name}); restore config.json from its source"
                )
            return value
    raise CompressionError(
        "neither the router nor the config says how many experts a token visits (top-k); not supported"
    )


def routing_groups_of(router: nn.Module) -> tuple[int, int, int]:
    """(groups, groups a token may choose, fewest experts per group) of a router; (1, 1, 1) for one without groups."""
    groups = getattr(router, "num_group", None) or getattr(router, "n_group", None) or 1
    method = getattr(router, "topk_method", None)
    if int(groups) <= 1 or method == "greedy":
        return 1, 1, 1
    chosen = getattr(router, "topk_group", None) or groups
    # a group's score is the sum of its two best experts, except where the method scores it by its best one
    return int(groups), int(chosen), 1 if method else 2


def value_tables(router: nn.Module, prefix: str, top_k: int) -> tuple[str, ...]:
    """Integer tables [rows, top-k] of a router: their values are expert ids."""
    return tuple(
        f"{prefix}{name}"
        for name, value in router.state_dict().items()
        if not value.is_floating_point() and value.dim() == 2 and value.shape[1] == top_k
    )
