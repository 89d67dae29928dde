"""What packages offer through entry points, and its options: third parties' on equal terms with what is built in."""

import inspect
import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, field, fields, is_dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

from compressor.errors import CompressionError, reason_of
from compressor.formatting import known_names

logger = logging.getLogger(__name__)

STRATEGIES = "moe_compressor.strategies"
EXPORTERS = "moe_compressor.exporters"
STEPS = "moe_compressor.steps"
PROTECTORS = "moe_compressor.protectors"
STATISTICS = "moe_compressor.statistics"
T = TypeVar("T")
KINDS = {
    STRATEGIES: "strategy",
    EXPORTERS: "exporter",
    STEPS: "step",
    PROTECTORS: "protector",
    STATISTICS: "statistic",
}


def _entries(group: str) -> dict[str, dict[str, EntryPoint]]:
    """Entry points by name and value, as two packages may offer one name."""
    offered: dict[str, dict[str, EntryPoint]] = {}
    for entry in entry_points(group=group):
        offered.setdefault(entry.name, {})[entry.value] = entry
    return offered


def names(group: str) -> list[str]:
    return sorted(_entries(group))


def packages() -> list[str]:
    """Top-level packages of all installed plugins, the built-in ones included."""
    offered = [value for group in KINDS for entries in _entries(group).values() for value in entries]
    return sorted({re.split(r"[.:]", value)[0] for value in offered})


def load(group: str, name: str, place: str = "") -> Any:
    """What stands behind a name; raises `CompressionError` for one that is unknown, offered twice or broken."""
    offered, what = _entries(group), KINDS[group]
    if name not in offered:
        where, more = f" at {place}" if place else "", "" if offered else " (is the package installed?)"
        raise CompressionError(f"there is no {what} {name!r}{where}; {known_names(name, sorted(offered))}{more}")
    value, *others = offered[name]
    if others:
        raise CompressionError(f"two packages offer {name!r} in {group} ({value} and {others[0]}); uninstall one")
    try:
        return offered[name][value].load()
    except (Exception, SystemExit) as error:  # a plugin runs what it likes
        reason = str(error) if isinstance(error, ImportError) else f"{type(error).__name__}: {reason_of(error)}"
        raise CompressionError(f"{what} {name!r} ({value}) cannot be imported: {reason}") from error


def takes(function: Any, count: int) -> bool:
    """Return True if something can be called with so many positional arguments, as far as that is known."""
    try:
        inspect.signature(function).bind(*range(count))
    except (TypeError, ValueError) as error:  # what is not written in Python may have no signature: ValueError
        return isinstance(error, ValueError)
    return True


def optional(module: Any, name: str, what: str) -> Callable[..., Any] | None:
    """An optional function of a plugin; one that cannot be called is refused."""
    found = getattr(module, name, None)
    if found is not None and not callable(found):
        raise CompressionError(f"{what} is no plugin: {name} should be a function, not {type(found).__name__}")
    return found


def working(group: str, load: Callable[[str], T]) -> Iterator[T]:
    """What can be loaded of a group, by name; anything else is named in a warning and left out."""
    for name in names(group):
        try:
            yield load(name)
        except CompressionError as error:
            logger.warning("%s; it is left out", error)


def option(default: T, help: str, choices: Iterable[T] = ()) -> T:
    """A field of an `Options` dataclass, with the text that tells users what it does, and its values if few."""
    option: T = field(default=default, metadata={"help": help, "choices": tuple(choices)})
    return option


def defaults(options_class: Any) -> dict[str, Any]:
    return {
        entry.name: entry.default if entry.default_factory is MISSING else entry.default_factory()
        for entry in (fields(options_class) if is_dataclass(options_class) else ())
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
    for entry in fields(options_class):
        name, default, choices = entry.name, known[entry.name], entry.metadata.get("choices")
        value = settings.get(name, default)
        alike = type(value) is type(default) or (isinstance(default, float) and type(value) is int)
        if isinstance(default, bool | int | float | str) and not alike:  # one without a plain default checks itself
            raise CompressionError(f"{what}: option {name} is {value!r}, it should be like its default {default!r}")
        if choices and name in settings and value not in choices:
            raise CompressionError(f"there is no {name} {value!r}; known are {', '.join(map(str, choices))}")
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
