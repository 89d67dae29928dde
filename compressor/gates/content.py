"""The gate's result as plain JSON, and back."""

import math
from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from compressor.errors import CompressionError
from compressor.gates.verdict import GateResult

FORMAT = "moe-compressor-gate/1"
NOT_FINITE = ("Infinity", "-Infinity", "NaN")  # as text, which Python's float() and JavaScript's Number() read
NAMES = {float: "a number", int: "a whole number", str: "text", bool: "true or false"}


def gate_content(result: GateResult) -> dict[str, Any]:
    """Everything in the result as plain JSON types; what JSON has no number for is text."""
    return {"format": FORMAT, **plain_json(asdict(result))}


def gate_from_content(content: Any) -> GateResult:
    """The result that `gate_content` was made of; further fields are left aside."""
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise CompressionError(f"it is no report of the gate in the format {FORMAT}")
    result: GateResult = _record(content, GateResult, "")
    return result


def plain_json(value: Any) -> Any:
    """Mappings, sequences and numbers as JSON has them, anything else as text."""
    if isinstance(value, Mapping):
        return {str(name): plain_json(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain_json(entry) for entry in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else _text(value)
    return value if value is None or isinstance(value, bool | int | str) else str(value)


def _text(value: float) -> str:
    return "NaN" if math.isnan(value) else NOT_FINITE[value < 0]


def _record(content: Any, kind: Any, where: str) -> Any:
    """A dataclass from an object with its fields; only those with a default may be missing."""
    if not isinstance(content, dict):
        raise _odd(content, "an object", where)
    hints, found = get_type_hints(kind), {}
    for entry in fields(kind):
        place = f"{where}.{entry.name}" if where else entry.name
        if entry.name in content:
            found[entry.name] = _value(content[entry.name], hints[entry.name], place)
        elif entry.default is MISSING and entry.default_factory is MISSING:
            raise CompressionError(f"{place} is missing")
    return kind(**found)


def _value(value: Any, hint: Any, where: str) -> Any:
    """A JSON value as the type that its field has."""
    origin, inner = get_origin(hint), get_args(hint)
    if hint is Any:
        return value
    if is_dataclass(hint):
        return _record(value, hint, where)
    if origin in (Union, UnionType):
        (kind,) = (each for each in inner if each is not NoneType)
        return None if value is None else _value(value, kind, where)
    if origin is Literal:
        if value not in inner:
            raise _odd(value, f"one of {', '.join(inner)}", where)
        return value
    if origin is tuple:
        return _tuple(value, inner, where)
    if origin is Mapping:
        if not isinstance(value, dict):
            raise _odd(value, "an object", where)
        return {name: _value(entry, inner[1], f"{where}.{name}") for name, entry in value.items()}
    if hint is float and (value in NOT_FINITE or type(value) is int):
        return float(value)
    if type(value) is not hint:
        raise _odd(value, NAMES[hint], where)
    return value


def _tuple(value: Any, kinds: tuple[Any, ...], where: str) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise _odd(value, "a list", where)
    if kinds[-1] is Ellipsis:
        kinds = kinds[:1] * len(value)
    if len(kinds) != len(value):
        raise _odd(value, f"a list of {len(kinds)}", where)
    return tuple(_value(entry, kind, f"{where}[{n}]") for n, (entry, kind) in enumerate(zip(value, kinds, strict=True)))


def _odd(value: Any, wanted: str, where: str) -> CompressionError:
    shown = repr(value)
    return CompressionError(f"{where} should be {wanted}, it is {shown if len(shown) < 80 else shown[:80] + ' ...'}")
