"""`inspect`: what a model is made of, and what compressing it would take."""

from dataclasses import asdict
from typing import Annotated

import typer

import compressor
from compressor.cli.model_files import package_of
from compressor.cli.options import RUNNING, TEXT, Model, Running, flag, options_of
from compressor.cli.terminal import print_report, progress_bars
from compressor.data.sources import refuse_absent_texts
from compressor.errors import CompressionError
from compressor.files import refuse_absent
from compressor.recipe.step import TextOptions

SHOWN = [option for option in TEXT if option[0] != "emphasis"]


def inspect(
    context: typer.Context,
    model: Model,
    text: Annotated[TextOptions, SHOWN],
    running: Annotated[Running, options_of(Running, RUNNING, without=("overwrite",))],
    experts: Annotated[int | None, flag("Show the sizes with this many experts left.")] = None,
) -> None:
    """Show what a model is made of and what compressing it would take; weights are read with
    --calibration alone."""
    package = package_of(context, model)
    if package is not None:
        package.inspect(model, experts, running.as_json)
        return
    if text != TextOptions() and not text.data:
        raise CompressionError("options of a text go with --calibration, which names one")
    refuse_absent_texts(text.data or ())
    refuse_absent(model)
    from compressor.report.inspection import inspection_blocks

    inspection = compressor.inspect(model, running.revision, experts)
    content = asdict(inspection)
    blocks = inspection_blocks(inspection)
    if text.data:
        from compressor.pipeline.resolve import open_run, read_calibration
        from compressor.report.price import price_blocks, prices
        from compressor.report.text_check import check_text, text_blocks

        with (
            progress_bars(running.as_json) as progress,
            open_run(model, **running.reading(progress), resident=running.resident) as session,
        ):
            calibration = read_calibration(session, text, seed=0)
            check = check_text(session, text, calibration)
            found = prices(session, text)
        content |= {"text": check.to_dict(), "prices": list(map(asdict, found))}
        blocks += [*text_blocks(check), *price_blocks(found, inspection.experts)]
    print_report(running.as_json, content, blocks)
