"""Python's public names: what they are, what they refuse, and that each does what its command does."""

import inspect
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

import compressor
from compressor import CompressionError, Correct, Distill, GateOptions, Prune
from tests.support import small
from tests.support.command_line import Run, succeeded

SIZES: dict[str, Any] = {"samples": 4, "sequence_length": 32}
FLAGS = ("--samples", 4, "--sequence-length", 32)


class Listener:
    """Phases with their totals, and the steps of each while it was the newest."""

    def __init__(self) -> None:
        self.phases = list[list[Any]]()

    def start(self, phase: str, total: int) -> None:
        self.phases.append([phase, total, 0])

    def advance(self, detail: str) -> None:
        unfinished = [phase for phase in self.phases if phase[2] < phase[1]]
        unfinished[-1][2] += 1


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("public")
    small.text_file(small.save(folder / "model").parent)
    return folder


@pytest.fixture(scope="module")
def smaller(home: Path) -> Path:
    steps = [Prune(strategy="aimer", experts=6)]
    compressor.compress(str(home / "model"), home / "smaller", steps, evaluate=False)
    return home / "smaller"


def weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def test_all_public_names_are_listed() -> None:
    named = dir(compressor)
    assert {"compress", "push", "export", "check", "split", "distill", "calibrate_router", "GateOptions"} <= {*named}
    assert set(compressor.__all__) < set(named) and all(hasattr(compressor, name) for name in named)
    assert compressor.__version__ == version("moe-compressor")


@pytest.mark.parametrize("kind", [Prune, Correct, Distill, GateOptions])
def test_help_has_the_meaning_of_every_option(kind: Any) -> None:
    text = " ".join((inspect.getdoc(kind) or "").split())
    described = {name: field.description for name, field in kind.model_fields.items() if field.description}
    assert described
    for name, meaning in described.items():
        assert f"{name} = " in text and " ".join(meaning.split()) in text


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Prune(ratoi=0.25), "Prune has no option 'ratoi'; did you mean 'ratio'?"),
        (lambda: Correct("tuned"), "Correct: method should be 'auto', 'none', 'ridge' or 'tune', it is 'tuned'"),
        (lambda: Correct("tune", tokens="many"), "Correct: tokens should be a whole number, it is 'many'"),
        (lambda: Prune(calibration={"samples": 0}), "Prune: calibration.samples should be greater than or equal to 1"),
        (lambda: compressor.compress("model", "out", [Prune(experts=4)], ratoi=0.5), "no option 'ratoi'"),
        (lambda: compressor.distill("model", "out", "base", stpes=3), "no option 'stpes'"),
        (lambda: compressor.GateOptions(max_dorp=1), "GateOptions has no option 'max_dorp'; did you mean"),
        (lambda: compressor.GateOptions(tasks=("a",), max_drop="x"), "GateOptions: max_drop should be a number"),
        (lambda: compressor.AnswerOptions(max_new_tokens=-1), "AnswerOptions: max_new_tokens should be greater"),
    ],
)
def test_what_is_wrong_is_one_sentence(make: Any, message: str) -> None:
    with pytest.raises(CompressionError) as caught:
        make()
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.full
def test_steps_by_functions_write_what_their_commands_do(
    home: Path, smaller: Path, run: Run, offline: None, tmp_path: Path
) -> None:
    text, base = str(home / "calibration.txt"), str(home / "model")
    training: dict[str, Any] = {"steps": 2, "tokens_per_step": 64, "sequence_length": 32}
    compressor.split(base, tmp_path / "split", parts=2, calibration=text, **SIZES, evaluate=False)
    compressor.distill(str(smaller), tmp_path / "distill", base, calibration=text, **training, evaluate=False)
    calibrating: dict[str, Any] = {"rounds": 1, "sequences": 4, "sequence_length": 32, "evaluate": False}
    compressor.calibrate_router(str(smaller), tmp_path / "routers", base, calibration=text, **calibrating)
    shared = ("--calibration", text, "--no-evaluate")
    against = ("--base", base, *shared)
    rounds = ("--rounds", 1, "--sequences", 4, "--sequence-length", 32)
    small_steps = ("--steps", 2, "--tokens-per-step", 64, "--sequence-length", 32)
    succeeded(run("split", base, "-o", tmp_path / "split-cli", "--parts", 2, *FLAGS, *shared))
    succeeded(run("distill", smaller, "-o", tmp_path / "distill-cli", *small_steps, *against))
    succeeded(run("calibrate-router", smaller, "-o", tmp_path / "routers-cli", *rounds, *against))
    for name in ("split", "distill", "routers"):
        assert weights(tmp_path / name) == weights(tmp_path / f"{name}-cli"), name


def test_outputs_are_checked_exported_reported_and_pushed(
    home: Path, smaller: Path, tmp_path: Path, run: Run, offline: None
) -> None:
    succeeded(run("check", "--write", smaller))
    assert compressor.check(str(smaller)).verdict == "same"
    compressor.export(smaller, tmp_path / "kept", "keep-list")
    assert (tmp_path / "kept").is_dir()
    data, figures = compressor.write_report(smaller, tmp_path / "page.html", run_models=False)
    assert (tmp_path / "page.html").is_file() and not figures
    assert data.after.parameters < data.before.parameters


@pytest.mark.usefixtures("golden")
def test_progress_reaches_into_tune_and_golden_answers(home: Path, tmp_path: Path) -> None:
    listener = Listener()
    steps = [Prune(strategy="reap", experts=6, correct=Correct("tune", steps=3, tokens=32))]
    text = str(home / "calibration.txt")
    compressor.compress(
        str(home / "model"), tmp_path / "out", steps, calibration=text, **SIZES, progress=listener, evaluate=False
    )
    tuned = [phase for phase in listener.phases if str(phase[0]).startswith("tune ")]
    assert tuned and all(phase[1:] == [3, 3] for phase in tuned)
    assert "golden answers" in {phase[0] for phase in listener.phases}
    assert not [phase for phase in listener.phases if phase[2] != phase[1]]
