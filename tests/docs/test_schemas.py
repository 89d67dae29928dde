"""Plans and compression.json that the program makes pass their JSON Schemas; changed ones do not."""

import copy
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from referencing import Registry, Resource

from tests.support import small
from tests.support.command_line import captured
from tests.support.doc_pages import DOCS, blocks

FOLDER = DOCS / "reference"
Content = dict[str, Any]
FEW = (
    "routers.rounds=1", "routers.sequences=8", "routers.sequence_length=16",
    "distill.steps=1", "distill.tokens_per_step=64", "distill.sequence_length=16",
)  # fmt: skip


def load(name: str) -> Content:
    content: Content = json.loads((FOLDER / f"{name}.schema.json").read_text(encoding="utf-8"))
    return content


def validator(name: str, part: str | None = None) -> Draft202012Validator:
    schemas = [(f"{each}.schema.json", Resource.from_contents(load(each))) for each in ("plan", "compression")]
    reference = f"{name}.schema.json" + (f"#/$defs/{part}" if part else "")
    return Draft202012Validator({"$ref": reference}, registry=Registry().with_resources(schemas))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    model, text = small.save(folder / "model"), small.text_file(folder)
    (folder / "protected.json").write_text('[{"layer": 0, "expert": 1}]')
    data = ("--calibration", text, "--samples", 8, "--sequence-length", 16)
    trained = ("--routers", "router", "--distill", "experts", *(f"--set={option}" for option in FEW))
    asked = {
        "merged": ("plan", "--strategy", "router-guided", *data),
        "scaled": ("plan", "--strategy", "model-centric", "--merge", "learned", *data),
        "from-weights": ("plan", "--strategy", "model-centric", "--protect", folder / "protected.json"),
        "in-order": ("plan", "--strategy", "reap", "--sequential", *data),
        "several": ("plan", "--strategy", "reap", *data, "--calibration", "demo"),
        "dropped": ("compress", "--strategy", "reap", *data),
        "refitted": ("compress", "--strategy", "reap", "--correct", "ridge", *data),
        "constants": ("compress", "--format", "mone", *data),
        "split-and-trained": ("compress", "--strategy", "reap", "--split", 2, *data, *trained),
        "quantised": ("compress", "--strategy", "reap", "--set", "quantize.scheme=int8", *data),
    }
    for name, (command, *options) in asked.items():
        target = folder / (f"{name}.json" if command == "plan" else name)
        done = captured(command, model, "-o", target, "--experts", 4, *options)
        assert done.status == 0, done.err
    done = captured("split", model, "-o", folder / "split", "--parts", 2, "--calibration", text, *data[2:])
    assert done.status == 0, done.err
    return folder


def test_the_schemas_are_schemas() -> None:
    for name in ("plan", "compression"):
        Draft202012Validator.check_schema(load(name))


def test_what_is_made_passes(made: Path) -> None:
    plans = [path for path in made.glob("*.json") if path.name != "protected.json"]
    outputs = list(made.glob("*/compression.json"))
    assert len(plans) >= 5 and len(outputs) == 6
    for name, files in (("plan", plans), ("compression", outputs)):
        for file in files:
            validator(name).validate(json.loads(file.read_text(encoding="utf-8")))


def changed(content: Content, change: Callable[[Content], Any]) -> Content:
    content = copy.deepcopy(content)
    change(content)
    return content


def prune(plan: Content) -> Content:
    (step,) = [step for step in plan["steps"] if step["name"] == "prune"]
    decided: Content = step["plan"]
    return decided


CHANGES: dict[str, Callable[[Content], Any]] = {
    "another format": lambda plan: plan.update(format="moe-compressor-plan/9"),
    "an unknown field": lambda plan: plan.update(expert=4),
    "a missing field": lambda plan: plan.pop("steps"),
    "a step without a name": lambda plan: plan["steps"][0].pop("name"),
    "an unknown field of a step": lambda plan: plan["steps"][0].update(opions={}),
    "a number as text": lambda plan: prune(plan).update(experts="4"),
    "no fingerprint": lambda plan: plan["source"].update(fingerprint="abc"),
    "an unknown correction": lambda plan: plan["steps"][0]["options"].update(correct={"method": "magic"}),
    "an unknown option": lambda plan: plan["steps"].append({"name": "distill", "options": {"step": 4}}),
    "an expert that is no number": lambda plan: prune(plan)["layers"][0]["groups"][0].update(members=["0"]),
    "an expert twice in a group": lambda plan: prune(plan)["layers"][0]["groups"][0].update(members=[0, 0]),
    "an unknown number format": lambda plan: plan["steps"].append({"name": "quantize", "options": {"scheme": "int5"}}),
    "a negative scale": lambda plan: prune(plan)["layers"][0]["groups"][0].update(scale=-1.0),
    "a misspelt field of a group": lambda plan: prune(plan)["layers"][0]["groups"][0].update(coefficents=[1.0]),
    "a fraction of an expert dropped": lambda plan: prune(plan)["layers"][0].update(dropped=[0.5]),
    "protected experts as text": lambda plan: prune(plan).update(protected={"module": "0, 1"}),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_plan_is_refused(made: Path, name: str) -> None:
    plan = json.loads((made / "merged.json").read_text(encoding="utf-8"))
    assert validator("plan").is_valid(plan)
    assert not validator("plan").is_valid(changed(plan, CHANGES[name]))
    record = json.loads((made / "dropped" / "compression.json").read_text(encoding="utf-8"))
    assert not validator("compression").is_valid(changed(record, lambda content: CHANGES[name](content["plan"])))


@pytest.mark.parametrize("field", ["tool", "plan_digest", "bytes"])
def test_a_changed_record_is_refused(made: Path, field: str) -> None:
    record = json.loads((made / "dropped" / "compression.json").read_text(encoding="utf-8"))
    assert not validator("compression").is_valid(changed(record, lambda content: content.pop(field)))
    assert not validator("compression").is_valid(changed(record, lambda content: content.update({field: "x"})))


def test_the_entry_by_hand_passes() -> None:
    (block,) = [block for block in blocks(FOLDER / "plan.md") if block.language == "json"]
    validator("plan", "layer").validate(json.loads(block.text))
    assert re.search(r"keeps two", (FOLDER / "plan.md").read_text(encoding="utf-8"))
