"""How a group of experts becomes one: max, uniform, by frequency, or learned.

Equations 6 and 7 of Zhang et al. 2024, arXiv:2407.09590.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from compressor.errors import CompressionError
from compressor.grouping.learned import learn_coefficients
from compressor.model.architecture import MoeLayer, check_count
from compressor.recipe.plan import Group, LayerPlan
from compressor.statistics.statistics import LayerStatistics
from compressor.ties import rounded

_NEEDS = {
    "uniform": frozenset[str](),
    "max": frozenset({"routed_count"}),
    "frequency": frozenset({"routed_count"}),
    "learned": frozenset({"inputs", "top_k_index", "top_k_weights", "router_arguments", "weights"}),
}
METHODS = tuple(_NEEDS)


def merge_needs(method: str, merge_routers: bool) -> frozenset[str]:
    """Statistics that a merging method needs beside those of the grouping."""
    if method not in METHODS:
        raise CompressionError(f"there is no merge {method!r}; known are {', '.join(METHODS)}")
    return _NEEDS[method] | (frozenset() if merge_routers or method == "uniform" else frozenset({"routed_count"}))


def _one_hot(members: Sequence[int], chosen: int) -> tuple[float, ...]:
    return tuple(float(member == chosen) for member in members)


def _leading(members: Sequence[int], counts: torch.Tensor | None) -> int:
    """The expert that stands for its group: the most visited [E], if that is known, or the lowest."""
    return members[0] if counts is None else members[int(rounded(counts)[list(members)].argmax())]


def coefficients(members: Sequence[int], method: str, counts: torch.Tensor | None) -> tuple[float, ...]:
    """Coefficients of a group's members, summing to 1; `counts` [E] are visits.

    With max, ties go to the lower expert; a group that no token reached is averaged uniformly.
    """
    even = (1.0 / len(members),) * len(members)
    if method == "uniform" or len(members) == 1:
        return even
    if counts is None:
        raise CompressionError(f"merge {method!r} needs visit counts, which were not collected")
    if method == "max":
        return _one_hot(members, _leading(members, counts))
    visits = [float(counts[member]) for member in members]
    total = sum(visits)
    return tuple(count / total for count in visits) if total > 0 else even


def merge_groups(
    stats: LayerStatistics,
    groups: Sequence[Sequence[int]],
    method: str = "uniform",
    merge_routers: bool = True,
    align: bool = False,
    **details: Any,
) -> LayerPlan:
    """The plan that merges these groups of experts; singletons stay bit for bit.

    With `align`, the neurons of a group are matched to those of its most visited expert (its lowest, where visits are
    not known) when the plan is carried out.
    """
    merge_needs(method, merge_routers)
    if not all(groups):
        raise CompressionError(f"{stats.layer.name}: a group has no members; remove it")
    counts, merged = stats.values.get("routed_count"), list[Group]()
    for members in (tuple(sorted(group)) for group in groups):
        shares = coefficients(members, "uniform" if method == "learned" else method, counts)
        leading = _leading(members, counts)
        group = Group(members, shares, shares if merge_routers else _one_hot(members, leading), head=leading)
        merged.append(group if align and group.aligned else replace(group, head=None))
    plan = LayerPlan.of(stats.layer, merged, **details)
    return learn_coefficients(stats, plan, merge_routers) if method == "learned" else plan


def competing(layer: MoeLayer) -> list[list[int]]:
    """Experts that compete for the same places: those of each routing group, or all."""
    size = layer.experts // layer.routing_groups
    return [list(range(begin, begin + size)) for begin in range(0, layer.experts, size)]


def routing_blocks(stats: LayerStatistics) -> list[list[int]] | None:
    """The layer's routing groups as lists of experts; None where it has none."""
    return None if stats.layer.routing_groups == 1 else competing(stats.layer)


def kept_share(made: LayerPlan, scores: torch.Tensor) -> float:
    """Share of the scores' total [E] that a dropping plan's kept experts hold; 0 where the total is."""
    kept, total = [group.members[0] for group in made.groups], float(scores.sum())
    return round(float(scores[kept].sum()) / total, 6) if total else 0.0


def _check_scores(scores: torch.Tensor, layer: MoeLayer) -> None:
    """Refuse scores that rank nothing: of another number than [E], or NaN; an infinite one may mean always or never."""
    if scores.shape != (layer.experts,):
        raise CompressionError(
            f"{layer.name}: scores of the shape {list(scores.shape)} cannot rank {layer.experts} experts; give one each"
        )
    if wrong := scores.isnan().nonzero().flatten().tolist():
        raise CompressionError(f"{layer.name}: the score of expert {wrong[0]} is not a number; mend how it is computed")


def keep_best(
    stats: LayerStatistics, scores: torch.Tensor, keep: int, protected: frozenset[int], **details: Any
) -> LayerPlan:
    """Keep the experts of highest score [E], equally many in each routing group; ties go to the lower expert."""
    layer = stats.layer
    check_count(layer, keep, layer.name)
    _check_scores(scores, layer)
    ranked, blocks = rounded(scores).cpu(), competing(layer)
    kept: list[int] = []
    for block in blocks:
        best = [block[position] for position in ranked[block].argsort(descending=True, stable=True).tolist()]
        kept += sorted(best, key=lambda expert: expert not in protected)[: keep // len(blocks)]
    if protected - set(kept):
        raise CompressionError(
            f"{layer.name}: {len(protected)} protected experts do not fit into {keep}; protect fewer or keep more"
        )
    return LayerPlan.keep(layer, kept, **details)
