"""The generated reference has every command, step and option, and the schemas have the fields that the program has."""

from dataclasses import fields
from typing import Any

from compressor.model.serving import RULES
from compressor.recipe.plan import ExpertPlan, Group, LayerPlan, Source
from compressor.recipe.steps_plan import FORMAT, Plan, PlannedStep
from scripts.write_docs import reference
from tests.support.doc_pages import DOCS


def names(shape: type) -> set[str]:
    return {entry.name for entry in fields(shape)}


def test_the_page_of_commands_has_every_command_and_option() -> None:
    text = reference.commands_page()
    for name, command in reference.commands().items():
        section = text.split(f"\n## {name}\n")[1].split("\n## ")[0]
        shorthands = text.split("\n## Shorthands of compress\n")[1] if name == "compress" else ""
        for entry in command.params:
            if entry.hidden:
                assert name != "compress" or all(f"`{option}" in shorthands for option in entry.opts)
                continue
            assert all(f"`{option}" in section for option in entry.opts if option.startswith("-"))
            assert not entry.help or " ".join(entry.help.split())[:20].replace("<", "&lt;") in section


def test_the_page_of_commands_has_every_step_and_option() -> None:
    text = reference.commands_page().split("## Steps of a recipe")[1]
    for step in reference.DESCRIBED:
        name = getattr(step, "name", "correct, of prune and constants")
        section = text.split(f"\n### {name}\n")[1].split("\n### ")[0]
        assert all(f"`{field}`" in section for field in step.model_fields)


def test_each_table_has_its_place() -> None:
    for page, mark, _ in reference.TABLES:
        assert (DOCS / page).read_text(encoding="utf-8").count(mark) == 1


def test_the_tables_of_the_plan_have_every_field() -> None:
    sections = dict(section.split("\n", 1) for section in reference.plan_tables().split("## ")[1:])
    for title, name, definition in reference.OBJECTS:
        schema = reference.schema(name)
        shape = schema if definition is None else schema["$defs"][definition]
        assert all(f"| `{field}` |" in sections[title] for field in shape["properties"]), title


def test_the_schema_has_the_fields_of_the_dataclasses() -> None:
    plan: dict[str, Any] = reference.schema("plan")
    parts = plan["$defs"]
    assert set(plan["properties"]) == names(Plan) | {"format"}
    assert plan["properties"]["format"]["const"] == FORMAT
    assert set(parts["source"]["properties"]) == names(Source)
    assert set(parts["step"]["properties"]) == names(PlannedStep) - {"decision"} | {"plan"}
    assert set(parts["layer"]["properties"]) == names(LayerPlan) | {"dropped"}
    assert set(parts["group"]["properties"]) == names(Group)
    assert set(parts["pruned"]["properties"]) <= names(ExpertPlan)


def test_the_schema_has_the_options_of_the_steps() -> None:
    assert reference.schema_with_options() == reference.schema("plan"), "run python -m scripts.write_docs schema"
    for step in reference.STEPS:
        described = reference.schema("plan")["$defs"][f"{step.name}_options"]["properties"]
        assert set(described) == set(step.model_fields) and all("description" in each for each in described.values())


def test_the_table_of_servers_has_every_rule() -> None:
    rows = reference.servers_table().splitlines()[2:]
    assert [row.split(" | ")[0].removeprefix("| ") for row in rows] == [rule.server for rule in RULES]
    assert all(rule.needs in row for rule, row in zip(RULES, rows, strict=True))
