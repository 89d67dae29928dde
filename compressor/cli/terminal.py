"""Output of the command line: progress bars, blocks or JSON, by the first process alone."""

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any, Literal

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from compressor.distributed import held, process_group, ranks, refuse_several
from compressor.document.blocks import Block, Text
from compressor.document.terminal import show
from compressor.files import check_folder
from compressor.formatting import one_line
from compressor.progress import Silent
from compressor.records import plain_json

PROGRAM = "moe-compress"
Command = Callable[..., None]


@dataclass
class Bars:
    """One progress bar for each phase, on stderr, naming the layer that was finished last. Phases
    may be nested."""

    bars: Progress

    def start(self, phase: str, total: int) -> None:
        """Open a bar, in place of an earlier one of this phase."""
        for task in self.bars.tasks:
            if task.finished and phase == task.description:
                self.bars.remove_task(task.id)
        self.bars.add_task(phase, total=total, detail="")

    def advance(self, detail: str) -> None:
        """Move the newest bar on; one that ends within an unfinished phase gives way to that
        phase's."""
        unfinished = [task.id for task in self.bars.tasks if not task.finished]
        if not unfinished:
            return
        *outer, newest = unfinished
        self.bars.update(newest, advance=1, detail=one_line(detail))
        if outer and self.bars.tasks[self.bars.task_ids.index(newest)].finished:
            self.bars.remove_task(newest)


@contextmanager
def progress_bars(quiet: bool) -> Iterator[Any]:
    """Show bars on stderr, unless only JSON is wanted."""
    if quiet or not ranks().is_first:
        yield Silent()
        return
    console = Console(stderr=True)
    bars = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[detail]}", markup=False),  # which names of a checkpoint stand in
        console=console,
    )
    bars.start()
    is_log = False
    try:
        yield Bars(bars)
    except BaseException:
        is_log = not console.is_terminal
        raise
    finally:
        if is_log or not bars.task_ids:
            bars.live.transient = True  # no bars, no empty line; in a log, an error stands alone
            bars.live.stop()
        else:
            bars.stop()


@contextmanager
def reporting(
    output: Path | None, names: Sequence[str], overwrite: bool, quiet: bool
) -> Iterator[Any]:
    """Show progress bars while the folder for reports of these names, if any, is checked and held
    by this run."""
    if output is not None:
        ranks().broadcast(lambda: check_folder(output, names, overwrite))
    with held(output) if output else nullcontext(), progress_bars(quiet) as progress:
        yield progress


def print_json(content: Any) -> None:
    """Print indented JSON on stdout; what a terminal would obey, and what its encoding cannot hold,
    is escaped."""
    is_unicode = str(sys.stdout.encoding or "utf-8").lower().startswith("utf")
    text = json.dumps(plain_json(content), indent=2, ensure_ascii=not is_unicode)
    print("".join(x if x.isprintable() or x in "\n\xa0" else json.dumps(x)[1:-1] for x in text))


def print_report(as_json: bool, content: Any, blocks: Iterable[Block]) -> None:
    """Print either the content as JSON or the blocks."""
    if as_json:
        print_json(content)
    else:
        show(blocks)


def annotate(level: Literal["error", "warning"], title: str, message: str, quiet: bool) -> None:
    """Print a workflow command that shows a message on the page of a GitHub job, if this is one.

    GitHub reads both streams: where stdout is JSON alone, the command goes to stderr.
    """
    if not os.environ.get("GITHUB_ACTIONS") or not ranks().is_first:
        return
    text = "\n".join(one_line(line, None) for line in message.splitlines())
    escaped = []
    for value, letters in ((one_line(title, None), "%\r\n:,"), (text, "%\r\n")):
        escaped.append(
            "".join(f"%{ord(letter):02X}" if letter in letters else letter for letter in value)
        )
    print(f"::{level} title={escaped[0]}::{escaped[1]}", file=sys.stderr if quiet else sys.stdout)


def written_line(paths: Sequence[Path]) -> tuple[Block, ...]:
    """Return a line on where files were written; empty if none were."""
    return (Text(f"Written: {', '.join(map(str, paths))}"),) if paths else ()


def on_ranks(command: Command) -> Command:
    """Return the command, run by all ranks together; the first one alone prints."""

    @wraps(command)
    def run(*arguments: Any, **named: Any) -> None:
        status = 0
        with (
            process_group() as ranks,
            Path(os.devnull).open("w", encoding="utf-8") as nowhere,
            ExitStack() as stack,
        ):
            if not ranks.is_first:
                stack.enter_context(redirect_stdout(nowhere))
            try:
                command(*arguments, **named)
            except typer.Exit as verdict:  # which all ranks have come to
                status = verdict.exit_code
        if ranks.is_first and status:
            raise typer.Exit(status)

    return run


def alone(command: Command, group: str = "") -> Command:
    """Return the command, of a group if it is in one, refused where several processes would all do
    the same."""

    @wraps(command)
    def run(*arguments: Any, **named: Any) -> None:
        refuse_several(" ".join((PROGRAM, *group.split(), command.__name__.replace("_", "-"))))
        command(*arguments, **named)

    return run
