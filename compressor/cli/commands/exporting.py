"""`export`: a finished checkpoint in another format."""

from typing import Annotated, Any

import typer

from compressor.cli.options import Model, Out, Running
from compressor.cli.terminal import progress_bars
from compressor.errors import CompressionError

ONNX = "ONNX"


def export(
    checkpoint: Model,
    output: Out,
    running: Running,
    format: Annotated[
        str, typer.Option("--format", help="onnx, or the name of another exporter that is installed.")
    ] = "onnx",
    option: Annotated[
        list[str] | None, typer.Option("--option", help="name=value for an option of the exporter; may be repeated.")
    ] = None,
    opset: Annotated[
        int | None, typer.Option(help="Version of the ONNX operators (default: 20).", rich_help_panel=ONNX)
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Of the weights: fp32 or fp16 (default: fp32).", rich_help_panel=ONNX)
    ] = None,
    quantize: Annotated[
        str | None,
        typer.Option(
            help="The experts' weights: none, int8 (by row) or int4 (by 32) (default: none).", rich_help_panel=ONNX
        ),
    ] = None,
    no_past: Annotated[
        bool, typer.Option("--no-past", help="No cache as inputs and outputs.", rich_help_panel=ONNX)
    ] = False,
    stream: Annotated[
        bool | None,
        typer.Option(
            "--stream/--no-stream",
            help="Verify with one layer in memory at a time, or with the whole model (default: layer by layer where "
            "the model does not fit).",
            rich_help_panel=ONNX,
        ),
    ] = None,
) -> None:
    """Write a checkpoint in another format, by default as a verified ONNX graph, one layer in memory at a time."""
    from compressor.api.exporting import export_checkpoint, find_exporter
    from compressor.checkpoint.source import locate
    from compressor.cli.rendering import show_export
    from compressor.recipe.registry import exporter_options, read_option

    flags: dict[str, Any] = {"opset": opset, "dtype": dtype, "quantize": quantize, "past": False if no_past else None}
    flags["stream"] = stream
    settings = {name: value for name, value in flags.items() if value is not None}
    for text in option or ():
        name, value = read_option(text, f"--option {text!r} should be name=value")
        if name == "overwrite":
            raise CompressionError("--option overwrite is the option --overwrite; pass that")
        settings[name] = value
    find_exporter(format)  # refused, as wrong options are, before a model is downloaded
    exporter_options(format, settings)
    with progress_bars(running.as_json) as progress:
        folder = locate(checkpoint, running.revision, progress).folder
        summary = export_checkpoint(format, folder, output, settings, running.overwrite, progress)
    show_export(format, output, summary, running.as_json)
