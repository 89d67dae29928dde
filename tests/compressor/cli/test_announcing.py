"""What is said before a long run: on stderr, a question on a terminal alone, and none with --yes."""

from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

import compressor
from compressor.cli import announcing
from compressor.cli.terminal import Bars
from compressor.errors import CompressionError
from compressor.forecasting import estimate
from compressor.forecasting.estimate import Forecast, Part
from compressor.forecasting.machine import Slowest
from tests import small
from tests.command_line import Run, refused

QUICKER = (("with --correct ridge", 700.0), ("with --correct none", 60.0))
LONG = Forecast((Part("calibration", 100.0), Part("tune", 20_000.0)), "cpu", QUICKER)
SAID = "about 5.6 h: tune 5.6 h (with --correct ridge about 12 min, with --correct none about 60 s)"


def begin(forecast: Forecast, yes: bool = False, answer: str | None = None) -> tuple[str, str]:
    """What a command that announces this prints on stderr, and how it ended."""
    app = typer.Typer()

    @app.command()
    def command() -> None:
        with Bars() as bars:
            told = announcing.announcing(bars, yes, quiet=False)
            assert told is not None
            told(forecast)

    found = CliRunner().invoke(app, [], input=answer)
    return found.stderr, "" if found.exception is None else str(found.exception)


def test_a_question_only_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    assert begin(LONG) == (f"{SAID}\n", "")
    monkeypatch.setattr(announcing, "on_terminal", lambda: True)
    for answer, end in (("y\n", ""), ("\n", ""), ("n\n", "nothing was begun; take a quicker --correct, or --yes")):
        said, ended = begin(LONG, answer=answer)
        assert said.startswith(f"{SAID}\nGo on? [Y/n]") and ended.startswith(end) and bool(ended) == bool(end)
    assert begin(LONG, yes=True) == (f"{SAID}\n", "")
    assert begin(Forecast(LONG.parts, "cpu")) == ("about 5.6 h: tune 5.6 h\n", "")  # nothing is quicker
    assert begin(Forecast((Part("tune", 19.0),), "cpu")) == ("", "")


def test_json_alone_is_not_disturbed() -> None:
    assert announcing.announcing(None, False, quiet=True) is None


def test_every_command_says_it_before_its_long_part(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    model, text = small.save(tmp_path / "model"), small.text_file(tmp_path)
    data = ("--calibration", text, "--samples", 6, "--sequence-length", 32)
    kept = ("--experts", 6, "--strategy", "reap", "--correct", "tune", *data)
    quiet = run("plan", model, "-o", tmp_path / "quiet.json", *kept)
    assert quiet.status == 0 and "about" not in quiet.err  # short
    monkeypatch.setattr(estimate, "LEAST", 1e-9)
    monkeypatch.setattr(estimate, "LONG", 1e-9)
    made = run("plan", model, "-o", tmp_path / "plan.json", *kept)
    assert made.status == 0 and "about 1 s: calibration" in made.err
    with monkeypatch.context() as patch:
        patch.setattr(announcing, "on_terminal", lambda: True)
        patch.setattr(typer, "confirm", lambda *_, **__: False)
        stopped = run("compress", model, "-o", tmp_path / "small", *kept)
        assert stopped.status == 2 and "(with --correct ridge about" in stopped.err
        assert "nothing was begun" in stopped.err and not (tmp_path / "small").exists()
        ridge = run("compress", model, "-o", tmp_path / "small", *kept[:4], "--correct", "ridge", *data, "--yes")
        assert ridge.status == 0 and "about 1 s: " in ridge.err
    attributed = run("attribute", model, *data)
    assert attributed.status == 0 and "about 1 s: attribution" in attributed.err
    assert "about" not in run("attribute", model, *data, "--json").err
    again = run(
        "recover", tmp_path / "small", "--teacher", model, "--data", text, "-o", tmp_path / "back", "--steps", 1,
        "--tokens-per-step", 32, "--sequence-length", 32,
    )  # fmt: skip
    assert again.status == 0 and "about 1 s: training" in again.err


def test_it_is_said_of_the_text_that_was_read(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimate, "LEAST", 1e-9)
    model, bad, told = small.save(tmp_path / "model"), tmp_path / "bad.txt", list[Forecast]()
    bad.write_text("\n")
    for command in ("compress", "plan"):
        made = run(command, model, "-o", tmp_path / "out", "--experts", 4, "--calibration", bad)
        refused(made, "bad.txt is empty")
    refused(run("attribute", model, "--calibration", bad), "bad.txt is empty")
    monkeypatch.setattr(estimate, "Machine", Slowest)
    for samples in (4, 8, 10_000):  # of which the text fills no more than it has
        wanted = {"samples": samples, "sequence_length": 32, "calibration": str(small.text_file(tmp_path))}
        compressor.plan(str(model), experts=6, strategy="reap", correct="none", announce=told.append, **wanted)
    few, twice, filled = (forecast.parts[0].seconds for forecast in told)
    assert few < twice < filled < 1000 * few


def test_the_function_gives_it_as_data(tmp_path: Path) -> None:
    model, wanted = small.save(tmp_path / "model"), {"strategy": "reap", "correct": "ridge", "samples": 4}
    made = compressor.forecast(str(model), experts=4, out=tmp_path, sequence_length=32, **wanted)
    assert [part.name for part in made.parts] == ["calibration", "choice", "write", "ridge"]
    assert all(part.seconds >= 0 for part in made.parts) and made.device in ("cpu", "cuda")
    with pytest.raises(CompressionError, match="fewer than the top-k"):
        compressor.forecast(str(model), experts=1, out=tmp_path, **wanted)
