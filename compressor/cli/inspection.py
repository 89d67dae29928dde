"""`inspect`: what a model is made of, and what compressing it would take."""

from typing import Annotated

import typer

import compressor
from compressor.cli.model_files import package_of
from compressor.cli.options import RUNNING, Model, Running, flag, options_of
from compressor.cli.terminal import print_report
from compressor.files import refuse_absent


def inspect(
    context: typer.Context,
    model: Model,
    running: Annotated[Running, options_of(Running, RUNNING, ("revision", "as_json"))],
    experts: Annotated[int | None, flag("Show the sizes with this many experts left.")] = None,
) -> None:
    """Show what a model is made of and what compressing it would take; reads no weight."""
    package = package_of(context, model)
    if package is not None:
        package.inspect(model, experts, running.as_json)
        return
    refuse_absent(model)
    from compressor.report.inspection import inspection_blocks

    inspection = compressor.inspect(model, running.revision, experts)
    print_report(running.as_json, inspection, inspection_blocks(inspection))
