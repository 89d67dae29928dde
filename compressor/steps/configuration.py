"""The output's config.json: the base's, with the number of experts and all that depends on it
rewritten."""

import copy
import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from fnmatch import translate
from functools import reduce
from itertools import accumulate
from operator import attrgetter, getitem
from typing import Any

from compressor.checkpoint.reader import MODELOPT, WEIGHTS, packs_nothing
from compressor.errors import CompressionError
from compressor.model.architecture import (
    PER_LAYER,
    Architecture,
    build_meta,
    kernel_fields,
    with_fields,
)
from compressor.model.layout import Layout, expert_prefixes
from compressor.model.mtp import HEAD_FIELDS, head_fields
from compressor.model.remote_code import without_code
from compressor.recipe.plan import ExpertPlan

PART_OF_NAME = re.compile(r"experts?\.\d+")
LEAVES = ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3", "gate_up_proj", "weight")
WILDCARD = re.compile(r"[*?\[]")  # of shells, as modelopt writes names
# how entries of quantization_config that are regular expressions begin
PREFIXES = ("re:", "+:", "-:")
# fields that count multi-token-prediction heads
HEADS = re.compile(r".*(mtp|nextn).*(layers|modules)|num_(mtp|nextn)")
COUNTS = {  # names that configs have for the number of routed experts in a layer
    *(
        "num_experts",
        "num_local_experts",
        "n_routed_experts",
        "num_routed_experts",
        "moe_num_experts",
    ),
    *("num_moe_experts", "n_experts", "moe_n_experts"),
}
# where the language model's fields may stand
TEXTS = ("text_config", "llm_config", "language_config")

Renames = Mapping[str, str | None]  # new names of experts; None for a dropped one
Fields = Mapping[str, Any]  # of a config, or values at dotted paths
NONE: Renames = {}

logger = logging.getLogger(__name__)


def _announcing(raw: Fields, prefix: str = "") -> Iterator[tuple[str, int]]:
    """Return the dotted names of the fields that count heads, with their values."""
    for key, value in raw.items():
        if isinstance(value, dict):
            yield from _announcing(value, f"{prefix}{key}.")
        elif HEADS.fullmatch(key) and type(value) is int:
            yield f"{prefix}{key}", value


def expert_renames(
    architecture: Architecture, layout: Layout, plan: ExpertPlan
) -> dict[str, str | None]:
    """Return the new name of each expert that is stored by itself; None for a dropped one."""
    plans = plan.by_module
    renames: dict[str, str | None] = {}
    for layer in architecture.layers:
        prefixes = expert_prefixes(layout, layer)
        slots = plans[layer.name].slots()
        for expert, prefix in prefixes.items():
            renames[prefix] = prefixes[slots[expert]] if expert in slots else None
    return renames


def all_renames(
    architecture: Architecture, layout: Layout, plan: ExpertPlan, head_renames: Renames
) -> dict[str, str | None]:
    """Return the new names of experts in a quantisation; those of kept heads are `head_renames`."""
    if architecture.layers[0].parts > 1:  # a quantisation names no experts of a split
        return dict(head_renames)
    return {**expert_renames(architecture, layout, plan), **head_renames}


def _tells_experts_apart(pattern: str, renames: Renames) -> bool:
    """Return True if a pattern, or a part of a name, would mean another expert once they are
    renumbered."""
    is_regular = pattern.startswith(PREFIXES)
    if not is_regular and not WILDCARD.search(pattern):
        named = PART_OF_NAME.search(pattern)
        return named is not None and any(
            new != old and old.endswith(f".{named[0]}") for old, new in renames.items()
        )
    begin = "" if is_regular else WILDCARD.split(pattern)[0]
    matches = re.compile(pattern.partition(":")[2] if is_regular else translate(pattern)).match
    for old, new in renames.items():
        if new is None or old[: len(begin)] != begin[: len(old)]:
            continue
        for end in ("", ".", *(f".{leaf}" for leaf in LEAVES)):
            if bool(matches(old + end)) != bool(matches(new + end)):
                return True
    return False


def _renumber_text(text: str, renames: Renames) -> str | None:
    """Return a module name in which an expert's number is replaced; None for a dropped expert's."""
    for old in accumulate(text.split("."), "{}.{}".format):
        if old in renames:
            new = renames[old]
            return None if new is None else new + text[len(old) :]
    if _tells_experts_apart(text, renames):
        raise CompressionError(
            f"{text!r}, by which config.json or {MODELOPT} says what is quantised, speaks of "
            "single experts, which get other numbers; write it with full module names"
        )
    return text


def renumbered_quantization(node: Any, renames: Renames) -> Any:
    """Return a config's quantisation in which experts have other numbers.

    Raises `CompressionError` for a pattern of some.
    """
    if isinstance(node, dict):
        entries = {
            _renumber_text(key, renames): renumbered_quantization(value, renames)
            for key, value in node.items()
        }
        return {name: value for name, value in entries.items() if name is not None}
    if isinstance(node, list):
        items = [renumbered_quantization(item, renames) for item in node]
        return [item for item in items if item is not None]
    return _renumber_text(node, renames) if isinstance(node, str) else node


def fields_set(raw: Fields, known: Any, fields: Fields) -> dict[str, Any]:
    """Return a copy of the JSON of the config `known` with other values at dotted paths, by the
    names that fields have there; in a list, in place of their values."""
    config = copy.deepcopy(dict(raw))
    texts = [key for key in TEXTS if isinstance(raw.get(key), dict)]
    nodes: list[dict[str, Any]] = [config, *(config[key] for key in texts)]
    if any(path.rpartition(".")[2] in COUNTS for path in fields):
        # counts of single layers, which the output has none of
        for node in nodes:
            layers = node.pop(PER_LAYER, None)
            for number, entries in layers.items() if isinstance(layers, dict) else ():
                kept = {name: value for name, value in entries.items() if name not in COUNTS}
                if kept:
                    node.setdefault(PER_LAYER, {})[number] = kept
    for path, value in fields.items():
        *parents, name = path.split(".")
        if name in COUNTS:
            # other fields that count the same, as converters write
            for node, stated in zip(nodes, (raw, *(raw[key] for key in texts)), strict=True):
                for other in COUNTS & stated.keys():
                    if stated[other] == attrgetter(path)(known):
                        node[other] = value
        holder = reduce(getattr, parents, known)
        aliases: Mapping[str, str] = getattr(type(holder), "attribute_map", {}) or {}
        canonical = aliases.get(name, name)
        names = {name, canonical}
        names.update(alias for alias, target in aliases.items() if target == canonical)
        node = config
        for parent in parents:
            # fields of the text may stand at the top level
            if parent in node or not names & node.keys():
                node = node.setdefault(parent, {})
        for alias in sorted(names & node.keys()) or [name]:
            entries = node.get(alias)
            if isinstance(entries, list) and not isinstance(value, list):
                before = getattr(holder, name)
                node[alias] = [value if item == before else item for item in entries]
            else:
                node[alias] = value
    return config


def changed_fields(before: Fields, after: Fields, prefix: str = "") -> dict[str, Any]:
    """Return the fields, by dotted path, that have another value than in a config before;
    quantisation aside."""
    changed = dict[str, Any]()
    for key, value in after.items():
        known = before.get(key)
        if isinstance(value, dict) and key != "quantization_config":
            changed |= changed_fields(
                known if isinstance(known, dict) else {}, value, f"{prefix}{key}."
            )
        elif value != known and not isinstance(value, dict):
            changed[f"{prefix}{key}"] = value
    return changed


def config_with(
    raw: Fields, architecture: Architecture, fields: Fields, heads: int = 0
) -> tuple[dict[str, Any], list[str]]:
    """(config.json with other values at dotted paths, dotted names of fields set to zero); stock
    loading reads it.

    Fields that count multi-token-prediction heads say how many are stored: `heads`.
    """
    config = without_code(fields_set(raw, architecture.config, fields))
    config.pop(WEIGHTS, None)  # the output's have the usual names
    for node, field in kernel_fields(config):  # ignored here, it would fetch code elsewhere
        del node[field]
    for node in (config, *(value for value in config.values() if isinstance(value, dict))):
        quantization = node.get("quantization_config")
        if isinstance(quantization, dict):
            quantization.pop("moe_sparsity_config", None)  # the base's list of counts
            if packs_nothing(quantization):
                del node["quantization_config"]
    wrong = {path: count for path, count in _announcing(config) if count != heads}
    known = dict[str, int]()
    for path in wrong:
        with suppress(AttributeError):
            attrgetter(path)(architecture.config)
            known[path] = heads
    if known:
        # a field stays where the stock model has other tensors without it
        tensors = build_meta(architecture.config).state_dict().keys()
        if build_meta(with_fields(architecture.config, known)).state_dict().keys() != tensors:
            return config, []
    for path, count in wrong.items():
        *parents, name = path.split(".")
        node = reduce(getitem, parents, config)
        node[name] = heads
        layers = node.get("num_hidden_layers")
        all_layers = layers + count if isinstance(layers, int) else None
        for key, entries in node.items():  # lists of layers may go on with those of the heads
            if isinstance(entries, list) and len(entries) == all_layers:
                node[key] = entries[: len(entries) - count + heads]
        if heads:
            logger.warning(
                "config.json says %s %d, and %d are stored, which the output says",
                path,
                count,
                heads,
            )
    return config, [] if heads else list(wrong)


def output_config(
    raw: Fields,
    architecture: Architecture,
    layout: Layout,
    plan: ExpertPlan,
    dequantized_dtype: str | None,
    head_renames: Renames = NONE,
    heads: int = 0,
) -> tuple[dict[str, Any], list[str]]:
    """(config.json of the output, dotted names of fields set to zero because their tensors are left
    out).

    `head_renames` are those of the experts of the multi-token-prediction `heads` that are kept.
    """
    *place, count = architecture.count_field.split(".")
    own = dict[str, Any]()
    for number in range(heads):
        entries = head_fields(architecture.config, place, number)
        entries.pop(count, None)
        if plan.head_experts is not None:
            entries[count] = plan.head_experts
        own[str(number)] = entries
    fields = dict(architecture.fields(plan.experts))
    if any(own.values()):
        fields[".".join([*place, HEAD_FIELDS])] = own
    config, zeroed = config_with(raw, architecture, fields, heads)
    renames = all_renames(architecture, layout, plan, head_renames)
    for node in (config, *(value for value in config.values() if isinstance(value, dict))):
        if not any(own.values()):
            node.pop(HEAD_FIELDS, None)
        if "quantization_config" in node:
            if dequantized_dtype is not None:
                del node["quantization_config"]
            else:
                node["quantization_config"] = renumbered_quantization(
                    node["quantization_config"], renames
                )
    if dequantized_dtype is not None:
        config.pop("torch_dtype", None)
        config["dtype"] = dequantized_dtype
    return config, zeroed
