"""The reference pages are what their scripts would write, and the schemas have the fields that the program has."""

from dataclasses import fields
from typing import Any

from compressor.recipe.layer import Group, LayerPlan
from compressor.recipe.plan import FORMAT, CompressionPlan, Source
from compressor.steps.correct.refit import METHODS, Correction
from scripts import write_cli_reference, write_schema_reference


def names(shape: type) -> set[str]:
    return {entry.name for entry in fields(shape)}


def test_the_page_of_commands_is_up_to_date() -> None:
    written = write_cli_reference.PAGE.read_text(encoding="utf-8")
    assert written == write_cli_reference.page(), "run python -m scripts.write_cli_reference --write"


def test_the_page_of_commands_has_every_command_and_option() -> None:
    text = write_cli_reference.page()
    for name, command in write_cli_reference.commands().items():
        section = text.split(f"\n## {name}\n")[1].split("\n## ")[0]
        for entry in command.params:
            assert all(f"`{option}" in section for option in entry.opts if option.startswith("-"))
            assert not entry.help or " ".join(entry.help.split())[:20].replace("<", "&lt;") in section


def test_the_tables_of_the_plan_are_up_to_date() -> None:
    text = write_schema_reference.PAGE.read_text(encoding="utf-8")
    assert text == write_schema_reference.page(text), "run python -m scripts.write_schema_reference --write"


def test_the_schema_has_the_fields_of_the_dataclasses() -> None:
    plan: dict[str, Any] = write_schema_reference.schema("plan")
    parts = plan["$defs"]
    assert set(plan["properties"]) == names(CompressionPlan) | {"format"}
    assert plan["properties"]["format"]["const"] == FORMAT
    assert set(parts["source"]["properties"]) == names(Source)
    assert set(parts["layer"]["properties"]) == names(LayerPlan) | {"dropped"}
    assert set(parts["group"]["properties"]) == names(Group)
    assert set(parts["correction"]["properties"]) == names(Correction) | {"dtype"}
    assert {*parts["correction"]["properties"]["method"]["enum"], "none"} == set(METHODS)
