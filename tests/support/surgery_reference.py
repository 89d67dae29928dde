"""Surgery done a second way, to compare with: a small stock model filled in memory, with plain loops.

Nothing of `compressor` is used: the only input besides the model is the plan's JSON.
"""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tests.support import zoo

Layer = Mapping[str, Any]  # one entry of the plan's "layers"


def _owner(key: str, layers: Sequence[Layer]) -> Layer | None:
    """The layer whose MoE block holds a tensor."""
    inside = [entry for entry in layers if key.startswith(entry["module"].rpartition(".")[0] + ".")]
    return max(inside, key=lambda entry: len(entry["module"]), default=None)


def _mixed(value: Tensor, dim: int, group: Mapping[str, Any], router: bool) -> Tensor:
    row = torch.zeros_like(value.select(dim, 0), dtype=torch.float64)
    for place, member in enumerate(group["members"]):
        own = group["coefficients"][place] * group.get("scale", 1.0)
        row = row + (group["router_coefficients"][place] if router else own) * value.select(dim, member).double()
    return row


def _new_ids(table: Tensor, layer: Layer) -> Tensor:
    """Each expert id becomes its group's slot; a dropped id the lowest slot that its row does not name."""
    slots = {member: slot for slot, group in enumerate(layer["groups"]) for member in group["members"]}
    rows = []
    for row in table.tolist():
        new = [slots.get(expert) for expert in row]
        for place, slot in enumerate(new):
            if slot is None:
                new[place] = min(set(range(len(layer["groups"]))) - set(new))
        rows.append(new)
    return torch.tensor(rows, dtype=table.dtype)


@torch.no_grad()
def cut(model: PreTrainedModel, count_field: str, plan: Mapping[str, Any]) -> PreTrainedModel:
    """The stock model of the plan's size with the weights that the plan asks for; keeping all, a plain copy."""
    config = copy.deepcopy(model.config)
    zoo.set_count(config, count_field, plan["experts"])
    small: PreTrainedModel = type(model)(config)
    small.train(False)
    fill(small, model.state_dict(), plan["layers"])
    return small


@torch.no_grad()
def fill(small: nn.Module, source: Mapping[str, Tensor], layers: Sequence[Layer]) -> None:
    """Fill a model of fewer experts with the tensors of a larger one, row by row as the layers are planned."""
    own, count = small.state_dict(), len(layers[0]["groups"])
    planned = {value.data_ptr() for key, value in source.items() if _owner(key, layers) is not None}
    for key, value in source.items():
        target, layer = own[key], _owner(key, layers)
        if key.endswith("tid2eid"):
            assert layer is not None
            target.copy_(_new_ids(value, layer))
        elif value.shape == target.shape:
            target.copy_(value)
        elif layer is None:
            assert value.data_ptr() in planned, f"{key} counts experts, and no layer of the plan holds it"
        else:
            (dim,) = (d for d in range(value.dim()) if value.shape[d] != target.shape[d])
            router = not key.startswith(layer["module"] + ".")
            for slot, group in enumerate(layer["groups"]):
                target.select(dim, slot).copy_(_mixed(value, dim, group, router))
            for extra in range(value.shape[dim] - layer["experts"]):
                target.select(dim, count + extra).copy_(value.select(dim, layer["experts"] + extra))


def stored_bytes(model: nn.Module) -> int:
    """Bytes of the state dict, tied tensors once."""
    sizes = {value.data_ptr(): value.nbytes for value in model.state_dict().values() if value.numel()}
    return sum(sizes.values())


@torch.no_grad()
def realign(model: nn.Module) -> nn.Module:
    """Copy every tensor to memory of its own: kernels may choose another path for the addresses inside a file."""
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.clone()
    return model


def _routers(model: nn.Module) -> dict[str, nn.Module]:
    """The router beside each experts module, by the name of the experts."""
    found = {}
    for name in zoo.experts(model):
        children = dict(model.get_submodule(name.rpartition(".")[0]).named_children())
        found[name] = children["gate"] if "gate" in children else children["router"]
    return found


def forced_logits(model: PreTrainedModel, small: PreTrainedModel, plan: Mapping[str, Any], ids: Tensor) -> Tensor:
    """Logits of the large model whose routers are made to choose as those of a small one, made by a drop, do."""
    seen: dict[str, list[tuple[Any, ...]]] = {name: [] for name in _routers(small)}  # of each call
    handles = [
        router.register_forward_hook(lambda module, args, output, name=name: seen[name].append(output))
        for name, router in _routers(small).items()
    ]
    zoo.logits(small, ids)
    kept = {entry["module"]: [group["members"][0] for group in entry["groups"]] for entry in plan["layers"]}
    weights = {model.get_parameter(f"{module}.down_proj").data_ptr(): module for module in kept}

    def choose(name: str, output: tuple[Any, ...]) -> tuple[Any, ...]:
        module = weights[model.get_parameter(f"{name}.down_proj").data_ptr()]  # the same under a tied name
        _, shares, index, *rest = seen[name].pop(0)
        return (output[0], shares, torch.tensor(kept[module])[index].to(index.dtype), *rest)

    handles += [
        router.register_forward_hook(lambda module, args, output, name=name: choose(name, output))
        for name, router in _routers(model).items()
    ]
    try:
        return zoo.logits(model, ids)
    finally:
        for handle in handles:
            handle.remove()
