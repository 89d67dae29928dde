"""Cutting a loaded decoder layer by its plan, and keeping what was cut on disk until the output is written."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from compressor.errors import CompressionError
from compressor.kept import keep_tensors, kept_tensors, told_of
from compressor.model.architecture import MoeLayer
from compressor.model.experts import Parameters, expert_parameters, parameter_names
from compressor.recipe.plan import LayerPlan
from compressor.recipe.steps_plan import layer_from_dict, layer_to_dict
from compressor.surgery.alignment import merged_parameters
from compressor.surgery.equal_rows import is_cut, told_apart
from compressor.surgery.tensors import mix, refuse_overflow, remap_table, weighted_members


def mixed_rows(name: str, value: torch.Tensor, dim: int, plan: LayerPlan, router: bool) -> torch.Tensor:
    """Surgery on a tensor in the model's own layout: the groups' rows along `dim`, then those of no routed expert."""
    rows = []
    for group in plan.groups:
        members = weighted_members(group, router)
        if len(members) == 1 and members[0][1] == 1.0:
            rows.append(value.select(dim, members[0][0]))
        else:
            mixed = mix((value.select(dim, expert), share) for expert, share in members)
            rows.append(refuse_overflow(name, mixed.to(value.dtype)))
    rows += [value.select(dim, place) for place in range(plan.experts, value.shape[dim])]
    return torch.stack(rows, dim)


def _aligned_experts(experts: Any, layer: MoeLayer, plan: LayerPlan) -> Parameters:
    """The cut tensors [N, ...] of an experts module by state-dict key; one merged expert at a time is in float32."""
    count = len(plan.groups)
    cut = {name: torch.empty_like(getattr(experts, name)[:count]) for name in parameter_names(experts)}
    for slot, group in enumerate(plan.groups):
        only = group.members[0] if group.untouched else None
        made = merged_parameters(experts, group) if only is None else expert_parameters(experts, only)
        for name, value in made.items():
            cut[name][slot] = value
            if only is None:
                refuse_overflow(f"{layer.name}.{name}", cut[name][slot])
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
                made = mixed_rows(tensor.key, state[tensor.key], tensor.dim, plan, router)
                apart = router and is_cut(layer, plan)
                cut[tensor.key] = told_apart(made, tensor.dim, len(plan.groups)) if apart else made
        for table in layer.tables:
            cut[table] = remap_table(state[table].cpu(), plan.remap()).to(state[table].device)
    return cut


def cut_keys(layer: MoeLayer) -> list[str]:
    """State-dict keys of the tensors of a layer that count experts, which cutting changes."""
    return [*(tensor.key for tensor in layer.tensors), *layer.tables]


@dataclass(frozen=True, slots=True)
class CutFiles:
    """Cut and corrected tensors of finished layers, a file each, so that an interrupted run need not repeat them.

    A file that cannot be read, as after a loss of power, counts as none: its layer is made anew.
    """

    folder: Path

    def _path(self, layer: MoeLayer) -> Path:
        return self.folder / f"{layer.name}.safetensors"

    def save(self, plan: LayerPlan, layer: MoeLayer, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write a layer's tensors with its plan; a file is there whole or not at all."""
        keep_tensors(self._path(layer), tensors, layer_to_dict(plan))

    def plan(self, layer: MoeLayer) -> LayerPlan | None:
        """The plan of a finished layer; None if it is not there."""
        try:
            return layer_from_dict(told_of(self._path(layer)))
        except (TypeError, KeyError, ValueError, AttributeError, OverflowError, CompressionError):
            return None

    def tensors(self, layer: MoeLayer) -> dict[str, torch.Tensor]:
        """The tensors of a finished layer; none if it is not there."""
        return {} if self.plan(layer) is None else kept_tensors(self._path(layer))
