"""Bring an expert's neurons into the order of another expert's before the two are mixed.

Weight matching of Ainsworth et al. 2023, arXiv:2209.04836, as MC-SMoE (Li et al. 2024, arXiv:2310.01334) uses it: an
expert whose intermediate neurons stand in another order computes the same, a mean over unlike orders does not.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from compressor.model.experts import Parameters, parameter_names, projections
from compressor.plans.plan import Group
from compressor.surgery.tensors import mix, weighted_members


@torch.no_grad()
def matching(experts: Any, head: int, member: int) -> Tensor:
    """The order p [I] of the member's neurons in which they fit the head's best: the same one every time.

    Maximises sum_i <gate_h[i], gate_m[p(i)]> + <up_h[i], up_m[p(i)]> + <down_h[:, i], down_m[:, p(i)]> with float32
    products; biases do not count.
    """
    from scipy.optimize import linear_sum_assignment

    ours, theirs = projections(experts, head), projections(experts, member)
    gain = ours.up.float() @ theirs.up.float().T
    gain.addmm_(ours.down.float().T, theirs.down.float())
    if ours.gate is not None and theirs.gate is not None:
        gain.addmm_(ours.gate.float(), theirs.gate.float().T)
    cost = gain.neg_().cpu()  # maximise would cost one more copy [I, I]
    return torch.from_numpy(linear_sum_assignment(cost.numpy())[1]).to(gain.device)


def reordered(experts: Any, name: str, value: Tensor, order: Tensor) -> Tensor:
    """One parameter of an expert with its neurons in the order [I]."""
    if name == "down_proj_bias":
        return value
    if name == "down_proj":
        return value.index_select(0 if experts.is_transposed else 1, order)
    if not experts.has_gate:
        rows = order
    elif experts.is_concatenated:
        rows = torch.cat([order, order + len(order)])
    else:
        rows = torch.stack([2 * order, 2 * order + 1], dim=1).flatten()
    return value.index_select(value.dim() - 1 if experts.is_transposed else 0, rows)


class AlignedExperts:
    """An experts module in which the members of groups with a head have their neurons in the head's order; read-only.

    `expert_parameters` and `apply_expert` take it for the module itself. Every reading copies, nothing is kept but
    the orders.
    """

    def __init__(self, experts: Any, groups: Sequence[Group]) -> None:
        self._experts = experts
        self._orders = {
            member: matching(experts, group.head, member)
            for group in groups
            if group.head is not None
            for member in group.members
            if member != group.head
        }

    def __getattr__(self, name: str) -> Any:
        if name in parameter_names(self._experts):
            return _AlignedSlices(self._experts, name, self._orders)
        return getattr(self._experts, name)


class _AlignedSlices:
    def __init__(self, experts: Any, name: str, orders: Mapping[int, Tensor]) -> None:
        self._experts, self._name, self._orders = experts, name, orders

    def __getitem__(self, expert: int) -> Tensor:
        value: Tensor = getattr(self._experts, self._name)[expert]
        order = self._orders.get(expert)
        return value if order is None else reordered(self._experts, self._name, value, order)


@torch.no_grad()
def merged_parameters(experts: Any, group: Group) -> Parameters:
    """Parameters of one merged expert in float32: scale * sum(coefficient * member), each aligned to the head if any.

    Beside the result, one parameter of one member exists at a time.
    """
    own = AlignedExperts(experts, [group]) if group.aligned else experts
    members = weighted_members(group)
    return {
        name: mix((getattr(own, name)[expert], coefficient) for expert, coefficient in members)
        for name in parameter_names(experts)
    }
