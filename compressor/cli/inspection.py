"""`inspect`: what a model is made of, and what compressing it would take."""

from dataclasses import asdict
from typing import Annotated

import typer

import compressor
from compressor.cli.gguf_files import show_gguf_inspection, takes_gguf
from compressor.cli.options import RUNNING, Model, Running, flag, options_of
from compressor.cli.terminal import print_report


def inspect(
    context: typer.Context,
    model: Model,
    running: Annotated[Running, options_of(Running, RUNNING, ("revision", "as_json"))],
    experts: Annotated[int | None, flag("Show the sizes with this many experts left.")] = None,
) -> None:
    """Show what a model is made of and what compressing it would take; reads no weight."""
    if takes_gguf(context, model, None, ("experts",)):
        return show_gguf_inspection(compressor.inspect_gguf(model, experts), running.as_json)
    from compressor.report.inspection import inspection_blocks

    inspection = compressor.inspect(model, running.revision, experts)
    print_report(running.as_json, asdict(inspection), inspection_blocks(inspection))
