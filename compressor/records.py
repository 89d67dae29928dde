"""JSON files, and dataclasses as JSON there and back: an error names the field that does not
fit."""

import gzip
import json
import math
import sys
import zlib
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import lru_cache, partial
from importlib.resources.abc import Traversable
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel, TypeAdapter, ValidationError

from compressor.errors import CompressionError, reason_of

# as text, which Python's float() and JavaScript's Number() read
NOT_FINITE = ("Infinity", "-Infinity", "NaN")
NAMES = {float: "a number", int: "a whole number", str: "text", bool: "true or false"}
RESTORE = "restore the file from its source"
LARGEST = sys.float_info.max
WHOLE = 2**63 - 1  # the largest whole number that 64 bits hold
MOST_BYTES = 2**27  # of a file that is read as a whole, unpacked

Record = TypeVar("Record")
Finite = Annotated[float, (-LARGEST, LARGEST)]  # a field of a record, with its bounds
Share = Annotated[float, (0, 1)]
Count = Annotated[int, (0, WHOLE)]
_hints = lru_cache(partial(get_type_hints, include_extras=True))


def read_data(path: Path | Traversable, most: int = MOST_BYTES) -> bytes:
    """Return the bytes of a file, unpacked if it is named .gz; raises `CompressionError` for more
    than `most`."""
    is_packed = path.name.endswith(".gz")
    with path.open("rb") as raw:
        stream = gzip.GzipFile(fileobj=raw) if is_packed else raw
        data: bytes = stream.read(most + 1)
    if len(data) > most:
        raise CompressionError(
            f"{path} holds more than {most:,} bytes, too many for what it should be; name another"
        )
    return data


def read_json(path: Path, hint: str, unreadable: str | None = None, most: int = MOST_BYTES) -> Any:
    """Return the JSON in a file; raises `CompressionError` for other text, and for no file if a
    remedy is given."""
    try:
        return json.loads(read_data(path, most).decode("utf-8-sig"))
    except (ValueError, RecursionError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise CompressionError(f"{path} is not valid JSON ({reason_of(error)}); {hint}") from error
    except OSError as error:
        if unreadable is None:
            raise
        raise CompressionError(f"{path} cannot be read ({error.strerror}); {unreadable}") from error


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in one of a checkpoint's files; raises `CompressionError` for anything
    else."""
    content = read_json(path, RESTORE)
    if not isinstance(content, dict):
        raise CompressionError(f"{path} should hold a JSON object; {RESTORE}")
    return content


def spelled(value: float) -> float | str:
    """Return a number, or the word for what JSON has no number for."""
    if math.isfinite(value):
        return float(value)
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"


def finite(value: float) -> float | None:
    """Return a number, or None for what JSON has no number for."""
    return float(value) if math.isfinite(value) else None


def plain_json(value: Any, number: Callable[[float], Any] = spelled) -> Any:
    """Return dataclasses, mappings, sequences and, by `number`, numbers as JSON has them; anything
    else as text."""
    if isinstance(value, float):
        return number(value)
    if isinstance(value, BaseModel):
        value = dict(value)
    if isinstance(value, Mapping):
        return {str(name): plain_json(entry, number) for name, entry in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain_json(entry, number) for entry in value]
    if is_dataclass(value):
        return {
            entry.name: plain_json(getattr(value, entry.name), number) for entry in fields(value)
        }
    return value if value is None or isinstance(value, bool | int | str) else str(value)


def number(
    value: Any, where: str, least: float = -LARGEST, most: float = LARGEST, whole: bool = False
) -> Any:
    """Return a finite number from `least` to `most`, or a whole one; raises `CompressionError` for
    anything else.

    Text is no number, nor is true; `where` names the value.
    """
    kind = int if whole else float
    if type(value) not in (int, kind) or not least <= value <= most:
        bounds = ""
        if type(value) in (int, kind) and least > -WHOLE:
            bounds = f" from {least:g} to {most:g}" if most < WHOLE else f" of at least {least:g}"
        raise _misfit(value, NAMES[kind] + bounds, where)
    return value


def read_as(kind: type[Record], content: Any, where: str = "", closed: bool = False) -> Record:
    """Return a dataclass from a JSON object with its fields; those with a default may be missing.

    Further fields are left aside, or refused where the object is `closed`; `where` is the object's
    name, or a file's with ": ". Raises `CompressionError` naming the first field that is missing,
    unknown or of another type; true is no whole number."""
    hints = _hints(kind)  # type: ignore[arg-type]
    known = ", ".join(sorted(hints))
    if not isinstance(content, dict):
        raise _misfit(content, f"an object with {known}" if closed else "an object", where)
    unknown = sorted(set(content) - set(hints))
    if closed and unknown:
        subject = f"{where.removesuffix(': ')} has an " if where else ""
        raise CompressionError(f"{subject}unknown field {unknown[0]!r}; known are {known}")
    values = {}
    prefix = where if not where or where.endswith(" ") else f"{where}."
    for entry in fields(kind):  # type: ignore[arg-type]
        name = prefix + entry.name
        if entry.name in content:
            values[entry.name] = value_as(content[entry.name], hints[entry.name], name, closed)
        elif entry.default is MISSING and entry.default_factory is MISSING:
            raise CompressionError(f"{name} is missing{'; restore it' if closed else ''}")
    return kind(**values)


def check_fields(record: Any) -> None:
    """Check a dataclass by the types and pydantic bounds of its fields; a `CompressionError` names
    the first misfit."""
    for name, hint in get_type_hints(type(record), include_extras=True).items():
        value = getattr(record, name)
        try:
            TypeAdapter(hint).validate_python(value)
        except ValidationError as error:
            message = error.errors(include_url=False)[0]["msg"]
            raise CompressionError(
                f"{name} is {value}; {message[0].lower()}{message[1:]}"
            ) from error


def value_as(value: Any, hint: Any, where: str, closed: bool = False) -> Any:
    """Return a JSON value as the type that its field has; `where` names it in a
    `CompressionError`."""
    origin = get_origin(hint)
    inner = get_args(hint)
    if hint is Any:
        return value
    if is_dataclass(hint):
        kind: Any = hint
        return value if isinstance(value, kind) else read_as(kind, value, where, closed)
    if origin in (Union, UnionType):
        options = [option for option in inner if option is not NoneType]
        kind = type(value) if type(value) in options else options[0]
        return None if value is None else value_as(value, kind, where, closed)
    if origin is Literal:
        if value not in inner:
            raise _misfit(value, f"one of {', '.join(inner)}", where)
        return value
    if origin is tuple:
        if not isinstance(value, list):
            raise _misfit(value, "a list", where)
        kinds = inner[:1] * len(value) if inner[-1] is Ellipsis else inner
        if len(kinds) != len(value):
            raise _misfit(value, f"a list of {len(kinds)}", where)
        pairs = enumerate(zip(value, kinds, strict=True))
        return tuple(
            value_as(entry, kind, f"{where}[{number}]", closed) for number, (entry, kind) in pairs
        )
    if origin is Mapping:
        if not isinstance(value, dict):
            raise _misfit(value, "an object", where)
        return {
            name: value_as(entry, inner[1], f"{where}.{name}", closed)
            for name, entry in value.items()
        }
    if origin is Annotated:
        if not isinstance(inner[1], tuple):
            return value_as(value, inner[0], where, closed)
        least, most = inner[1]
        return inner[0](number(value, where, least, most, whole=inner[0] is int))
    if hint is float:
        return float(value if value in NOT_FINITE else number(value, where))
    if hint is int:
        return number(value, where, -WHOLE, WHOLE, whole=True)
    if type(value) is not hint:
        raise _misfit(value, NAMES[hint], where)
    return value


def _misfit(value: Any, wanted: str, where: str) -> CompressionError:
    shown = "null" if value is None else repr(value)
    if len(shown) >= 80:
        shown = f"{shown[:80]} ..."
    return CompressionError(f"{where} should be {wanted}, it is {shown}")


def report_json(content: Any, indent: int | None = 2) -> str:
    """Return the JSON of a report; raises `ValueError` for numbers that JSON cannot write."""
    return json.dumps(content, indent=indent, ensure_ascii=False, allow_nan=False) + "\n"


def readable_json(content: Mapping[str, Any]) -> str:
    """Return indented JSON in which lists of plain values stand on one line, so that a person can
    read it."""
    as_json = json.loads(json.dumps(content))  # lists for tuples, text for keys
    return _lines(as_json, "") + "\n"


def _lines(content: Any, margin: str) -> str:
    if isinstance(content, dict) and content:
        inner = [
            f"{_plain(name)}: {_lines(value, margin + '  ')}" for name, value in content.items()
        ]
    elif isinstance(content, list) and any(isinstance(value, dict | list) for value in content):
        inner = [_lines(value, margin + "  ") for value in content]
    else:
        return _plain(content)
    first, last = "{}" if isinstance(content, dict) else "[]"
    return f"{first}\n" + ",\n".join(f"{margin}  {entry}" for entry in inner) + f"\n{margin}{last}"


def _plain(content: Any) -> str:
    """Return JSON on one line; lone halves of characters, which names may hold and UTF-8 cannot, as
    their escapes."""
    return json.dumps(content, ensure_ascii=False).encode("utf-8", "backslashreplace").decode()
