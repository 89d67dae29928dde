"""Options made from the fields of dataclasses."""

from dataclasses import dataclass, fields
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from compressor.cli.parameters import given, spread
from compressor.planning.request import KEEP, RUNNING, Request, described


@dataclass(frozen=True)
class Shape:
    """Two described fields and one that is not."""

    number: int = described(3, RUNNING, "A number.", min=1)
    words: list[str] | None = described(None, KEEP, "Words.", name="--word")
    hidden: str = "kept"


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
    place, shape, plain, said = call("here", "--number", "5", "--word", "a", "--word", "b", "--plain")
    assert (place, shape, plain) == ("here", Shape(5, ["a", "b"]), True)
    assert said == {"place", "number", "words", "plain"}
    assert call("here", "--number", "0") == 2
    assert call("here", "--hidden", "x") == 2


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


def test_every_field_of_a_request_is_an_option_but_the_strategy_s_own() -> None:
    others = [entry.name for entry in fields(Request) if "help" not in entry.metadata]
    assert others == ["constants", "options"]  # --format asks for the former
    assert all(entry.metadata["help"].endswith((".", "...")) for entry in fields(Request) if entry.metadata)


def test_a_request_or_its_fields() -> None:
    whole = Request(experts=4)
    assert Request.of(whole, {}) is whole and Request.of(None, {"experts": 4}) == whole
    with pytest.raises(TypeError, match="not both"):
        Request.of(whole, {"experts": 4})
