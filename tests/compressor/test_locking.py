"""One run at a time on an output: another one is refused, a kill lets go of it, and no trace is left in the end."""

import errno
import fcntl
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from compressor.errors import CompressionError
from compressor.files import LOCK, REPLACED, clear, lock_output, work_folder
from tests.support import small
from tests.support.audit import Moment, happening
from tests.support.command_line import Run, captured, names, refused

pytestmark = pytest.mark.usefixtures("offline")

FORK = multiprocessing.get_context("fork")
BUSY = r"^another run is writing .*out; wait for it or stop it$"


def hold(out: Path, other: Connection) -> None:
    with lock_output(out) as folder:
        (folder / "half").touch()
        other.send("held")
        other.poll(60)
        (folder / "half").unlink()


@contextmanager
def another_run(out: Path) -> Iterator[Any]:
    mine, other = FORK.Pipe()
    process = FORK.Process(target=hold, args=(out, other))
    process.start()
    try:
        assert mine.poll(30)
        yield process
    finally:
        mine.send("go on")
        process.join(30)


def test_another_run_is_refused_until_the_first_ends(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with another_run(out):
        with pytest.raises(CompressionError, match=BUSY), lock_output(out):
            pass
        with lock_output(tmp_path / "other"):
            pass
    with lock_output(out):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_kill_lets_go_and_leaves_its_work(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with another_run(out) as process:
        os.kill(process.pid, signal.SIGKILL)
        process.join(30)
    with lock_output(out) as folder:
        assert (folder / "half").exists()
        clear(folder)
    assert list(tmp_path.iterdir()) == []


def test_a_lock_that_its_holder_has_just_removed_counts_for_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, real, calls = tmp_path / "out", fcntl.flock, list[int]()

    def slow(file: Any, how: int) -> None:
        calls.append(how)
        if len(calls) == 1:  # between opening and locking, the run that held it ends
            (work_folder(out) / LOCK).unlink()
            work_folder(out).rmdir()
        real(file, how)

    monkeypatch.setattr(fcntl, "flock", slow)
    with lock_output(out) as folder:
        assert len(calls) == 2 and (folder / LOCK).exists()


def test_without_locks_nothing_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(file: Any, how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", unsupported)
    with lock_output(tmp_path / "out") as folder:
        assert folder.is_dir()
    assert list(tmp_path.iterdir()) == []


def test_an_older_output_that_had_been_moved_away_comes_back(tmp_path: Path) -> None:
    out = tmp_path / "out"
    (work_folder(out) / REPLACED).mkdir(parents=True)
    (work_folder(out) / REPLACED / "old").touch()
    with lock_output(out):
        assert (out / "old").exists()
    assert list(tmp_path.iterdir()) == [out]


# --- commands ---


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("home")
    small.save(home / "model")
    small.text_file(home)
    for command in ("plan", "compress"):
        asked = (command, home / "model", "-o", home / command, "--experts", 4, "--strategy", "model-centric")
        assert captured(*asked, "--correct", "none").status == 0
    return home


DATA = ("--samples", 4, "--sequence-length", 16)
COMMANDS: dict[str, Callable[[Path], tuple[Any, ...]]] = {
    "compress": lambda home: ("compress", home / "model", "--experts", 4, "--calibration", home / "calibration.txt"),
    "compress, searching": lambda home: (
        "compress", home / "model", "--search", "--gate", "moe_demo_sorting", "--max-drop", 0.1,
        "--strategy", "model-centric",
    ),
    "apply": lambda home: ("apply", home / "plan"),
    "export": lambda home: ("export", home / "model"),
    "check": lambda home: ("check", "--write", home / "model"),
    "plan": lambda home: ("plan", home / "model", "--experts", 4, "--strategy", "model-centric"),
    "report": lambda home: ("report", home / "compress", "--no-measure"),
    "attribute": lambda home: ("attribute", home / "model", "--calibration", home / "calibration.txt", *DATA),
    "compare": lambda home: (
        "compare", home / "model", "--experts", 4, "--calibration", home / "calibration.txt", *DATA,
    ),
    "gate": lambda home: ("gate", home / "model", home / "compress", "--tasks", "moe_demo_sorting", "--limit", 4),
}  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_the_second_command_is_refused_before_it_works(command: str, run: Run, home: Path, tmp_path: Path) -> None:
    if command == "export":
        pytest.importorskip("onnxruntime")
    out = tmp_path / "out"
    with another_run(out):
        refused(run(*COMMANDS[command](home), "-o", out), "another run is writing .*out; wait for it or stop it")
        assert names(work_folder(out)) == ["half", "lock"] and not out.exists()
    assert names(tmp_path) == []


def test_one_that_comes_when_the_same_command_has_just_ended_finds_its_output(
    run: Run, home: Path, tmp_path: Path
) -> None:
    """The first ends between the second's look at the output and its lock."""
    out, hidden = tmp_path / "out", tmp_path / "hidden"
    command = (*COMMANDS["compress"](home), *DATA, "--correct", "none", "-o", out)
    assert run(*command).status == 0
    out.rename(hidden)
    with happening(Moment("fcntl.flock"), lambda: hidden.rename(out)):
        again = run(*command)
    assert again.status == 0 and "is in place already" in again.err
    assert names(tmp_path) == ["out"]
    with lock_output(out):
        pass
