"""Options made from the fields of dataclasses and of steps."""

from dataclasses import dataclass
from typing import Annotated, Any

import typer
from typer.testing import CliRunner

from compressor.cli.options import KEEP, RUNNING, STEPS, field_options, flag, given, spread
from compressor.cli.step_flags import PANELS
from compressor.entry_points import STEPS as GROUP
from compressor.entry_points import names
from compressor.recipe.recipe import FIELDS, step_class
from compressor.steps.distill.step import Distill


@dataclass(frozen=True)
class Shape:
    number: Annotated[int, flag("A number.", RUNNING, min=1)] = 3
    words: Annotated[list[str] | None, flag("Words.", KEEP, "--word")] = None


def call(*arguments: str, only: tuple[str, ...] = ()) -> Any:
    """What a command with these options gets; its exit status where it gets nothing."""
    seen: list[Any] = []

    def command(
        context: typer.Context,
        place: Annotated[str, typer.Argument()],
        shape: Annotated[Shape, only],
        plain: bool = False,
    ) -> None:
        """Say it."""
        seen.append((place, shape, plain, given(context)))

    app = typer.Typer()
    app.command()(spread(command))
    status = CliRunner().invoke(app, list(arguments)).exit_code
    return seen[0] if seen else status


def test_a_dataclass_becomes_its_options() -> None:
    assert call("here") == ("here", Shape(), False, {"place"})
    place, shape, plain, named = call("here", "--number", "5", "--word", "a", "--word", "b", "--plain")
    assert (place, shape, plain) == ("here", Shape(5, ["a", "b"]), True)
    assert named == {"place", "number", "words", "plain"}
    assert call("here", "--number", "0") == 2


def test_some_of_its_fields() -> None:
    assert call("here", "--number", "5", only=("number",))[1] == Shape(5)
    assert call("here", "--word", "a", only=("number",)) == 2


def test_a_default_that_is_given_counts_as_given() -> None:
    assert call("here", "--number", "3")[3] == {"place", "number"}


def test_panels_stand_in_their_order() -> None:
    def command(place: Annotated[str, typer.Argument()], shape: Shape) -> None:
        """Say it."""

    app = typer.Typer()
    app.command()(spread(command))
    shown = CliRunner().invoke(app, ["--help"]).output
    assert shown.index("Arguments") < shown.index(KEEP) < shown.index("--word") < shown.index(RUNNING)


def test_every_option_of_a_step_is_described_and_every_flag_is_one() -> None:
    for name in names(GROUP):
        assert all(str(entry.description).endswith((".", "...")) for entry in step_class(name).model_fields.values())
    for step, _, flags in PANELS:
        assert {FIELDS.get(flag, ("", flag))[1] for flag in flags} <= set(step.model_fields)


def test_a_step_s_fields_are_options_with_their_defaults() -> None:
    seen: list[dict[str, Any]] = []

    def command(options: Annotated[dict[str, Any], field_options(Distill, STEPS)]) -> None:
        """Say it."""
        seen.append(options)

    app = typer.Typer()
    app.command()(spread(command))
    assert CliRunner().invoke(app, []).exit_code == 0
    assert CliRunner().invoke(app, ["--train", "lora", "--learning-rate", "0.5", "--stream"]).exit_code == 0
    assert CliRunner().invoke(app, ["--steps", "many"]).exit_code == 2
    plain = {name: value for name, value in dict(Distill()).items() if name != "calibration"}
    assert seen == [plain, {**plain, "train": "lora", "learning_rate": 0.5, "stream": True}]
