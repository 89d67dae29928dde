"""The command line as the tests run it: in this process, or in one that is killed; test support."""

import io
import multiprocessing
import os
import re
import signal
import sys
from collections.abc import Callable
from contextlib import nullcontext, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from compressor.cli import main as cli
from tests.support.audit import Moment, happening

# A fork has all packages imported already; a GPU's driver and threads do not survive it.
CHILDREN: Any = multiprocessing.get_context("forkserver" if torch.cuda.is_available() else "fork")


@dataclass(frozen=True)
class Result:
    """What a command left on its streams, and its exit status."""

    status: int
    out: str
    err: str


Run = Callable[..., Result]


def runner(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """The command in this process, through the same entry point as the console script."""

    def call(*arguments: Any) -> Result:
        capfd.readouterr()
        monkeypatch.setattr(sys, "argv", ["moe-compress", *(str(argument) for argument in arguments)])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        streams = capfd.readouterr()
        return Result(int(stop.value.code or 0), streams.out, streams.err)

    return call


def captured(*arguments: Any) -> Result:
    """The same for fixtures of a wider scope than a test's: what Python prints."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(sys, "argv", ["moe-compress", *(str(argument) for argument in arguments)])
        with pytest.raises(SystemExit) as stop:
            cli.main()
    return Result(int(stop.value.code or 0), out.getvalue(), err.getvalue())


def succeeded(result: Result) -> Result:
    """Return what a command left, which ended well."""
    assert result.status == 0, result
    return result


def refused(result: Result, message: str) -> None:
    """One sentence says why, below what a run says once work begins."""
    assert result.status == 2, result
    assert re.fullmatch(r"((Keep|keeping|one layer) [^\n]+\n)*Error: [^\n]+\n", result.err), result.err
    assert re.search(message, result.err), result.err
    assert result.out == ""


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def work(arguments: list[str], moment: Moment | None) -> None:
    """Run the command, killing this process at a moment, if there is one."""
    torch.set_num_threads(1)
    sys.argv = ["moe-compress", *arguments]
    with nullcontext() if moment is None else happening(moment, lambda: os.kill(os.getpid(), signal.SIGKILL)):
        cli.main()


def run_killed(arguments: list[str], moment: Moment) -> int | None:
    """The command in a process of its own, killed at a moment; returns its exit code."""
    process = CHILDREN.Process(target=work, args=(arguments, moment))
    process.start()
    process.join()  # it is killed or ends, however long a busy machine takes
    code: int | None = process.exitcode
    return code


def start(arguments: list[str], streams: Path, environment: dict[str, str]) -> Any:
    """The command in a process of its own that goes on beside this one; `ended` waits for it."""
    process = CHILDREN.Process(target=_apart, args=(arguments, streams, environment))
    process.start()
    return process


def _apart(arguments: list[str], streams: Path, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    sys.stdout, sys.stderr = (streams.with_suffix(end).open("w") for end in (".out", ".err"))
    for stream, number in ((sys.stdout, 1), (sys.stderr, 2)):
        os.dup2(stream.fileno(), number)
    work(arguments, None)


def ended(process: Any, streams: Path) -> Result:
    """What a process that was started left on its streams."""
    process.join()
    return Result(process.exitcode, *(streams.with_suffix(end).read_text() for end in (".out", ".err")))
