"""The command line `moe-compress`. Errors are one sentence and exit status 2."""

import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, Any, NoReturn, cast

import typer
from typer.core import TyperGroup

from compressor.cli import behaviour, check, compress, gate, inspection, measure, outputs, text
from compressor.cli.options import click_command, spread
from compressor.cli.settings import SHOWN as SHOWN_OF_RECIPES
from compressor.cli.settings import paths_spelled_out
from compressor.cli.terminal import PROGRAM, Command, alone, on_ranks
from compressor.distributed import ranks
from compressor.entry_points import COMMANDS, load, packages, working
from compressor.errors import CompressionError, is_panic, plain, reason_of, without_tokens
from compressor.files import FULL
from compressor.formatting import one_line
from compressor.memory import limit_caches
from compressor.run_record import versions

PACKAGE = "moe-compressor"
# click's ClickException, wherever typer keeps it
USAGE_ERROR = cast(type[Exception], typer.BadParameter.__mro__[2])
INTERRUPTED = 130
CHAT = "apply-chat-template"
RESULTS = "--results"  # of gate, for which `gate results` stands
FULL_DISK = (
    "; free some space where the output, the cache (MOE_COMPRESSOR_CACHE) and $TMPDIR "
    "lie, and run it again"
)


class Program(TyperGroup):
    """The commands, some of which have names of two words."""

    def resolve_command(self, context: Any, arguments: list[str]) -> Any:
        """Return the command that arguments name, and the other arguments."""
        name = " ".join(arguments[:2])
        if name in self.commands:
            arguments = [name, *arguments[2:]]
        elif arguments[0] == "gate" and RESULTS in arguments:
            others = [argument for argument in arguments[1:] if argument != RESULTS]
            arguments = ["gate results", *others]
        return super().resolve_command(context, arguments)


app = typer.Typer(
    cls=Program,
    name=PROGRAM,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def main() -> None:
    """Run the command line; every fault that a user can mend is one sentence on stderr and exit
    status 2."""
    limit_caches()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            # names that a terminal cannot show end no command
            stream.reconfigure(errors="backslashreplace")
    # threads that spin hold each other up where cores are shared
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    with _own_warnings():
        try:
            # --apply-chat-template may stand without a name of a template: another option, a folder
            # or a Hub id is none
            arguments = []
            for argument, after in zip(sys.argv[1:], [*sys.argv, "-"][2:], strict=True):
                if argument == f"--no-{CHAT}":
                    argument = f"--{CHAT}=false"
                elif argument == f"--{CHAT}" and (
                    after.startswith("-") or "/" in after or Path(after).exists()
                ):
                    argument = f"--{CHAT}=true"
                arguments.append(argument)
            status = click_command(app)(
                paths_spelled_out(arguments),
                prog_name=PROGRAM,
                standalone_mode=False,
            )
        except CompressionError as error:
            _fail(str(error))
        except USAGE_ERROR as error:
            fault: Any = error
            message = str(fault.format_message()).strip().rstrip(".")
            if not message:  # no arguments at all: a call for help, which has been shown
                raise SystemExit(2) from error
            context = getattr(error, "ctx", None)
            _fail(message + (f"; see {context.command_path} --help" if context else ""))
        except OSError as error:  # a name too long, a folder without permission ...
            place = f"{error.filename}: " if error.filename else ""
            remedy = FULL_DISK if error.errno in FULL else ""
            _fail(f"{place}{error.strerror or error}{remedy}")
        except (KeyboardInterrupt, typer.Abort):
            status = INTERRUPTED
        except BaseException as error:
            if not is_panic(error):
                raise
            _fail(f"a library gave up: {reason_of(error)}; check the tokenizer and the text")
    if status == INTERRUPTED:  # which typer too may have made of the key
        print("Interrupted; run the same command again to go on.", file=sys.stderr)
    raise SystemExit(status if isinstance(status, int) else 0)


class _OneLine(logging.Formatter):
    """A warning as one line of text, whatever a plugin has put into it."""

    def format(self, record: logging.LogRecord) -> str:
        level = "" if record.levelno == logging.INFO else f"{record.levelname}: "
        return f"{level}{plain(one_line(record.getMessage(), None))}"


@contextmanager
def _own_warnings() -> Iterator[None]:
    """Warnings of ours and of plugins on stderr, and what a run will do, unless only JSON is
    wanted.

    The Hub client's retries are reported by the error that ends them.
    """

    def shown(record: logging.LogRecord) -> bool:
        wanted = record.levelno >= logging.WARNING or "--json" not in sys.argv
        return wanted and ranks().is_first  # several ranks say the same

    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_OneLine())
    handler.addFilter(shown)
    loggers = [logging.getLogger(package) for package in {"compressor", *packages()}]
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeHandler(handler)


def _fail(message: str) -> NoReturn:
    print(f"Error: {plain(' '.join(without_tokens(message).splitlines()))}", file=sys.stderr)
    raise SystemExit(2)


def _show_version(requested: bool) -> None:
    if requested:
        print(PROGRAM, versions([PACKAGE])[PACKAGE])
        raise typer.Exit()


@app.callback()
def about(
    version: Annotated[
        bool,
        typer.Option("--version", help="Show the version.", is_eager=True, callback=_show_version),
    ] = False,
) -> None:
    """Make Mixture-of-Experts checkpoints smaller; the output loads with stock transformers."""


REST = "All other options: --set step.option=value; see `moe-compress list steps`."
# by --help, of commands with more options than a screen has lines
SHOWN: Mapping[str, Sequence[str]] = {
    "compress": SHOWN_OF_RECIPES,
    "plan": SHOWN_OF_RECIPES,
    "gate": gate.SHOWN,
    "compare": measure.SHOWN,
}
GROUPS: Mapping[str, Sequence[Command]] = {  # of commands in the help
    "Compress": (
        alone(inspection.inspect),
        on_ranks(compress.compress),
        on_ranks(compress.plan),
        on_ranks(compress.apply),
        on_ranks(compress.split),
        on_ranks(compress.calibrate_router),
        on_ranks(compress.distill),
        alone(text.text),
        alone(behaviour.traces),
        alone(measure.installed),
        alone(measure.demo),
    ),
    "Test": (
        on_ranks(gate.gate),
        on_ranks(gate.gate_results),
        on_ranks(gate.gate_baseline),
        on_ranks(measure.compare),
        alone(behaviour.evaluate),
        alone(check.check),
    ),
    "Publish": (
        alone(outputs.report),
        alone(outputs.export),
        alone(outputs.generate),
        alone(outputs.push),
    ),
}
# `installed`, since a function `list` would shadow a built-in
NAMES = {
    "installed": "list",
    "gate_results": "gate results",
    "gate_baseline": "gate baseline",
}
RESEARCH = "Research"  # of plugins
for group, commands in GROUPS.items():
    for command in commands:
        shown = SHOWN.get(command.__name__, ())
        name = NAMES.get(command.__name__)
        epilog = REST if shown is SHOWN_OF_RECIPES else None
        app.command(name, epilog=epilog, rich_help_panel=group)(spread(command, shown))
for name, plugin in working(COMMANDS, lambda name: (name, load(COMMANDS, name))):
    if isinstance(plugin, typer.Typer):
        app.add_typer(plugin, name=name, rich_help_panel=RESEARCH)
    else:
        app.command(name, rich_help_panel=RESEARCH)(plugin)
