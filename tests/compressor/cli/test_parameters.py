"""Options made from the fields of option classes."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import pytest
import typer
from pydantic import Field
from typer.testing import CliRunner

from compressor.cli.options import KEEP, RUNNING, STEP, described, flag, given, options_of, spread
from compressor.entry_points import STEPS, names, option
from compressor.options import Options
from compressor.recipe.recipe import step_class
from compressor.steps.distill.options import Distill


class Shape(Options):
    number: int = Field(3, ge=1, description="A number. Of something.")
    words: tuple[str, ...] = Field((), description="Words.")
    switch: bool = Field(False, description="A switch.")
    either: bool | None = Field(None, description="Yes, no or neither.")
    kind: Literal["a", "b"] | None = Field(None, description="One of two.")
    plain: int = 0  # which is not for users


@dataclass(frozen=True)
class Plain:
    rate: float | None = option(None, "A rate (default: none).")
    name: str = option("x", "A name.", ("x", "y"))


def call(*arguments: str, **more: Any) -> Any:
    """What a command with these options gets; its output where it gets nothing."""
    seen: list[Any] = []
    spelt = options_of(Shape, RUNNING, names={"number": "count"})

    def command(
        context: typer.Context,
        place: Annotated[str, typer.Argument()],
        shape: Annotated[Shape, spelt],
        named: Annotated[dict[str, Any], options_of(Plain, KEEP)],
        output: Annotated[str, flag("Where.")] = "",
    ) -> None:
        """Say it."""
        seen.append((place, shape, named, given(context)))

    app = typer.Typer()
    app.command()(spread(command, **more))
    done = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "100"})
    return seen[0] if seen else done.output or str(done.exception)


def test_fields_become_options() -> None:
    assert call("here") == ("here", Shape(), {}, {"place"})
    place, shape, named, found = call(
        "here", "--count", "5", "--words", "a", "--words", "b", "--no-either", "--name", "y"
    )
    assert (place, shape, named) == ("here", Shape(number=5, words=("a", "b"), either=False), {"name": "y"})
    assert found == {"place", "count", "words", "either", "name"}
    assert call("here", "--count", "3", "--switch")[1] == Shape(switch=True)
    assert call("here", "--rate", "0.5", "-o", "x")[2] == {"rate": 0.5}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--count", "0"), "number is 0; input should be greater than or equal to 1"),
        (("--kind", "c"), "kind is 'c'; input should be 'a' or 'b'"),
        (("--count", "many"), "Invalid value for '--count'"),
        (("--plain", "1"), "No such option: --plain"),
    ],
)
def test_fields_check_what_is_given(arguments: tuple[str, ...], message: str) -> None:
    assert message in " ".join(call("here", *arguments).split())


def test_help_has_panels_in_their_order_and_defaults_after_the_first_sentence() -> None:
    shown = " ".join(call("--help").replace("│", " ").split())
    assert shown.index("Arguments") < shown.index(KEEP) < shown.index("--rate") < shown.index(RUNNING)
    assert "A number (default: 3). Of something." in shown and "(default: x)" in shown
    assert "--number" not in shown and "--no-switch" not in shown and "--no-either" in shown


def test_shown_options_are_brief_and_in_order_and_the_others_hidden() -> None:
    shown = " ".join(call("--help", shown=("name", "output", "count")).replace("│", " ").split())
    assert shown.index("--name") < shown.index("--output") < shown.index("--count")
    assert "A number (default: 3)." in shown and "Of something" not in shown
    assert "--switch" not in shown and RUNNING not in shown
    assert call("here", "--switch", shown=("name",))[1] == Shape(switch=True)


def test_fields_are_described() -> None:
    found = {name: (each.type_name, each.default) for name, each in described(Shape).items()}
    assert found["number"] == ("int", 3) and found["either"] == ("yes | no", None) and found["kind"] == ("a | b", None)
    assert {name: each.type_name for name, each in described(Plain).items()} == {"rate": "float", "name": "x | y"}
    for name in names(STEPS):
        assert all(each.text.endswith((".", "...")) for each in described(step_class(name)).values())


def test_a_command_s_options_are_the_step_s_fields() -> None:
    assert [field for field, _ in options_of(Distill, STEP)] == [*Distill.model_fields][1:]
