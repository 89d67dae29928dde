"""Cutting a loaded decoder layer by its plan: the smaller model's tensors in the model's own layout."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from compressor.model.architecture import MoeLayer
from compressor.model.experts import Parameters, expert_parameters, parameter_names
from compressor.plans.plan import LayerPlan
from compressor.surgery.alignment import merged_parameters
from compressor.surgery.tensors import mix_rows, remap_table


def _aligned_experts(experts: Any, layer: MoeLayer, plan: LayerPlan) -> Parameters:
    """The cut tensors [N, ...] of an experts module by state-dict key; one merged expert at a time is in float32."""
    cut = {}
    for name in parameter_names(experts):
        value = getattr(experts, name)
        cut[name] = torch.empty(len(plan.groups), *value.shape[1:], dtype=value.dtype, device=value.device)
    for slot, group in enumerate(plan.groups):
        only = group.members[0] if group.untouched else None
        made = merged_parameters(experts, group) if only is None else expert_parameters(experts, only)
        for name, value in made.items():
            cut[name][slot] = value
    return {f"{layer.name}.{name}": value for name, value in cut.items()}


@torch.no_grad()
def cut_layers(model: Any, layers: Sequence[MoeLayer], plans: Mapping[str, LayerPlan]) -> dict[str, torch.Tensor]:
    """New tensors, by state-dict key, of what the plans change in these loaded layers of `model`."""
    state, cut = model.state_dict(), dict[str, torch.Tensor]()
    for layer in layers:
        plan = plans[layer.name]
        if any(group.aligned for group in plan.groups):
            cut.update(_aligned_experts(model.get_submodule(layer.name), layer, plan))
        for tensor in layer.tensors:
            if tensor.key not in cut:
                router = not tensor.key.startswith(f"{layer.name}.")
                cut[tensor.key] = mix_rows(state[tensor.key], tensor.dim, tensor.extra, layer, plan, router)
        for table in layer.tables:
            cut[table] = remap_table(state[table].cpu(), plan.remap()).to(state[table].device)
    return cut
