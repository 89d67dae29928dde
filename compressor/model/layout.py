"""The layout of stored experts, one by one or fused along a dimension, found with the loader's own
conversion."""

import copy
import math
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cache
from itertools import chain
from typing import Any

import torch
from transformers.core_model_loading import dot_natural_key

from compressor.checkpoint.reader import Checkpoint
from compressor.errors import CompressionError
from compressor.frozen import frozen
from compressor.model.architecture import Architecture, build_meta
from compressor.model.loading import map_keys
from compressor.model.moe_layer import ExpertTensor, MoeLayer, decoder_layer_of

# target in the model, conversion pattern, suffix of a quantised weight's companion
Key = tuple[str, str | None, str]


@frozen
class Role:
    """The role of a stored tensor in the MoE layers.

    `kind`: "expert" (one expert's own tensor), "fused" (experts along `dim`), "table" (holds expert
    ids), "plain"."""

    kind: str
    decoder_layer: str  # decoder layer, or "" for the rest of the model
    layer: str = ""
    is_router: bool = False
    expert: int = -1
    family: str = ""  # target, pattern and suffix, shared by the tensors of all experts
    dim: int = 0
    extra: int = 0


@frozen
class Layout:
    """The roles of all stored tensors in the output, and the tensors left out."""

    roles: Mapping[str, Role]
    left_out: tuple[str, ...]  # not loaded by the stock model
    regular: bool  # False if only the loader and its reversal understand how experts are stored
    quantized: bool


def _fused_dim(
    checkpoint: Checkpoint, name: str, target: str, partial: Any, doubled: Any, grown_by: int
) -> int:
    """Return the stored dimension of experts: with it grown, the converted tensor fits a model with
    twice as many."""
    keys = partial.plain_keys
    siblings = sorted(keys.sources[target], key=lambda other: other != name)  # itself first
    wanted = doubled.state_dict()[target].shape
    shape = list(checkpoint.tensors[name].shape)
    for dim in range(len(shape)):
        trial = copy.deepcopy(partial.converter_of(keys.patterns[name]))
        trial.collected_tensors.clear()
        for sibling in siblings:
            larger = list(checkpoint.tensors[sibling].shape)
            if dim < len(larger):
                larger[dim] += grown_by
            grown = torch.empty(larger, device="meta")
            trial.add_tensor(target, sibling, keys.patterns[sibling], grown)
        with suppress(Exception):  # this dimension cannot grow
            value = trial.convert(target, model=doubled, config=doubled.config)[target]
            value = value[0] if isinstance(value, list) else value
            if value.shape == wanted:
                return dim
    raise CompressionError(
        f"tensor {name!r}: no dimension of its shape {shape} counts the experts; this storage is "
        "not supported"
    )


def find_layout(checkpoint: Checkpoint, architecture: Architecture, partial: Any) -> Layout:
    """Return the roles of all stored tensors; `partial` is the `PartialModel` of the same
    checkpoint."""
    quantized = bool(checkpoint.quantization)
    keys = partial.plain_keys
    placed = {name: (target, keys.patterns[name], "") for name, target in keys.targets.items()}
    # a weight's scales go beside it; possible weights: x.up_scale -> x.weight, x.up
    weights = {}
    for name in keys.unknown if quantized else ():
        stem, _, last = name.rpartition(".")
        cuts = range(1, last.count("_") + 1)
        weights[name] = [f"{stem}.weight", *(f"{stem}.{last.rsplit('_', cut)[0]}" for cut in cuts)]
    candidates = chain.from_iterable(weights.values())
    mapped = map_keys(candidates, partial.model, partial.plain_conversions)
    left_out = []
    for name in keys.unknown:
        weight = next(filter(mapped.targets.__contains__, weights.get(name, ())), None)
        if weight is None:
            left_out.append(name)
        else:
            suffix = f".{name.rpartition('.')[2]}"
            placed[name] = (mapped.targets[weight], mapped.patterns[weight], suffix)
    modules = defaultdict(set)  # of tensors that belong together
    families: dict[Key, dict[str, str]] = defaultdict(dict)  # their names by what they share
    for name, key in placed.items():
        module = name.rpartition(".")[0] if quantized else name
        modules[key[:2]].add(module)
        families[key][module] = name
    owners = dict[str, tuple[MoeLayer, ExpertTensor]]()
    tables = dict[str, str]()
    for layer in architecture.layers:
        owners |= {tensor.key: (layer, tensor) for tensor in layer.tensors}
        tables |= dict.fromkeys(layer.tables, layer.name)
    roles: dict[str, Role] = {}
    doubled = cache(lambda: build_meta(architecture.with_experts(2 * architecture.experts)))
    regular = True
    for (target, pattern, suffix), by_module in families.items():
        decoder_layer = decoder_layer_of(target, architecture.decoder_layers)
        role = Role("plain", decoder_layer)
        if target in tables:
            role = Role("table", decoder_layer, tables[target])
        elif target in owners:
            if len(getattr(partial.converter_of(pattern), "target_patterns", ())) > 1:
                regular = False
                continue
            layer, tensor = owners[target]
            is_router = not target.startswith(f"{layer.name}.")
            if pattern is not None and "*" in pattern:
                family = f"{target}|{pattern}|{suffix}"
                role = Role("expert", decoder_layer, layer.name, is_router, family=family)
                beside = modules[target, pattern]
                roles |= _one_each(checkpoint, by_module, beside, role, layer)
                continue
            name = next(iter(by_module.values()))
            shape = checkpoint.tensors[name].shape
            dim = 0  # a fused weight's scales follow its experts
            is_of_whole = bool(suffix) and math.prod(shape) == 1
            if suffix and not is_of_whole and shape[0] != layer.experts + tensor.extra:
                regular = False  # blocks of several experts
                continue
            if not suffix:
                dim = tensor.dim
                if pattern is not None:
                    dim = _fused_dim(checkpoint, name, target, partial, doubled(), layer.experts)
            if not is_of_whole:
                role = Role(
                    "fused", decoder_layer, layer.name, is_router, dim=dim, extra=tensor.extra
                )
        roles |= dict.fromkeys(by_module.values(), role)
    return Layout(roles, tuple(sorted(left_out)), regular, quantized)


def _one_each(
    checkpoint: Checkpoint, names: Mapping[str, str], modules: set[str], kind: Role, layer: MoeLayer
) -> dict[str, Role]:
    """Return the roles of tensors stored one for each expert, in the loader's order.

    `names` are by module; of a layer's `modules`, those whose weights are plain need no scales.
    """
    usual = min(names.values(), key=dot_natural_key)
    if len(modules) != layer.experts:
        raise CompressionError(
            f"{layer.name}: the checkpoint holds {len(modules)} tensors like {usual!r} for "
            f"{layer.experts} experts"
        )
    ordered = sorted(modules, key=dot_natural_key)
    numbers = []
    for column in map(set, zip(*(module.split(".") for module in ordered), strict=False)):
        if len(column) > 1 and "".join(column).isdecimal():
            numbers.append({int(part) for part in column})
    absent = set(range(layer.experts)) - numbers[0] if len(numbers) == 1 else set()
    if absent:
        raise CompressionError(
            f"{layer.name}: the checkpoint has no tensor like {usual!r} of expert {min(absent)}; "
            "download it again, or if experts are numbered with gaps, which stock transformers "
            "loads in order and servers don't, load it there and save it with save_pretrained"
        )
    roles = {}
    shape = checkpoint.tensors[usual].shape
    for expert, module in enumerate(ordered):
        name = names.get(module)
        if name is None:
            weight = checkpoint.tensors.get(f"{module}.weight")
            if weight is None or not weight.is_plain:
                raise CompressionError(
                    f"{layer.name}: the checkpoint has no tensor like {usual!r} for {module!r}; "
                    "download it again"
                )
            continue
        found = checkpoint.tensors[name].shape
        if found != shape:
            raise CompressionError(
                f"tensor {name!r} has shape {list(found)}, {usual!r} has {list(shape)}; download "
                "it again"
            )
        roles[name] = replace(kind, expert=expert)
    return roles


def expert_prefixes(layout: Layout, layer: MoeLayer) -> dict[int, str]:
    """Return the prefix of each expert's tensors, up to its number, if experts are stored one by
    one."""
    prefixes = {}
    for name, role in layout.roles.items():
        if role.kind == "expert" and role.layer == layer.name:
            parts = name.split(".")
            while parts and not (parts[-1].isdecimal() and int(parts[-1]) == role.expert):
                parts.pop()
            if parts:
                prefixes[role.expert] = ".".join(parts)
    return prefixes
