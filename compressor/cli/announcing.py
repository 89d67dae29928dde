"""What a long run will take, said before it: one line on stderr, and a question where something quicker would do."""

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import typer

from compressor.distributed.present import here
from compressor.errors import CompressionError

if TYPE_CHECKING:  # which loads torch
    from compressor.forecasting.estimate import Forecast


def on_terminal() -> bool:
    """Whether somebody sits there who can be asked."""
    return sys.stdin.isatty() and sys.stderr.isatty()


def announcing(progress: Any, yes: bool, quiet: bool) -> "Callable[[Forecast], None] | None":
    """A listener for the API that says what a run will take if that is long; None where only JSON is wanted.

    Hours of tuning on a processor need an answer, unless `yes` or nobody can be asked; a no is a `CompressionError`.
    """
    if quiet or not here().is_first:
        return None

    def announce(forecast: "Forecast") -> None:
        if not forecast.is_long:
            return
        with progress.paused():
            typer.echo(str(forecast), err=True)
            if forecast.asks and not yes and on_terminal() and not typer.confirm("Go on?", default=True, err=True):
                raise CompressionError("nothing was begun; take a quicker --correct, or --yes to go on unasked")

    return announce
