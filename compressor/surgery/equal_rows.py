"""Router rows that are equal, as those of an expert's parts are, told apart before some of them go.

While all parts are there, a token visits all or none of an expert's, whatever the order of equal logits. Once some are
dropped, the edge of the top-k can fall between two equal logits, and which of the two experts runs would depend on how
a program orders ties.
"""

import torch

from compressor.model.architecture import MoeLayer
from compressor.recipe.plan import LayerPlan

STEP = 2.0**-7  # by which each further one of equal rows is shorter: the precision of bfloat16


def is_cut(layer: MoeLayer, plan: LayerPlan) -> bool:
    """Whether a token may visit some of an expert's parts only: some go, or its top-k is no multiple of them."""
    return len(plan.groups) < layer.experts or layer.top_k % layer.parts != 0


def told_apart(value: torch.Tensor, dim: int, experts: int) -> torch.Tensor:
    """The tensor with each further one of equal rows along `dim` shorter by `STEP`; itself if all differ, or a bias.

    `experts` rows are looked at. The first of equal rows then has the largest logit wherever that is positive.
    """
    if (before := _earlier(value, dim, experts)) is None:
        return value
    factors = torch.ones(value.shape[dim], device=value.device)
    factors[:experts] -= STEP * before
    shape = [1] * value.dim()
    shape[dim] = -1
    return (value.float() * factors.view(shape)).to(value.dtype)


def has_equal(value: torch.Tensor, dim: int, experts: int) -> bool:
    """Whether two of the first `experts` rows along `dim` are equal; no bias has any, nor has a tensor on meta."""
    return _earlier(value, dim, experts) is not None


def _earlier(value: torch.Tensor, dim: int, experts: int) -> torch.Tensor | None:
    """`earlier` of the rows along a dimension; None where all differ."""
    if value.is_meta or value.numel() == value.shape[dim]:
        return None
    before = earlier(value.detach().narrow(dim, 0, experts).movedim(dim, 0).flatten(1))
    return before if bool(before.any()) else None


def earlier(rows: torch.Tensor) -> torch.Tensor:
    """For each row [N, ...] the number of rows before it that are equal, [N]."""
    alike = (rows[:, None, :1] == rows[None, :, :1]).all(2)  # most rows differ in their first number
    for one, other in alike.tril(-1).nonzero().tolist():
        alike[one, other] = torch.equal(rows[one], rows[other])
    return alike.tril(-1).sum(1)
