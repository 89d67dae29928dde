"""Write the tables of docs/reference/plan.md from the JSON Schemas beside it.

python -m scripts.write_schema_reference            # print the page
python -m scripts.write_schema_reference --write    # put the tables into docs/reference/plan.md
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "reference"
PAGE = FOLDER / "plan.md"
BEGIN, END = "<!-- tables: begin -->", "<!-- tables: end -->"
TITLES = (  # of each object, with the file and the definition that describe it
    ("The plan", "plan", None),
    ("`source`", "plan", "source"),
    ("`calibration`", "plan", "calibration"),
    ("`correction`", "plan", "correction"),
    ("`bake`", "plan", "bake"),
    ("`recover`", "plan", "recover"),
    ("`constants`", "plan", "constants"),
    ("`split`", "plan", "split"),
    ("An entry of `layers`", "plan", "layer"),
    ("An entry of `groups`", "plan", "group"),
    ("compression.json", "compression", None),
)


def schema(name: str) -> dict[str, Any]:
    """One of the two schemas: plan or compression."""
    content: dict[str, Any] = json.loads((FOLDER / f"{name}.schema.json").read_text(encoding="utf-8"))
    return content


def tables() -> str:
    """A heading and a table for each object, as Markdown."""
    parts = []
    for title, name, definition in TITLES:
        whole = schema(name)
        shape = whole if definition is None else whole["$defs"][definition]
        parts.append("\n".join([f"## {title}", "", *_rows(shape)]))
    return "\n\n".join(parts)


def _rows(shape: dict[str, Any]) -> Iterator[str]:
    yield "| field | type | meaning |"
    yield "|---|---|---|"
    for name, entry in shape["properties"].items():
        needed = "" if name in shape["required"] else ", optional"
        yield f"| `{name}` | {_kind(entry)}{needed} | {entry['description']} |"


def _kind(entry: dict[str, Any]) -> str:
    if "const" in entry:
        return f"`{json.dumps(entry['const'])}`"
    if "enum" in entry:
        return " or ".join(f"`{json.dumps(value)}`" for value in entry["enum"])
    if "anyOf" in entry:
        return " or ".join(_kind(each) for each in entry["anyOf"])
    if "$ref" in entry:
        return "list of integers" if entry["$ref"].endswith("expertList") else "object"
    kinds = [entry["type"]] if isinstance(entry["type"], str) else entry["type"]
    if kinds == ["array"]:
        return f"list of {_kind(entry['items'])}s"
    return " or ".join(kinds)


def page(text: str) -> str:
    """The page with its tables as they should be."""
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n\n{tables()}\n\n{END}{rest.split(END)[1]}"


def main() -> None:
    """Print the page, or write it."""
    parser = argparse.ArgumentParser(description="Write the tables of the plan's reference.")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.name}")
    made = page(PAGE.read_text(encoding="utf-8"))
    if not parser.parse_args().write:
        print(made)
        return
    PAGE.write_text(made, encoding="utf-8")


if __name__ == "__main__":
    main()
