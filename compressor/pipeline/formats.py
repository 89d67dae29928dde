"""Formats beside safetensors: exporters that are installed, the built-in ONNX one and those of
third parties alike."""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from compressor.checkpoint.reader import INDEX_NAME, SINGLE_NAME
from compressor.entry_points import EXPORTERS, working
from compressor.errors import CompressionError, reason_of
from compressor.files import lock_output, new_folder
from compressor.progress import Progress
from compressor.recipe.recipe import MONE, SAFETENSORS, Recipe
from compressor.recipe.registry import exporter_options, load_exporter
from compressor.run_record import (
    PACKAGES,
    answers,
    record_request,
    report_in_place,
    request_key,
    stamp,
    versions,
)
from compressor.steps.workdir import check_target

PUBLISHING = ("FILES", "check_export", "card_blocks")  # of exports that can be pushed


def find_exporter(name: str) -> Any:
    """Return the installed exporter of that name; raise `CompressionError` if there is none or it
    lacks a package."""
    if name == SAFETENSORS:
        raise CompressionError(
            f"--format {SAFETENSORS} is what compress writes and export reads; name another format"
        )
    module = load_exporter(name)
    require_packages = getattr(module, "require_packages", None)
    if require_packages is not None:
        require_packages()
    return module


@contextmanager
def wrap_exporter(name: str) -> Iterator[None]:
    """Turn what an exporter raises, which may be any exception, into one sentence that names it."""
    try:
        yield
    except (CompressionError, OSError):
        raise
    except Exception as error:
        message = f"{type(error).__name__}: {reason_of(error)}"
        raise CompressionError(f"exporter {name!r} failed: {message}") from error


def export_checkpoint(
    name: str,
    checkpoint: Path,
    output: Path,
    settings: Mapping[str, Any],
    overwrite: bool,
    progress: Progress,
) -> Any:
    """Run an exporter and return its summary; `output` is complete or absent.

    If the output of this very export is in place already, nothing is written.
    """
    module = find_exporter(name)
    options = exporter_options(name, settings)
    packages = getattr(module, "PACKAGES", PACKAGES)
    key = request_key(
        name, settings, str(checkpoint.resolve()), stamp(checkpoint), versions(packages)
    )
    read_summary = getattr(module, "read_summary", None)
    with lock_output(output):
        if not overwrite and answers(output, key):
            report_in_place(output)
            return None if read_summary is None else read_summary(output)
        with new_folder(output, partial(check_target, output, overwrite)) as fresh:
            fresh.rmdir()  # the exporter makes it
            with wrap_exporter(name):
                summary = module.export(checkpoint, fresh, options, progress)
            if not fresh.is_dir():
                raise CompressionError(
                    f"exporter {name!r} wrote no folder; it should make the one that it is given"
                )
            record_request(fresh, key)
    return summary if read_summary is None else read_summary(output)


def published_formats() -> list[tuple[str, Any]]:
    """Return names and modules of the exporters whose exports can be pushed."""
    published = []
    for name, exporter in working(EXPORTERS, lambda name: (name, load_exporter(name))):
        if all(hasattr(exporter, member) for member in PUBLISHING):
            published.append((name, exporter))
    return published


def exports_in(folder: Path) -> dict[str, tuple[str, Any]]:
    """Return names and modules of exporters by the sub-folder, '' for the folder itself, in which
    their exports lie; part of one counts, but not beside weights."""
    has_weights = any((folder / name).exists() for name in (INDEX_NAME, SINGLE_NAME))
    exports = {}
    for name, exporter in published_formats():
        for inner in ("", name):
            known = [(folder / inner / file).exists() for file in exporter.FILES]
            if any(known) and (known[-1] or inner or not has_weights):
                exports[inner] = name, exporter
    return exports


def formats_of(recipe: Recipe) -> tuple[str, ...]:
    """Return the formats that a recipe writes, without duplicates; refuses those that cannot be
    written together."""
    formats = tuple(dict.fromkeys(recipe.output.formats))
    if any(step.format == MONE for step in recipe.steps):
        if formats not in ((SAFETENSORS,), (MONE,)):
            raise CompressionError(
                f"--format {','.join(formats)}: {MONE} is written alone; name one format"
            )
        return (SAFETENSORS,)
    if MONE in formats:
        raise CompressionError(
            f"--format {MONE} writes what the step constants has made, which the recipe lacks"
        )
    for name in formats:
        if name != SAFETENSORS:
            find_exporter(name)
    if SAFETENSORS not in formats and len(formats) > 1:
        names = ",".join(formats)
        raise CompressionError(
            f"--format {names} writes two formats to one folder; add {SAFETENSORS} or name one"
        )
    return formats


def write_formats(folder: Path, formats: Sequence[str], progress: Progress) -> None:
    """Export an output that is about to be put in place.

    With safetensors among the formats, exports lie in subfolders; otherwise the export replaces its
    input."""
    if SAFETENSORS in formats:
        for name in formats:
            if name != SAFETENSORS:
                export_checkpoint(name, folder, folder / name, {}, False, progress)
        return
    (name,) = formats
    export = folder.with_name(name)
    shutil.rmtree(export, ignore_errors=True)  # of a run that was killed
    export_checkpoint(name, folder, export, {}, False, progress)
    shutil.rmtree(folder)
    export.replace(folder)
