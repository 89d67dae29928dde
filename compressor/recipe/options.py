"""Options of strategies and exporters: fields of a frozen dataclass, each with a default and a help text."""

import json
from collections.abc import Mapping
from dataclasses import MISSING, Field, field, fields, is_dataclass
from typing import Any, TypeVar

from compressor.errors import CompressionError, reason_of

T = TypeVar("T")


def option(default: T, help: str) -> T:
    """A field of an `Options` dataclass, with the text that tells users what it does."""
    made: T = field(default=default, metadata={"help": help})
    return made


def helps(options: Any) -> dict[str, str]:
    """Help texts of the options, a dataclass or one of its instances, that have one."""
    return {entry.name: entry.metadata["help"] for entry in _fields(options) if "help" in entry.metadata}


def defaults(options_class: Any) -> dict[str, Any]:
    """Options with their defaults."""
    return {
        entry.name: entry.default if entry.default_factory is MISSING else entry.default_factory()
        for entry in _fields(options_class)
    }


def make_options(what: str, options_class: Any, settings: Mapping[str, Any]) -> Any:
    """A plugin's options with these settings, None where it has none; `what` names it in a `CompressionError`."""
    if options_class is None:
        if settings:
            raise CompressionError(f"{what} has no option {min(settings)!r}; it has none")
        return None
    if not isinstance(options_class, type) or not is_dataclass(options_class):
        raise CompressionError(f"{what}: Options should be a frozen dataclass")
    known = defaults(options_class)
    if unknown := sorted(set(settings) - set(known)):
        raise CompressionError(f"{what} has no option {unknown[0]!r}; it has {', '.join(sorted(known))}")
    for name, default in known.items():
        value = settings.get(name, default)
        alike = type(value) is type(default) or (isinstance(default, float) and type(value) is int)
        if isinstance(default, bool | int | float | str) and not alike:  # one without a plain default checks itself
            raise CompressionError(f"{what}: option {name} is {value!r}, it should be like its default {default!r}")
    try:
        return options_class(**settings)
    except CompressionError:
        raise
    except Exception as error:  # a plugin checks its options as it likes
        raise CompressionError(f"{what} does not take these options: {reason_of(error)}") from error


def read_option(text: str, fault: str) -> tuple[str, Any]:
    """'steps=3' -> ('steps', 3): the value as JSON, or else as text; raises `CompressionError` with `fault`."""
    name, separator, value = text.partition("=")
    if not separator:
        raise CompressionError(fault)
    try:
        return name.replace("-", "_"), json.loads(value)
    except ValueError:
        return name.replace("-", "_"), value


def _fields(options: Any) -> tuple[Field[Any], ...]:
    return fields(options) if is_dataclass(options) else ()
