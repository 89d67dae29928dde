"""Formats beside safetensors: exporters that are installed, the built-in ONNX one and those of third parties alike."""

import difflib
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, Protocol

from compressor.errors import CompressionError, reason_of
from compressor.planning.registry import EXPORTERS, load_exporter, names
from compressor.progress import Progress

WRITER = "safetensors"  # what `compress` writes, and what every exporter reads


class Exporter(Protocol):
    """A module that the entry-point group moe_compressor.exporters names.

    It may have a frozen dataclass `Options`, whose instance `export` gets (None without one), and a function
    `require_packages()` that raises `CompressionError` where an optional package is missing. With an option `overwrite`
    it puts its output in place itself; otherwise `output` is a new hidden folder that is renamed when `export` returns.
    """

    def export(self, checkpoint: Path, output: Path, options: Any, progress: Progress) -> Any:
        """Write the checkpoint in a folder to the folder `output`; what it returns may be None or a dataclass."""


def find_exporter(name: str) -> Exporter:
    """The installed exporter of that name, its packages too; raises `CompressionError` for what is none."""
    if name == WRITER:
        raise CompressionError(f"--format {WRITER} is what compress writes and export reads; name another format")
    if name not in (known := names(EXPORTERS)):
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise CompressionError(f"--format {name!r} is not known; {hint}installed are {', '.join(known)}")
    module: Exporter = load_exporter(name)
    if not callable(getattr(module, "export", None)):
        raise CompressionError(f"exporter {name!r} has no function export(checkpoint, output, options, progress)")
    if callable(required := getattr(module, "require_packages", None)):
        required()
    return module


def _options_class(module: Exporter) -> Any:
    return getattr(module, "Options", None) or getattr(module, "ExportOptions", None)


def read_options(name: str, module: Exporter, settings: Mapping[str, Any]) -> Any:
    """An exporter's `Options` with these settings, or None if it has none and none is set."""
    kind = _options_class(module)
    known = sorted(entry.name for entry in fields(kind)) if kind is not None and is_dataclass(kind) else []
    if unknown := sorted(set(settings) - set(known)):
        raise CompressionError(f"exporter {name!r} has no option {unknown[0]!r}; it has {', '.join(known) or 'none'}")
    try:
        return None if kind is None else kind(**settings)
    except (TypeError, ValueError) as error:
        raise CompressionError(f"exporter {name!r} cannot take these options: {reason_of(error)}") from error


def export_checkpoint(
    name: str, checkpoint: Path, output: Path, settings: Mapping[str, Any], overwrite: bool, progress: Progress
) -> Any:
    """Run an exporter; returns what it says of its work. `output` is there whole or not at all."""
    module = find_exporter(name)
    writer, kind = load_exporter(WRITER), _options_class(module)
    if kind is not None and is_dataclass(kind) and "overwrite" in {entry.name for entry in fields(kind)}:
        options = read_options(name, module, {**settings, "overwrite": overwrite})
        return module.export(checkpoint, output, options, progress)
    options = read_options(name, module, settings)
    writer.check_target(output, overwrite)
    with _hidden(output, name) as fresh:
        shutil.rmtree(fresh, ignore_errors=True)  # of a run that was killed
        try:
            summary = module.export(checkpoint, fresh, options, progress)
        except (CompressionError, OSError):
            raise
        except Exception as error:  # of a third party's kind
            raise CompressionError(f"exporter {name!r} failed: {type(error).__name__}: {reason_of(error)}") from error
        if not fresh.is_dir():
            raise CompressionError(f"exporter {name!r} wrote no folder; it should write one at the place it is given")
        if output.is_dir():
            shutil.rmtree(output)
        fresh.rename(output)
    return summary


@contextmanager
def _hidden(output: Path, name: str) -> Iterator[Path]:
    """The name of a hidden folder beside the output, which is gone in the end."""
    place = output.absolute().with_name(f".{output.name}.{name}")
    try:
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)


def read_formats(formats: Sequence[str]) -> tuple[str, ...]:
    """What `compress` is to write, each name once and installed."""
    found = tuple(dict.fromkeys(formats))
    for name in found:
        if name != WRITER:
            find_exporter(name)
    if WRITER not in found and len(found) > 1:
        raise CompressionError(f"--format {','.join(found)} writes two formats to one folder; add {WRITER} or name one")
    return found


def beside(formats: Sequence[str], progress: Progress) -> Callable[[Path], None] | None:
    """What puts exports into subfolders of an output that is about to be put in place; None if none is asked for."""
    others = [name for name in formats if name != WRITER]

    def add(folder: Path) -> None:
        for name in others:
            export_checkpoint(name, folder, folder / name, {}, False, progress)

    return add if others else None


@contextmanager
def alone(name: str, output: Path, overwrite: bool, progress: Progress) -> Iterator[Path]:
    """A hidden folder for the safetensors output, which is exported to `output` and removed in the end."""
    find_exporter(name)
    load_exporter(WRITER).check_target(output, overwrite)
    with _hidden(output, WRITER) as between:
        yield between
        export_checkpoint(name, between, output, {}, overwrite, progress)
