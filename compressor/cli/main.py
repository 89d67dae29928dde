"""The command line `moe-compress`. Errors are one sentence and exit status 2."""

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, cast

import typer

from compressor.cli.commands import exporting, gating, generating, making, measuring, publishing, reporting, showing
from compressor.errors import CompressionError, without_tokens
from compressor.memory import limit_caches

app = typer.Typer(
    name="moe-compress",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Make Mixture-of-Experts checkpoints smaller; the output loads with stock transformers.",
)

USAGE_ERROR = cast(type[Exception], typer.BadParameter.__mro__[2])  # click's ClickException, wherever typer keeps it
INTERRUPTED = 130


def main() -> None:
    """Run the command line; every fault that a user can mend is one sentence on stderr and exit status 2."""
    limit_caches()
    with _own_warnings():
        try:
            status = app(prog_name="moe-compress", standalone_mode=False)
        except CompressionError as error:
            _fail(str(error))
        except USAGE_ERROR as error:
            _fail(_usage(error))
        except OSError as error:  # a name too long, a folder without permission ...
            place = f"{error.filename}: " if error.filename else ""
            _fail(f"{place}{error.strerror or error}")
        except (KeyboardInterrupt, typer.Abort):
            status = INTERRUPTED
    if status == INTERRUPTED:  # which typer too may have made of the key
        print("Interrupted; run the same command again to go on.", file=sys.stderr)
    raise SystemExit(status if isinstance(status, int) else 0)


@contextmanager
def _own_warnings() -> Iterator[None]:
    """Our warnings on stderr, one line each; the Hub client's retries are told by the error that ends them."""
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
    loggers = [logging.getLogger(package) for package in ("compressor", "strategies", "exporters")]
    for logger in loggers:
        logger.addHandler(handler)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeHandler(handler)


def _fail(message: str) -> NoReturn:
    print(f"Error: {without_tokens(' '.join(message.splitlines()))}", file=sys.stderr)
    raise SystemExit(2)


def _usage(error: Any) -> str:
    """A fault in the arguments as one sentence; no arguments at all is a call for help, which has been shown."""
    message = str(error.format_message()).strip().rstrip(".")
    context = getattr(error, "ctx", None)
    if not message:
        raise SystemExit(2)
    return message + (f"; see {context.command_path} --help" if context is not None else "")


for command in (
    measuring.inspect,
    making.plan,
    making.apply,
    making.compress,
    measuring.compare,
    measuring.attribute,
    gating.gate,
    exporting.export,
    generating.generate,
    reporting.report,
    publishing.push,
    showing.strategies,
    showing.demo,
):
    app.command()(command)


if __name__ == "__main__":
    main()
