"""Formats beside safetensors: exporters that are installed, the built-in ONNX one and those of third parties alike."""

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from compressor.distributed import ranks
from compressor.errors import CompressionError, reason_of
from compressor.files import alone, new_folder
from compressor.progress import Progress
from compressor.recipe.registry import Exporter, exporter_options, load_exporter
from compressor.run_record import PACKAGES, answers, record_request, report_in_place, request_key, stamp, versions
from compressor.steps.workdir import check_target

WRITER = "safetensors"  # what `compress` writes, and what every exporter reads


def find_exporter(name: str) -> Exporter:
    """The installed exporter of that name, its packages too; raises `CompressionError` for what is none."""
    if name == WRITER:
        raise CompressionError(f"--format {WRITER} is what compress writes and export reads; name another format")
    module: Exporter = load_exporter(name)
    if callable(required := getattr(module, "require_packages", None)):
        required()
    return module


def export_checkpoint(
    name: str, checkpoint: Path, output: Path, settings: Mapping[str, Any], overwrite: bool, progress: Progress
) -> Any:
    """Run an exporter and return its summary. `output` is there whole or not at all.

    Where the output of this very export is in place already, nothing is written.
    """
    module, options = find_exporter(name), exporter_options(name, settings)
    packages = getattr(module, "PACKAGES", PACKAGES)
    key = request_key(name, settings, str(checkpoint.resolve()), stamp(checkpoint), versions(packages))
    with alone(output):
        if not overwrite and answers(output, key):
            report_in_place(output)
            read = getattr(module, "read_summary", None)
            return read(output) if callable(read) else None
        with new_folder(output, partial(check_target, output, overwrite)) as fresh:
            fresh.rmdir()  # which the exporter makes
            try:
                summary = module.export(checkpoint, fresh, options, progress)
            except (CompressionError, OSError):
                raise
            except Exception as error:  # a third party's exporter raises what it likes
                fault = f"{type(error).__name__}: {reason_of(error)}"
                raise CompressionError(f"exporter {name!r} failed: {fault}") from error
            if not fresh.is_dir():
                raise CompressionError(
                    f"exporter {name!r} wrote no folder; it should write one at the place it is given"
                )
            record_request(fresh, key)
    if not is_dataclass(summary) or isinstance(summary, type):
        return summary
    values = {entry.name: getattr(summary, entry.name) for entry in fields(summary) if entry.init}
    moved = {field: type(value)(output) for field, value in values.items() if value in (fresh, str(fresh))}
    return replace(summary, **moved) if moved else summary


def read_formats(formats: Sequence[str]) -> tuple[str, ...]:
    """What `compress` is to write, each name once and installed."""
    unique = tuple(dict.fromkeys(formats))
    for name in unique:
        if name != WRITER:
            find_exporter(name)
    if WRITER not in unique and len(unique) > 1:
        raise CompressionError(
            f"--format {','.join(unique)} writes two formats to one folder; add {WRITER} or name one"
        )
    return unique


def additions(formats: Sequence[str], progress: Progress) -> Callable[[Path], None] | None:
    """Return what has the first rank export an output that is about to be put in place; None without other formats.

    Beside safetensors, exports lie in subfolders; without it, the export takes the place of its input.
    """
    others = [name for name in formats if name != WRITER]

    def export(folder: Path) -> None:
        if WRITER in formats:
            for name in others:
                export_checkpoint(name, folder, folder / name, {}, False, progress)
            return
        other = folder.with_name(others[0])
        shutil.rmtree(other, ignore_errors=True)  # of a run that was killed
        export_checkpoint(others[0], folder, other, {}, False, progress)
        shutil.rmtree(folder)
        other.replace(folder)

    return (lambda folder: ranks().broadcast(lambda: export(folder))) if others else None
