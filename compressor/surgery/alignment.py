"""Bring an expert's neurons into the order of another expert's before the two are mixed.

Weight matching of Ainsworth et al. 2023, arXiv:2209.04836, as MC-SMoE (Li et al. 2024, arXiv:2310.01334) uses it: an
expert whose intermediate neurons stand in another order computes the same, a mean over unlike orders does not.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from compressor.checkpoint.reader import is_finite
from compressor.errors import CompressionError
from compressor.model.experts import ExpertsView, Parameters, parameter_names, projections
from compressor.recipe.plan import Group
from compressor.surgery.tensors import mix, weighted_members


@torch.no_grad()
def matching(experts: Any, head: int, member: int) -> Tensor:
    """The order p [I] of the member's neurons in which they fit the head's best: the same one every time.

    Maximises sum_i <gate_h[i], gate_m[p(i)]> + <up_h[i], up_m[p(i)]> + <down_h[:, i], down_m[:, p(i)]> with float32
    products; biases do not count. Raises `CompressionError` where one of these overflows.
    """
    from scipy.optimize import linear_sum_assignment

    ours, theirs = projections(experts, head), projections(experts, member)
    gain = ours.up.float() @ theirs.up.float().T
    gain.addmm_(ours.down.float().T, theirs.down.float())
    if ours.gate is not None and theirs.gate is not None:
        gain.addmm_(ours.gate.float(), theirs.gate.float().T)
    if not is_finite(gain):
        raise CompressionError(
            f"experts {head} and {member} hold weights too large to compare their neurons; plan without alignment"
        )
    cost = gain.neg_().cpu()  # maximise would cost one more copy [I, I]
    return torch.from_numpy(linear_sum_assignment(cost.numpy())[1]).to(gain.device)


def reordered(experts: Any, name: str, value: Tensor, order: Tensor) -> Tensor:
    """One parameter of an expert with its neurons in the order [I], or with some of them alone [n]."""
    if name == "down_proj_bias":
        return value
    if name == "down_proj":
        return value.index_select(0 if experts.is_transposed else 1, order)
    dim = value.dim() - 1 if experts.is_transposed else 0
    if not experts.has_gate:
        rows = order
    elif experts.is_concatenated:
        rows = torch.cat([order, order + value.shape[dim] // 2])
    else:
        rows = torch.stack([2 * order, 2 * order + 1], dim=1).flatten()
    return value.index_select(dim, rows)


def aligned_experts(experts: Any, groups: Sequence[Group]) -> ExpertsView:
    """The experts module with the neurons of the members of every group with a head in the head's order."""
    orders = {
        member: matching(experts, group.head, member)
        for group in groups
        if group.head is not None
        for member in group.members
        if member != group.head
    }

    def in_order(name: str, expert: int, value: Tensor) -> Tensor:
        return reordered(experts, name, value, orders[expert]) if expert in orders else value

    return ExpertsView(experts, in_order)


@torch.no_grad()
def mixed_parameters(experts: Any, members: Iterable[tuple[int, float]]) -> Parameters:
    """sum(coefficient * member) of each parameter in float32; beside it, that of one member exists at a time."""
    shares = list(members)
    return {
        name: mix((getattr(experts, name)[expert], share) for expert, share in shares)
        for name in parameter_names(experts)
    }


def merged_parameters(experts: Any, group: Group) -> Parameters:
    """Parameters of one merged expert in float32: scale * sum(coefficient * member), aligned to the head if any."""
    own = aligned_experts(experts, [group]) if group.aligned else experts
    return mixed_parameters(own, weighted_members(group))
