"""How a checkpoint stores its experts: one tensor each, or fused along a dimension; found by asking the loader."""

import copy
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from compressor.checkpoint.reader import Checkpoint
from compressor.errors import CompressionError
from compressor.model.architecture import Architecture, MoeLayer, build_meta
from compressor.model.loading import KeyMap

Key = tuple[str, str | None, str]  # target in the model, conversion pattern, suffix of a quantised weight's companion


@dataclass(frozen=True, slots=True)
class Role:
    """What one stored tensor is to the MoE layers.

    `kind`: "expert" (one expert's own tensor), "fused" (experts along `dim`), "table" (holds expert ids), "plain".
    """

    kind: str
    unit: str  # decoder layer, or "" for the rest of the model
    layer: str = ""
    is_router: bool = False
    expert: int = -1
    family: str = ""  # what the tensors of all experts share: target, pattern and suffix
    dim: int = 0
    extra: int = 0


@dataclass(frozen=True, slots=True)
class Layout:
    """Roles of all stored tensors that go into the output, and those that are left out."""

    roles: Mapping[str, Role]
    left_out: tuple[str, ...]  # tensors that the stock model does not load
    regular: bool  # False: experts are stored in a way that only the loader and its reversal understand
    quantized: bool


def _unit_of(target: str, units: tuple[str, ...]) -> str:
    inside = [unit for unit in units if target.startswith(f"{unit}.")]
    return max(inside, key=len, default="")


def _adopt_companions(keys: KeyMap, rename: Any) -> tuple[dict[str, Key], list[str]]:
    """(target, pattern, suffix) per stored tensor; a quantised weight's scales go where the weight would go."""
    placed: dict[str, Key] = {name: (keys.targets[name], keys.patterns[name], "") for name in keys.targets}
    left_out = []
    for name in keys.unknown:
        stem, _, last = name.rpartition(".")
        trials = [f"{stem}.weight"]
        while "_" in last:
            last = last.rpartition("_")[0]
            trials.append(f"{stem}.{last}")
        for trial in trials:
            target, pattern = rename(trial)
            if target is not None:
                placed[name] = (target, pattern, name[len(stem) :])
                break
        else:
            left_out.append(name)
    return placed, left_out


def _fused_dim(checkpoint: Checkpoint, names: list[str], target: str, partial: Any, doubled: "_Doubled") -> int:
    """The stored dimension that counts experts: growing it makes the converted tensor fit a model with twice them."""
    wanted = doubled.shapes[target]
    pattern = partial.plain_keys.patterns[names[0]]
    converter = next(
        entry
        for entry in partial.plain_conversions
        if hasattr(entry, "operations") and pattern in entry.source_patterns
    )
    for dim in range(len(checkpoint.tensors[names[0]].shape)):
        trial = copy.deepcopy(converter)
        trial.collected_tensors.clear()
        for name in names:
            larger = list(checkpoint.tensors[name].shape)
            larger[dim : dim + 1] = [size + doubled.grown_by for size in larger[dim : dim + 1]]
            trial.add_tensor(target, name, partial.plain_keys.patterns[name], torch.empty(larger, device="meta"))
        try:
            converted = trial.convert(target, model=doubled.model, config=doubled.model.config)
        except Exception:  # a dimension that the operations cannot grow is simply not the one
            continue
        value = converted.get(target)
        value = value[0] if isinstance(value, list) else value
        if value is not None and tuple(value.shape) == wanted:
            return dim
    shape = list(checkpoint.tensors[names[0]].shape)
    raise CompressionError(
        f"tensor {names[0]!r}: no dimension of its shape {shape} counts the experts; this storage is not supported"
    )


class _Doubled:
    """The model with twice the experts, built on meta when a conversion has to be asked which dimension counts them."""

    def __init__(self, architecture: Architecture) -> None:
        self._architecture = architecture

    @cached_property
    def model(self) -> Any:
        return build_meta(self._architecture.with_experts(2 * self._architecture.experts))

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {key: tuple(value.shape) for key, value in self.model.state_dict().items()}

    @property
    def grown_by(self) -> int:
        return self._architecture.experts


def _placements(checkpoint: Checkpoint, partial: Any, quantized: bool) -> tuple[dict[str, Key], list[str]]:
    """(target, pattern, suffix) of every stored tensor, and the tensors that the stock model does not load."""
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    keys = partial.plain_keys
    if not quantized:
        return {name: (keys.targets[name], keys.patterns[name], "") for name in keys.targets}, list(keys.unknown)
    renamings = [entry for entry in partial.plain_conversions if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in partial.plain_conversions if isinstance(entry, WeightConverter)]

    def rename(name: str) -> tuple[str | None, str | None]:
        target, pattern = rename_source_key(name, renamings, converters, partial.model.base_model_prefix, partial.empty)
        return (target, pattern) if target in partial.empty else (None, None)

    return _adopt_companions(keys, rename)


def find_layout(checkpoint: Checkpoint, architecture: Architecture, partial: Any) -> Layout:
    """Give every stored tensor its role; `partial` is the `PartialModel` of the same checkpoint."""
    quantized = bool(checkpoint.raw_config.get("quantization_config") or _nested_quantization(checkpoint.raw_config))
    placed, left_out = _placements(checkpoint, partial, quantized)
    owners = {tensor.key: (layer, tensor) for layer in architecture.layers for tensor in layer.tensors}
    tables = {table: layer for layer in architecture.layers for table in layer.tables}
    families: dict[Key, list[str]] = {}
    for name, key in placed.items():
        families.setdefault(key, []).append(name)
    roles: dict[str, Role] = {}
    doubled, regular = _Doubled(architecture), True
    for (target, pattern, suffix), names in families.items():
        unit = _unit_of(target, architecture.units)
        if target in tables:
            roles.update({name: Role("table", unit, tables[target].name) for name in names})
        elif target not in owners:
            roles.update({name: Role("plain", unit) for name in names})
        elif _many_targets(partial.plain_conversions, pattern):
            regular = False
        else:
            layer, tensor = owners[target]
            kind = Role(
                "expert",
                unit,
                layer.name,
                is_router=not target.startswith(f"{layer.name}."),
                family=f"{target}|{pattern}|{suffix}",
            )
            if pattern is not None and "*" in pattern:
                roles.update(_one_each(checkpoint, names, kind, layer))
            else:
                dim = tensor.dim
                if suffix:
                    dim = 0  # a fused weight's scales follow its experts
                elif pattern is not None:
                    siblings = [
                        name for name in partial.plain_keys.targets if partial.plain_keys.targets[name] == target
                    ]
                    dim = _fused_dim(
                        checkpoint, [names[0], *(n for n in siblings if n != names[0])], target, partial, doubled
                    )
                fused = replace(kind, kind="fused", family="", dim=dim, extra=tensor.extra)
                roles.update(dict.fromkeys(names, fused))
    return Layout(roles, tuple(sorted(left_out)), regular, quantized)


def _one_each(checkpoint: Checkpoint, names: list[str], kind: Role, layer: MoeLayer) -> dict[str, Role]:
    """Roles of tensors stored one for each expert, in the order in which the loader stacks them."""
    from transformers.core_model_loading import dot_natural_key

    if len(names) != layer.experts:
        raise CompressionError(
            f"{layer.name}: the checkpoint holds {len(names)} tensors like {min(names)!r} for {layer.experts} experts"
        )
    ordered = sorted(names, key=dot_natural_key)
    columns = [set(column) for column in zip(*(name.split(".") for name in ordered), strict=False)]
    numbers = [column for column in columns if len(column) > 1 and all(part.isdecimal() for part in column)]
    if len(numbers) == 1 and (absent := set(range(layer.experts)) - {int(part) for part in numbers[0]}):
        raise CompressionError(
            f"{layer.name}: the checkpoint has no tensor like {ordered[0]!r} of expert {min(absent)}; download it again"
        )
    shapes = {checkpoint.tensors[name].shape: name for name in reversed(ordered)}
    if len(shapes) > 1:
        (usual, _), (other, odd) = sorted(shapes.items(), key=lambda item: item[1] != ordered[0])[:2]
        raise CompressionError(
            f"tensor {odd!r} has shape {list(other)}, {ordered[0]!r} has {list(usual)}; download it again"
        )
    return {name: replace(kind, expert=expert) for expert, name in enumerate(ordered)}


def _many_targets(conversions: list[Any], pattern: str | None) -> bool:
    return any(
        pattern in entry.source_patterns and len(entry.target_patterns) > 1
        for entry in conversions
        if hasattr(entry, "operations")
    )


def _nested_quantization(raw: Mapping[str, Any]) -> bool:
    return any(isinstance(value, dict) and value.get("quantization_config") for value in raw.values())


def expert_prefixes(layout: Layout, layer: MoeLayer) -> dict[int, str]:
    """For per-expert storage: the name that an expert's tensors share, up to and including its number."""
    names = {
        role.expert: name for name, role in layout.roles.items() if role.kind == "expert" and role.layer == layer.name
    }
    found = {}
    for expert, name in names.items():
        parts = name.split(".")
        places = [place for place, part in enumerate(parts) if re.fullmatch(r"\d+", part) and int(part) == expert]
        if places:
            found[expert] = ".".join(parts[: places[-1] + 1])
    return found


def fingerprint(checkpoint: Checkpoint, layout: Layout) -> str:
    """SHA-256 over every tensor's name, dtype and shape and over all routers' bytes (small, and each model's own)."""
    digest = hashlib.sha256()
    digest.update(json.dumps(sorted((t.name, t.dtype, t.shape) for t in checkpoint.tensors.values())).encode())
    for name in sorted(name for name, role in layout.roles.items() if role.is_router):
        info = checkpoint.tensors[name]
        with checkpoint.path(name).open("rb") as stream:
            stream.seek(info.begin)
            digest.update(stream.read(info.nbytes))
    return digest.hexdigest()
