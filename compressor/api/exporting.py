"""Formats beside safetensors: exporters that are installed, the built-in ONNX one and those of third parties alike."""

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from compressor.errors import CompressionError, reason_of
from compressor.files import full_disk_told, refuse_linked_folder, replace_folder
from compressor.planning.options import defaults
from compressor.planning.registry import Exporter, exporter_names, exporter_options, load_exporter
from compressor.progress import Progress
from compressor.words import did_you_mean

WRITER = "safetensors"  # what `compress` writes, and what every exporter reads


def find_exporter(name: str) -> Exporter:
    """The installed exporter of that name, its packages too; raises `CompressionError` for what is none."""
    if name == WRITER:
        raise CompressionError(f"--format {WRITER} is what compress writes and export reads; name another format")
    if name not in (known := exporter_names()):
        hint = did_you_mean(name, known)
        raise CompressionError(f"--format {name!r} is not known; {hint}installed are {', '.join(known)}")
    module: Exporter = load_exporter(name)
    if callable(required := getattr(module, "require_packages", None)):
        required()
    return module


def export_checkpoint(
    name: str, checkpoint: Path, output: Path, settings: Mapping[str, Any], overwrite: bool, progress: Progress
) -> Any:
    """Run an exporter; returns what it says of its work. `output` is there whole or not at all."""
    module = find_exporter(name)
    if "overwrite" in defaults(getattr(module, "Options", None)):
        options = exporter_options(name, {**settings, "overwrite": overwrite})
        return module.export(checkpoint, output, options, progress)
    options = exporter_options(name, settings)
    load_exporter(WRITER).check_target(output, overwrite)
    with _hidden(output, name) as fresh:
        shutil.rmtree(fresh, ignore_errors=True)  # of a run that was killed
        try:
            with full_disk_told(output.parent):
                summary = module.export(checkpoint, fresh, options, progress)
        except (CompressionError, OSError):
            raise
        except Exception as error:  # of a third party's kind
            raise CompressionError(f"exporter {name!r} failed: {type(error).__name__}: {reason_of(error)}") from error
        if not fresh.is_dir():
            raise CompressionError(f"exporter {name!r} wrote no folder; it should write one at the place it is given")
        with _hidden(output, f"{name}.old") as old:
            shutil.rmtree(old, ignore_errors=True)
            load_exporter(WRITER).check_target(output, overwrite)  # which may have come or changed meanwhile
            replace_folder(fresh, output, old)
    return _in_place(summary, fresh, output)


def _in_place(summary: Any, fresh: Path, output: Path) -> Any:
    """What an exporter says of its work, with the folder that it was given named as it is called now."""
    if not is_dataclass(summary) or isinstance(summary, type):
        return summary
    said = {entry.name: getattr(summary, entry.name) for entry in fields(summary) if entry.init}
    moved = {name: type(value)(output) for name, value in said.items() if value in (fresh, str(fresh))}
    return replace(summary, **moved) if moved else summary


@contextmanager
def _hidden(output: Path, name: str) -> Iterator[Path]:
    """The name of a hidden folder beside the output, which is gone in the end."""
    place = output.absolute().with_name(f".{output.name}.{name}")
    refuse_linked_folder(place)
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
