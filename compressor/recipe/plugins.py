"""Finding and loading what other packages offer through entry points: on equal terms with what is built in."""

import inspect
import os
import sys
from collections.abc import Callable
from functools import lru_cache
from importlib.metadata import EntryPoint, EntryPoints, entry_points
from typing import Any

from compressor.errors import CompressionError, reason_of
from compressor.words import did_you_mean

STRATEGIES = "moe_compressor.strategies"
EXPORTERS = "moe_compressor.exporters"
STEPS = "moe_compressor.steps"
KINDS = {STRATEGIES: "strategy", EXPORTERS: "exporter", STEPS: "step"}


def _changed(folder: str) -> int:
    """When a folder changed last, in nanoseconds; 0 for what is none."""
    try:
        return os.stat(folder or ".").st_mtime_ns
    except OSError:
        return 0


@lru_cache(maxsize=len(KINDS))
def _scanned(group: str, folders: tuple[tuple[str, int], ...]) -> EntryPoints:
    return entry_points(group=group)


def _installed(group: str) -> EntryPoints:
    """What all installed packages offer in a group; it is read again when a folder of packages has changed."""
    return _scanned(group, tuple((folder, _changed(folder)) for folder in sys.path))


def _entries(group: str) -> dict[str, dict[str, EntryPoint]]:
    """Entry points by name and by what they stand for: two packages may offer one name."""
    found: dict[str, dict[str, EntryPoint]] = {}
    for entry in _installed(group):
        found.setdefault(entry.name, {})[entry.value] = entry
    return found


def names(group: str) -> list[str]:
    """Names offered in an entry-point group."""
    return sorted(_entries(group))


def packages() -> list[str]:
    """Top-level packages of all installed plugins, the built-in ones included."""
    entries = [entry for group in KINDS for entry in _installed(group)]
    return sorted({entry.module.partition(".")[0] for entry in entries})


def load(group: str, name: str) -> Any:
    """What stands behind a name; raises `CompressionError` for one that is unknown, offered twice or broken."""
    offered, what = _entries(group), KINDS[group]
    if name not in offered:
        raise CompressionError(
            f"there is no {what} {name!r}; {did_you_mean(name, offered)}known are "
            f"{', '.join(sorted(offered)) or 'none (is the package installed?)'}"
        )
    value, *others = offered[name]
    if others:
        raise CompressionError(f"two packages offer {name!r} in {group} ({value} and {others[0]}); uninstall one")
    try:
        return offered[name][value].load()
    except ImportError as error:
        raise CompressionError(f"{what} {name!r} ({value}) cannot be imported: {error}") from error
    except (Exception, SystemExit) as error:  # a plugin runs what it likes
        raise CompressionError(
            f"{what} {name!r} ({value}) cannot be imported: {type(error).__name__}: {reason_of(error)}"
        ) from error


def takes(function: Any, count: int) -> bool:
    """Whether something can be called with so many positional arguments, as far as that can be told."""
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
