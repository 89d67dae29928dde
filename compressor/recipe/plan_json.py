"""A layer's plan to JSON and back, and JSON that a person can read and edit."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from compressor.errors import CompressionError
from compressor.recipe.layer import Group, LayerPlan
from compressor.records import MOST_BITS

MOST_LAYERS, MOST_EXPERTS = 2**10, 2**12  # of a model, and of a layer: more than any has
MOST_IN_ALL = 2**17  # experts of all layers, few enough to list and to draw
MOST_FIGURES = 100  # names in a layer's figures, and in whatever else a page shows one by one
ROUTING_FIELDS = ("routing_groups", "chosen_groups", "experts_per_group")


def field_names(stored: type, *more: str) -> frozenset[str]:
    """Names that the JSON of a dataclass may have."""
    return frozenset(entry.name for entry in fields(stored)) | set(more)


def integer(value: Any, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value.bit_length() > MOST_BITS:
        raise CompressionError(f"{name} should be a whole number, it is {value!r}")
    return value


def number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise CompressionError(f"{value!r} stands where a number should")
    return float(value)


def refuse_unknown(entry: Any, known: frozenset[str], where: str) -> None:
    if not isinstance(entry, dict):
        raise CompressionError(f"{where}: {entry!r} stands where an object with {', '.join(sorted(known))} should")
    if unknown := sorted(set(entry) - known):
        raise CompressionError(f"{where} has an unknown field {unknown[0]!r}; known are {', '.join(sorted(known))}")


def refuse_crowds(layers: Any) -> None:
    """Refuse more layers or experts than any model has, before they are looked at one by one."""
    if isinstance(layers, list) and len(layers) > MOST_LAYERS:
        raise CompressionError(f"{len(layers):,} layers are more than any model has; restore the plan")
    counts = [entry.get("experts") for entry in layers if isinstance(entry, dict)] if isinstance(layers, list) else []
    if sum(count for count in counts if isinstance(count, int) and 0 < count <= MOST_EXPERTS) > MOST_IN_ALL:
        raise CompressionError(f"its layers have more than {MOST_IN_ALL:,} experts together; restore the plan")


def few(content: Any, name: str) -> Any:
    """The same object or list, unless it has more entries than a plan's may have."""
    if isinstance(content, Mapping | Sequence) and not isinstance(content, str) and len(content) > MOST_FIGURES:
        raise CompressionError(f"{name}: {len(content):,} entries are more than {MOST_FIGURES}; take some out")
    return content


def layer_to_dict(plan: LayerPlan) -> dict[str, Any]:
    groups = [
        {
            "members": list(group.members),
            "coefficients": list(group.coefficients),
            "router_coefficients": list(group.router_coefficients),
            **({"scale": group.scale} if group.scale != 1.0 else {}),
            **({"head": group.head} if group.head is not None else {}),
        }
        for group in plan.groups
    ]
    facts = ("module", "layer", "experts", "top_k", *(ROUTING_FIELDS if plan.routing_groups > 1 else ()))
    return {
        **{name: getattr(plan, name) for name in facts},
        "groups": groups,
        "dropped": list(plan.dropped),
        **({"constants": list(plan.constants)} if plan.constants else {}),
        "upstream": plan.upstream,
        "decided_by": plan.decided_by,
        "figures": dict(plan.figures),
    }


def _group_from_dict(entry: Mapping[str, Any]) -> Group:
    refuse_unknown(entry, field_names(Group), f"group {entry.get('members')}" if isinstance(entry, dict) else "groups")
    members = tuple(entry["members"])
    coefficients = tuple(number(value) for value in entry["coefficients"])
    router = tuple(number(value) for value in entry.get("router_coefficients", coefficients))
    head = entry.get("head")
    scale = number(entry.get("scale", 1.0))
    return Group(members, coefficients, router, scale, None if head is None else integer(head, "head"))


def layer_from_dict(entry: Mapping[str, Any]) -> LayerPlan:
    module = str(entry["module"]) if isinstance(entry, dict) else "layers"
    refuse_unknown(entry, field_names(LayerPlan, "dropped"), module)
    experts = integer(entry["experts"], "experts")
    if experts > MOST_EXPERTS:
        raise CompressionError(f"{module}: {experts} experts are more than any layer has; restore it")
    try:
        groups = tuple(_group_from_dict(group) for group in entry["groups"])
    except CompressionError as error:
        raise CompressionError(f"{module}: {error}") from error
    plan = LayerPlan(
        module=module,
        layer=integer(entry["layer"], "layer"),
        experts=experts,
        top_k=integer(entry["top_k"], "top_k"),
        groups=groups,
        **{name: integer(entry.get(name, 1), name) for name in ROUTING_FIELDS},
        upstream=str(entry.get("upstream", "original")),
        decided_by=str(entry.get("decided_by", "")),
        figures=dict(few(entry.get("figures"), "figures") or {}),
        constants=tuple(sorted({integer(expert, "each of constants") for expert in entry.get("constants") or ()})),
    )
    grouped, gone = plan.slots(), set(plan.dropped)
    for expert in entry.get("dropped") or ():
        if expert in grouped:
            raise CompressionError(
                f"{module}: expert {expert} is in a group and in 'dropped'; take it out of one of them"
            )
        if expert not in gone:
            raise CompressionError(
                f"{module}: 'dropped' names expert {expert!r}, which does not exist; "
                f"experts are numbered 0 to {plan.experts - 1}"
            )
    return plan


def protected_from_dict(content: Any) -> dict[str, tuple[int, ...]]:
    """Protected experts by module, in ascending order."""
    if not isinstance(content, dict) or not all(isinstance(experts, list) for experts in content.values()):
        raise CompressionError(
            "protected should be an object with a list of experts for each module; restore it or take it out"
        )
    return {
        module: tuple(sorted({integer(expert, f"{module}: each protected expert") for expert in experts}))
        for module, experts in content.items()
    }


def readable_json(content: Mapping[str, Any]) -> str:
    """Indented JSON in which lists of plain values stand on one line, so that a person can read it."""
    return _lines(json.loads(json.dumps(content)), "") + "\n"  # as JSON has it: lists for tuples, text for keys


def _lines(content: Any, margin: str) -> str:
    """JSON of plain JSON types, of which all lines but the first begin with `margin`."""
    if isinstance(content, dict) and content:
        inner = [f"{_plain(name)}: {_lines(value, margin + '  ')}" for name, value in content.items()]
    elif isinstance(content, list) and any(isinstance(value, dict | list) for value in content):
        inner = [_lines(value, margin + "  ") for value in content]
    else:
        return _plain(content)
    first, last = "{}" if isinstance(content, dict) else "[]"
    return f"{first}\n" + ",\n".join(f"{margin}  {entry}" for entry in inner) + f"\n{margin}{last}"


def _plain(content: Any) -> str:
    """JSON on one line; lone halves of characters, which names may hold and UTF-8 cannot, as their escapes."""
    return json.dumps(content, ensure_ascii=False).encode("utf-8", "backslashreplace").decode()
