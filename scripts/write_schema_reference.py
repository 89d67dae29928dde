"""Write the options of steps into docs/reference/plan.schema.json, and build tables of docs/reference/plan.md from it.

python -m scripts.write_schema_reference            # print the tables, which `make docs` puts into the site
python -m scripts.write_schema_reference --write    # put the options into the schema
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from compressor import Constants, Distill, Prune, Quantize, Routers
from compressor.records import readable_json

STEPS = (Prune, Constants, Routers, Distill, Quantize)
FOLDER = Path(__file__).resolve().parent.parent / "docs" / "reference"
PAGE = "reference/plan.md"  # in the site
MARK = "<!-- tables -->"
TITLES = (  # of each object, with the file and the definition that describe it
    ("The plan", "plan", None),
    ("`source`", "plan", "source"),
    ("`calibration`", "plan", "calibration"),
    ("An entry of `steps`", "plan", "step"),
    ("`split` of a plan of `prune`", "plan", "split"),
    ("`plan` of `prune`", "plan", "pruned"),
    ("`plan` of `constants`", "plan", "constants"),
    ("`plan` of `quantize`", "plan", "quantized"),
    ("`result` of `routers` and `distill`", "plan", "evaluated"),
    ("An entry of `layers`", "plan", "layer"),
    ("An entry of `groups`", "plan", "group"),
    ("compression.json", "compression", None),
    ("`heldout`", "compression", "heldout"),
    ("An entry of `domains`", "compression", "domain"),
    ("Its `loss`, `kl` and `flips`", "compression", "paired"),
)


def schema(name: str) -> dict[str, Any]:
    """One of the two schemas: plan or compression."""
    content: dict[str, Any] = json.loads(
        (FOLDER / f"{name}.schema.json").read_text(encoding="utf-8")
    )
    return content


def with_options() -> dict[str, Any]:
    """The schema of plans with each step's options as its class declares them."""
    whole = schema("plan")
    parts = {name: part for name, part in whole["$defs"].items() if not name.endswith("_options")}
    for step in STEPS:
        declared = json.dumps(step.model_json_schema(ref_template="#/$defs/{model}_options"))
        found = json.loads(declared.replace("\\n", " "))  # a description on one line
        parts |= {f"{name}_options": part for name, part in found.pop("$defs", {}).items()}
        parts[f"{step.name}_options"] = found
    return {**whole, "$defs": parts}


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


def main() -> None:
    """Print the tables, or write the schema."""
    parser = argparse.ArgumentParser(
        description="Write the plan's schema, or print the tables made of it."
    )
    parser.add_argument("--write", action="store_true", help="write plan.schema.json")
    if parser.parse_args().write:
        (FOLDER / "plan.schema.json").write_text(readable_json(with_options()), encoding="utf-8")
    else:
        print(tables())


if __name__ == "__main__":
    main()
