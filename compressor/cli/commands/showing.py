"""`steps`, `strategies` and `demo`: the commands that show what there is."""

from pathlib import Path
from typing import Annotated

import typer

from compressor.cli.options import Running
from compressor.cli.terminal import progress_bars

Printing = Annotated[Running, ("as_json",)]


def steps(running: Printing) -> None:
    """List the steps of a recipe that are installed, built-in and third-party, with their options."""
    from compressor.cli import rendering
    from compressor.recipe.recipe import working_steps

    rendering.show_steps(list(working_steps()), running.as_json)


def strategies(
    running: Printing,
    needs: Annotated[
        bool, typer.Option("--needs", help="List the statistics that a strategy may ask for instead.")
    ] = False,
) -> None:
    """List the strategies that are installed, built-in and third-party."""
    from compressor.cli import rendering
    from compressor.recipe import registry
    from compressor.statistics.statistics import STATISTICS

    if needs:
        table = [(name, each.shape, each.meaning) for name, each in STATISTICS.items()]
        rendering.show_needs(table, running.as_json)
        return
    rendering.show_strategies(list(registry.working_strategies()), running.as_json)


def demo(
    running: Printing,
    experts: Annotated[int, typer.Option(help="Experts to keep in every layer of the demo model.")] = 12,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Keep the compressed models in this new folder.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="One strategy, on a tenth of the questions.")] = False,
) -> None:
    """Compress the embedded demo model with several strategies and show what each costs; no network is used."""
    from compressor.cli import rendering
    from compressor.cli.demonstration import run_demo

    with progress_bars(running.as_json) as progress:
        rows = run_demo(experts, output, progress, quick)
    rendering.show_demo(rows, running.as_json)
