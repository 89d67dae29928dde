"""`export`: a finished checkpoint in another format."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from compressor.cli.commands.bars import progress_bars
from compressor.cli.options import AsJson, Model, Out, Overwrite, Revision, listed
from compressor.errors import CompressionError
from compressor.planning.registry import load_exporter
from compressor.progress import Progress

FORMATS = ("safetensors", "onnx")
SUBFOLDER = "onnx"  # of a safetensors output that is exported, too


def export(
    checkpoint: Model,
    output: Out,
    format: Annotated[str, typer.Option("--format", help="onnx, so far.")] = "onnx",
    opset: Annotated[int, typer.Option(help="Version of the ONNX operators.")] = 20,
    dtype: Annotated[str, typer.Option(help="Of the weights: fp32 or fp16.")] = "fp32",
    quantize: Annotated[str, typer.Option(help="The experts' weights: none, int8 (by row) or int4 (by 32).")] = "none",
    no_past: Annotated[bool, typer.Option("--no-past", help="No cache as inputs and outputs.")] = False,
    revision: Revision = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Write a checkpoint as an ONNX graph, verified against the stock model; the model has to fit in memory."""
    from compressor.checkpoint.source import locate
    from compressor.cli.export_table import show_export

    if format != "onnx":
        raise CompressionError(f"--format {format!r} is not known; onnx is, and compress writes safetensors")
    onnx = load_exporter("onnx")
    options = onnx.ExportOptions(opset, dtype, quantize, past=not no_past, overwrite=overwrite)
    with progress_bars(as_json) as progress:
        summary = onnx.export(locate(checkpoint, revision, progress).folder, output, options, progress)
    show_export(summary, as_json)


def read_formats(text: str) -> tuple[str, ...]:
    """'safetensors,onnx' -> the formats that `compress` is to write."""
    found = tuple(dict.fromkeys(listed(text, "--format") or ()))
    if unknown := [name for name in found if name not in FORMATS]:
        raise CompressionError(f"--format {unknown[0]!r} is not known; known are {', '.join(FORMATS)}")
    if "onnx" in found:
        load_exporter("onnx").require_packages()
    return found


def onnx_beside(formats: tuple[str, ...], progress: Progress) -> Callable[[Path], None] | None:
    """What puts an ONNX export into an output folder that is about to be published; None if none is asked for."""
    if "onnx" not in formats:
        return None

    def add(folder: Path) -> None:
        load_exporter("onnx").export(folder, folder / SUBFOLDER, progress=progress)

    return add


@contextmanager
def onnx_alone(output: Path, overwrite: bool, progress: Progress) -> Iterator[Path]:
    """A hidden folder for the safetensors output, which is exported to `output` and removed in the end."""
    onnx = load_exporter("onnx")
    load_exporter("safetensors").check_target(output, overwrite)
    between = output.absolute().with_name(f".{output.name}.safetensors")
    try:
        yield between
        onnx.export(between, output, onnx.ExportOptions(overwrite=overwrite), progress)
    finally:
        shutil.rmtree(between, ignore_errors=True)
