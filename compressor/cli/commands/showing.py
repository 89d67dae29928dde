"""`strategies` and `demo`: the commands that show what there is."""

from pathlib import Path
from typing import Annotated

import typer

from compressor.cli.commands.bars import progress_bars
from compressor.cli.options import (
    AsJson,
)


def strategies(
    needs: Annotated[
        bool, typer.Option("--needs", help="List the statistics that a strategy may ask for instead.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """List the strategies that are installed, built-in and third-party."""
    from compressor.calibration.meters import statistics_table
    from compressor.cli import rendering
    from compressor.planning import registry

    if needs:
        rendering.show_needs(statistics_table(), as_json)
        return
    rendering.show_strategies(list(registry.working_strategies()), as_json)


def demo(
    experts: Annotated[int, typer.Option(help="Experts to keep in every layer of the demo model.")] = 12,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Keep the compressed models in this new folder.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compress the embedded demo model with several strategies and show what each costs; no network is used."""
    from compressor.cli import rendering
    from compressor.cli.demonstration import run_demo

    with progress_bars(as_json) as progress:
        rows = run_demo(experts, output, progress)
    rendering.show_demo(rows, as_json)
