"""Plugins that packages announce by entry points; built-in ones are found in the same way."""

import inspect
import json
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator
from functools import lru_cache
from importlib.metadata import EntryPoint, EntryPoints, entry_points
from typing import Any, TypeVar

from compressor.errors import CompressionError, reason_of
from compressor.formatting import known_names

logger = logging.getLogger(__name__)

STRATEGIES = "moe_compressor.strategies"
EXPORTERS = "moe_compressor.exporters"
STEPS = "moe_compressor.steps"
PROTECTORS = "moe_compressor.protectors"
STATISTICS = "moe_compressor.statistics"
ROUTER_SHIFTS = "moe_compressor.router_shifts"
MODEL_FILES = "moe_compressor.model_files"
COMMANDS = "moe_compressor.commands"
FUNCTIONS = "moe_compressor.functions"
T = TypeVar("T")
KINDS = {
    STRATEGIES: "strategy",
    EXPORTERS: "exporter",
    STEPS: "step",
    PROTECTORS: "protector",
    STATISTICS: "statistic",
    ROUTER_SHIFTS: "router shift",
    MODEL_FILES: "kind of model file",
    COMMANDS: "command",
    FUNCTIONS: "function",
}


def _entries(group: str) -> EntryPoints:
    """Return the entry points of a group; the installed packages are read once, unless a folder
    with some changes."""
    folders = [path or "." for path in sys.path if os.path.isdir(path or ".")]
    stamps = tuple((folder, os.stat(folder).st_mtime_ns) for folder in folders)
    entries: EntryPoints = _installed(stamps).select(group=group)
    return entries


@lru_cache(maxsize=1)
def _installed(stamps: tuple[tuple[str, int], ...]) -> Any:
    return entry_points()


def names(group: str) -> list[str]:
    """Return the names of all plugins of a group."""
    return sorted({entry.name for entry in _entries(group)})


def packages() -> list[str]:
    """Top-level packages of all installed plugins, the built-in ones included."""
    top_level = set[str]()
    for group in KINDS:
        top_level.update(re.split(r"[.:]", entry.value)[0] for entry in _entries(group))
    return sorted(top_level)


def find(group: str, name: str, place: str = "") -> EntryPoint:
    """Return an entry point without loading it; refuses an unknown or ambiguous name."""
    kind = KINDS[group]
    offers = {entry.value: entry for entry in _entries(group) if entry.name == name}
    if not offers:
        where = f" at {place}" if place else ""
        raise CompressionError(
            f"there is no {kind} {name!r}{where}; {known_names(name, names(group))}"
        )
    value, *others = offers
    if others:
        raise CompressionError(
            f"two packages offer {name!r} in {group} ({value} and {others[0]}); uninstall one"
        )
    return offers[value]


def load(group: str, name: str, place: str = "") -> Any:
    """Return the object that an entry point names; refuses an unknown, ambiguous or broken one."""
    entry = find(group, name, place)
    try:
        return entry.load()
    except (Exception, SystemExit) as error:  # plugins raise any exception
        reason = f"{type(error).__name__}: {reason_of(error)}"
        raise CompressionError(
            f"{KINDS[group]} {name!r} ({entry.value}) cannot be imported: {reason}"
        ) from error


def load_only(group: str) -> Any:
    """Return what the one entry point of a group names; refuses several."""
    first, *others = names(group)
    if others:
        raise CompressionError(
            f"{first!r} and {others[0]!r} are two {KINDS[group]}s, of which one is used; uninstall "
            "the other"
        )
    return load(group, first)


def load_installed(group: str, name: str) -> Any:
    """Return what an entry point names; refuses one that says by `require_packages` that a package
    is missing."""
    plugin = load(group, name)
    if hasattr(plugin, "require_packages"):
        plugin.require_packages()
    return plugin


def kind_of_file(model: str) -> str | None:
    """Return which kind of model file a name's ending stands for, such as gguf; None for any
    other."""
    ending = model.rpartition(".")[2].lower()
    return ending if ending in names(MODEL_FILES) else None


def takes(function: Any, count: int) -> bool:
    """Return True if something can be called with this number of positional arguments, as far as is
    known."""
    try:
        inspect.signature(function).bind(*range(count))
    # what is not written in Python may have no signature: ValueError
    except (TypeError, ValueError) as error:
        return isinstance(error, ValueError)
    return True


def working(group: str, load: Callable[[str], T]) -> Iterator[T]:
    """Yield every plugin of a group that can be loaded; the others are named in a warning and left
    out."""
    for name in names(group):
        try:
            yield load(name)
        except CompressionError as error:
            logger.warning("%s; it is left out", error)


def read_option(text: str, message: str) -> tuple[str, Any]:
    """'steps=3' -> ('steps', 3): the value as JSON, or else as text; raises `CompressionError` with
    the `message`."""
    name, separator, value = text.partition("=")
    if not separator:
        raise CompressionError(message)
    try:
        return name.replace("-", "_"), json.loads(value)
    except ValueError:
        return name.replace("-", "_"), value
