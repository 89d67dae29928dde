"""Two commands at once with the same output: the second is told so in one sentence, and the first one's is whole."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from compressor.files import lock_output, work_folder
from tests.compressor.test_locking import another_run
from tests.support import small
from tests.support.command_line import Run, captured, names, refused

pytestmark = pytest.mark.usefixtures("offline")


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
    run: Run, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first ends between the second's look at the output and its lock."""
    from compressor.pipeline import run as pipeline

    out, looked = tmp_path / "out", list[bool]()
    command = (*COMMANDS["compress"](home), *DATA, "--correct", "none", "-o", out)
    real = pipeline._in_place

    def late(*given: Any) -> Any:
        looked.append(True)
        return None if len(looked) == 1 else real(*given)

    assert run(*command).status == 0
    monkeypatch.setattr(pipeline, "_in_place", late)
    again = run(*command)
    assert again.status == 0 and "is in place already" in again.err
    assert names(tmp_path) == ["out"]
    with lock_output(out):
        pass
