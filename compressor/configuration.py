"""The output's config.json: the source's, with the number of experts and what hangs on it rewritten."""

import copy
import re
from collections.abc import Iterator, Mapping
from typing import Any

from compressor.architecture import Architecture, get_field
from compressor.layout import Layout, expert_prefixes
from compressor.plan import CompressionPlan

EXTRA_HEAD = re.compile(r"(?=.*(mtp|nextn))(?=.*(num|layers))")  # fields that announce a multi-token-prediction head


def _aliases(config: Any, name: str) -> set[str]:
    """All the names under which a config class accepts a field."""
    mapping: Mapping[str, str] = getattr(type(config), "attribute_map", {}) or {}
    canonical = mapping.get(name, name)
    return {name, canonical, *(alias for alias, target in mapping.items() if target == canonical)}


def _set_count(raw: dict[str, Any], architecture: Architecture, count: int) -> None:
    *parents, name = architecture.count_field.split(".")
    node = raw
    for parent in parents:
        node = node.setdefault(parent, {})
    owner = get_field(architecture.config, ".".join(parents)) if parents else architecture.config
    present = [alias for alias in _aliases(owner, name) if alias in node]
    for alias in present or [name]:
        value = node.get(alias)
        node[alias] = [count] * len(value) if isinstance(value, list) else count


def _walk(node: dict[str, Any], prefix: str = "") -> Iterator[tuple[dict[str, Any], str, str]]:
    for key, value in node.items():
        if isinstance(value, dict):
            yield from _walk(value, f"{prefix}{key}.")
        else:
            yield node, key, f"{prefix}{key}"


def zero_extra_heads(raw: dict[str, Any]) -> list[str]:
    """Set the fields that announce a head whose tensors are left out to zero; returns their dotted names."""
    changed = []
    for node, key, dotted in list(_walk(raw)):
        value = node[key]
        if EXTRA_HEAD.search(key) and isinstance(value, int) and not isinstance(value, bool) and value > 0:
            node[key] = 0
            changed.append(dotted)
    return changed


def _renumbered(text: str, renames: Mapping[str, str | None]) -> str | None:
    """A module name in which an expert's number is replaced; None for a dropped expert's."""
    for old, new in renames.items():
        if text == old or text.startswith(f"{old}."):
            return None if new is None else new + text[len(old) :]
    return text


def _expert_renames(architecture: Architecture, layout: Layout, plan: CompressionPlan) -> dict[str, str | None]:
    plans = {layer_plan.module: layer_plan for layer_plan in plan.layers}
    renames: dict[str, str | None] = {}
    for layer in architecture.layers:
        prefixes, slots = expert_prefixes(layout, layer), plans[layer.name].slots()
        for expert, prefix in prefixes.items():
            slot = slots.get(expert)
            renames[prefix] = None if slot is None else prefixes[slot]
    return renames


def _renumber_quantization(node: Any, renames: Mapping[str, str | None]) -> Any:
    if isinstance(node, dict):
        return {key: _renumber_quantization(value, renames) for key, value in node.items()}
    if isinstance(node, list):
        items = [_renumber_quantization(item, renames) for item in node]
        return [item for item in items if item is not None]
    return _renumbered(node, renames) if isinstance(node, str) else node


def output_config(
    raw: Mapping[str, Any],
    architecture: Architecture,
    layout: Layout,
    plan: CompressionPlan,
    dequantized_dtype: str | None,
) -> tuple[dict[str, Any], list[str]]:
    """(config.json of the output, dotted names of fields set to zero because their tensors are left out)."""
    config = copy.deepcopy(dict(raw))
    _set_count(config, architecture, plan.experts)
    config.pop("auto_map", None)  # stock loading only: remote code does not travel
    zeroed = zero_extra_heads(config) if layout.left_out else []
    quantized = [
        node for node in (config, *(v for v in config.values() if isinstance(v, dict))) if "quantization_config" in node
    ]
    for node in quantized:
        if dequantized_dtype is not None:
            del node["quantization_config"]
        else:
            node["quantization_config"] = _renumber_quantization(
                node["quantization_config"], _expert_renames(architecture, layout, plan)
            )
    if dequantized_dtype is not None:
        config.pop("torch_dtype", None)
        config["dtype"] = dequantized_dtype
    return config, zeroed
