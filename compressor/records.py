"""JSON files, and records as JSON there and back: an error names the field that does not fit."""

import gzip
import json
import math
import reprlib
import zlib
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import Field, FiniteFloat, TypeAdapter, ValidationError
from pydantic_core import (
    ErrorDetails,
    PydanticCustomError,
    SchemaValidator,
    core_schema,
    to_jsonable_python,
)

from compressor.errors import CompressionError, reason_of
from compressor.formatting import known_names

# as text, which Python's float() and JavaScript's Number() read
NOT_FINITE = ("Infinity", "-Infinity", "NaN")
RESTORE = "restore the file from its source"
WHOLE = 2**63 - 1  # the largest whole number that 64 bits hold
MOST_BYTES = 2**27  # of a file that is read as a whole, unpacked
SHOWN = 80  # characters of a value in a sentence
# what a value should be, by pydantic's name of its fault
WANTED = {
    "bool_type": "true or false",
    "dataclass_type": "an object",
    "dict_type": "an object",
    "finite_number": "a number",
    "float_parsing": "a number",
    "fraction_parsing": "a fraction",
    "float_type": "a number",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
    "int_type": "a whole number",
    "mapping_type": "an object",
    "string_type": "text",
    "tuple_type": "a list",
}
# which pydantic adds to the place of a value
KINDS = ("int", "str", "float")
INNER = ("function-", "tuple", "constrained", "literal[")

Record = TypeVar("Record")
Json = Mapping[str, Any]  # an object
Finite = FiniteFloat
Share = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=0, le=WHOLE)]


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


def finite(value: float) -> float | None:
    """Return a number, or None for what JSON has no number for."""
    return float(value) if math.isfinite(value) else None


def plain_json(value: Any, named: bool = True) -> Any:
    """Return records, mappings and sequences as JSON has them, and anything else as text.

    Infinity and NaN, which it has not, are their names, or None unless they are to be `named`."""
    plain = to_jsonable_python(value, fallback=str)
    return json.loads(json.dumps(plain), parse_constant=lambda name: name if named else None)


def read_as(kind: type[Record], content: Any, where: str = "", closed: bool = False) -> Record:
    """Return a record from a JSON object with its fields; those with a default may be missing.

    Further fields are left aside, or refused where the object is `closed`."""
    record: Record = value_as(content, kind, where, closed)
    return record


def value_as(value: Any, hint: Any, where: str, closed: bool = False) -> Any:
    """Return a JSON value as a type has it.

    `where` is its name, or a file's with ": ". Raises `CompressionError` naming the first field
    that is missing, unknown or of another type; true is no whole number."""
    try:
        return _validator(hint, closed).validate_python(value)
    except ValidationError as error:
        raise CompressionError(fault_of(error, where)) from error


@lru_cache
def _validator(hint: Any, closed: bool) -> SchemaValidator:
    return SchemaValidator(_strict(TypeAdapter(hint).core_schema, closed))


def _strict(schema: Any, closed: bool) -> Any:
    """Return the schema of a type without what pydantic makes of values beside JSON's tuples, which
    are lists: no text or switch is a number."""
    if isinstance(schema, list):
        return [_strict(entry, closed) for entry in schema]
    if not isinstance(schema, dict):
        return schema
    strict = {name: _strict(entry, closed) for name, entry in schema.items()}
    kind = schema.get("type")
    if kind in ("bool", "int", "float"):
        strict["strict"] = True
    if kind == "int":
        strict.setdefault("ge", -WHOLE)
        strict.setdefault("le", WHOLE)
    if kind == "float":
        strict["allow_inf_nan"] = False
    if schema == {"type": "float"}:
        return core_schema.no_info_wrap_validator_function(
            lambda value, number: float(value) if value in NOT_FINITE else number(value), strict
        )
    if kind == "dataclass-args" and closed:
        names = sorted(entry["name"] for entry in schema["fields"])
        return core_schema.no_info_before_validator_function(partial(_known_only, names), strict)
    return strict


def _known_only(names: Sequence[str], content: Any) -> Any:
    for name in content if isinstance(content, dict) else ():
        if name not in names:
            fault = f"has an unknown field {reprlib.repr(name)}; {known_names(str(name), names)}"
            raise PydanticCustomError("unknown", "{fault}", {"fault": fault})
    return content


def fault_of(error: ValidationError, where: str) -> str:
    """Return the first fault in a sentence that begins with its place: `where`, which is a name or
    ends with ": ", and below it the error's own."""
    fault, *others = error.errors(include_url=False)
    place = _place(fault, where)
    subject = place.removesuffix(": ") or "it"
    if fault["type"] == "missing":
        return f"{subject} is missing; add it"
    if fault["type"] == "unknown":
        return f"{subject} {fault['msg']}"
    if fault["type"] == "extra_forbidden":
        return f"{subject} is not known; take it out"
    if fault["type"] == "value_error":  # which names its place
        return where + fault["msg"].removeprefix("Value error, ")
    value = fault["input"]
    shown = "null" if value is None else repr(value)
    if len(shown) >= SHOWN:
        shown = f"{shown[:SHOWN]} ..."
    should = _should(fault)
    for other in others:  # of a value of several kinds
        before, _, kind = _should(other).partition("should be ")
        if kind and not before and kind not in should and _place(other, where) == place:
            should += f", or {kind}"
    return f"{subject} {should}, it is {shown}"


def _place(fault: ErrorDetails, where: str) -> str:
    place = where
    for part in fault["loc"]:
        if isinstance(part, int):
            place += f"[{part}]"
        elif part not in KINDS and not part.startswith(INNER):
            place += part if not place or place.endswith(" ") else f".{part}"
    return place


def _should(fault: ErrorDetails) -> str:
    wanted = WANTED.get(fault["type"])
    return f"should be {wanted}" if wanted else fault["msg"].partition(" ")[2]


def report_json(content: Any, indent: int | None = 2) -> str:
    """Return the JSON of a report; raises `ValueError` for numbers that JSON cannot write."""
    return json.dumps(content, indent=indent, ensure_ascii=False, allow_nan=False) + "\n"


def readable_json(content: Json) -> str:
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
