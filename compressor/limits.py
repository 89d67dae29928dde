"""What a router can take: how many experts may stay, and how they may be grouped."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from compressor.errors import CompressionError

if TYPE_CHECKING:
    from compressor.architecture import MoeLayer
    from compressor.plan import CompressionPlan, LayerPlan


def check_count(layer: "MoeLayer | LayerPlan", count: int, where: str) -> None:
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


def check_groups(plan: "LayerPlan") -> None:
    """Refuse groups that cannot be carried out; raises `CompressionError` naming layer and expert."""
    where, seen = plan.module, set[int]()
    for group in plan.groups:
        if not group.members:
            raise CompressionError(f"{where}: a group has no members; remove it")
        for expert in group.members:
            if isinstance(expert, bool) or not isinstance(expert, int) or not 0 <= expert < plan.experts:
                raise CompressionError(
                    f"{where}: expert {expert!r} does not exist; experts are numbered 0 to {plan.experts - 1}"
                )
            if expert in seen:
                raise CompressionError(f"{where}: expert {expert} is in two groups; an expert may be in one at most")
            seen.add(expert)
    check_count(plan, len(plan.groups), where)
    if plan.routing_groups > 1:
        size = plan.experts // plan.routing_groups
        homes: list[int] = []
        for group in plan.groups:
            inside = {expert // size for expert in group.members}
            if len(inside) > 1:
                raise CompressionError(
                    f"{where}: group {list(group.members)} mixes experts of different routing groups; keep it "
                    "within one"
                )
            homes.extend(inside)
        counts = [homes.count(home) for home in range(plan.routing_groups)]
        if len(set(counts)) > 1:
            raise CompressionError(
                f"{where}: its routing groups would keep unequal numbers of experts, {counts}; keep equally "
                "many in each"
            )
        if homes != sorted(homes):
            raise CompressionError(
                f"{where}: its groups are not in the order of the routing groups; order them by their members"
            )


def check_against(plan: "CompressionPlan", layers: "Sequence[MoeLayer]", fingerprint: str) -> None:
    """Refuse a plan that was made for another model, or whose facts about the model were edited."""
    if plan.source.fingerprint != fingerprint:
        raise CompressionError(
            "the plan was made for another model: its source fingerprint "
            f"{plan.source.fingerprint[:12]} differs from this checkpoint's {fingerprint[:12]}; plan again for this one"
        )
    known = {layer.name: layer for layer in layers}
    for layer_plan in plan.layers:
        layer = known.get(layer_plan.module)
        if layer is None:
            raise CompressionError(
                f"the plan speaks of {layer_plan.module}, which this model does not have; plan again"
            )
        facts = ("experts", "top_k", "routing_groups", "chosen_groups", "experts_per_group")
        for fact in facts:
            if getattr(layer_plan, fact) != getattr(layer, fact):
                raise CompressionError(
                    f"{layer.name}: the plan says {fact} {getattr(layer_plan, fact)}, the model has "
                    f"{getattr(layer, fact)}; restore it"
                )
    missing = sorted(set(known) - {layer_plan.module for layer_plan in plan.layers})
    if missing:
        raise CompressionError(f"the plan has no entry for {missing[0]}; every MoE layer needs one")
