"""Commands under a launcher of several processes: those that share the work, and those that one process does."""

import os
from collections.abc import Callable
from contextlib import ExitStack, redirect_stdout
from functools import wraps
from pathlib import Path
from typing import Any

import typer

from compressor.cli.terminal import PROGRAM
from compressor.distributed.ranks import process_group, refuse_several

Command = Callable[..., None]


def on_ranks(command: Command) -> Command:
    """The command, done by all ranks together; the first one alone prints."""

    @wraps(command)
    def run(*given: Any, **named: Any) -> None:
        status = 0
        with process_group() as ranks, Path(os.devnull).open("w", encoding="utf-8") as nowhere, ExitStack() as stack:
            if not ranks.is_first:
                stack.enter_context(redirect_stdout(nowhere))
            try:
                command(*given, **named)
            except typer.Exit as verdict:  # which all ranks have come to
                status = verdict.exit_code
        if ranks.is_first and status:
            raise typer.Exit(status)

    return run


def alone(command: Command, group: str = "") -> Command:
    """The command, of a group of commands if it is in one, refused where several processes would all do the same."""

    @wraps(command)
    def run(*given: Any, **named: Any) -> None:
        refuse_several(" ".join((PROGRAM, *group.split(), command.__name__.replace("_", "-"))))
        command(*given, **named)

    return run
