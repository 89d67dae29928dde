"""Recipes: YAML there and back, what a plan's recipe says, orders of steps, and files refused in one sentence."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from compressor.errors import CompressionError
from compressor.pipeline.resolve import check_order
from compressor.recipe.plan import Source
from compressor.recipe.recipe import Recipe, make_step, read_recipe, recipe_of_plan, recipe_yaml
from compressor.recipe.step import TextOptions
from compressor.recipe.steps_plan import Plan, PlannedStep
from compressor.steps.distill.options import Distill
from compressor.steps.prune.options import Prune


def a_plan(calibration: Any = None, **options: Any) -> Plan:
    step = PlannedStep("prune", {"strategy": "hc-smoe", "experts": 2, **options})
    return Plan(Source("org/moe", "abc123", "f" * 64), (step,), calibration, seed=7)


def said(plan: Plan) -> dict[str, Any]:
    return dict(yaml.safe_load(recipe_yaml(recipe_of_plan(plan))))


def test_texts_are_named_without_folders_and_with_weights_where_they_differ() -> None:
    def text(*sources: tuple[str, float], **asked: int) -> Any:
        entries = [{"source": name, "weight": weight} for name, weight in sources]
        identity = {"source": " + ".join(name for name, _ in sources), "sources": entries, "asked": asked}
        return said(a_plan(identity))["calibration"]

    found = text(("/home/me/a.txt", 0.75), ("org/data", 0.25), samples=32, sequence_length=64)
    assert found == {"data": ["a.txt=0.75", "org/data=0.25"], "samples": 32, "sequence_length": 64}
    assert text(("demo", 0.5), ("org/data", 0.5))["data"] == ["demo", "org/data"]
    assert text(("a=2.txt", 0.5), ("demo", 0.5))["data"] == ["a=2.txt=0.5", "demo=0.5"]


def test_a_recipe_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    prune = Prune(ratio=0.25, protect=({"layer": 1, "expert": 2},), split="auto", correct={"steps": 9})
    steps = (prune, Prune(experts=2, correct="ridge"), Distill(steps=9))
    whole = Recipe(
        model="org/moe", revision="abc", base="org/base", calibration=TextOptions(data="demo", samples=3), seed=5,
        dtype="bfloat16", steps=steps, gate={"tasks": ["piqa"], "max_drop": 0.5}, output={"max_shard_bytes": 9},
    )  # fmt: skip
    path = tmp_path / "recipe.yaml"
    for recipe in (whole, Recipe(model="org/moe"), Recipe(steps=["prune", {"distill": {"stream": True}}])):
        path.write_bytes(b"# heading\n" + recipe_yaml(recipe))
        assert read_recipe(path) == recipe
    assert yaml.safe_load(recipe_yaml(whole))["steps"][1:] == [
        {"prune": {"experts": 2, "correct": "ridge"}},
        {"distill": {"steps": 9}},
    ]


# --- the order of steps -----------------------------------------------------------------------------------------------


SPLIT, REFIT = Prune(split=2), Prune(correct="ridge")


@pytest.mark.parametrize(
    "steps",
    [
        (SPLIT, "routers", "distill", "quantize"),
        (REFIT, REFIT),
        ("routers", SPLIT),
        ("quantize", "prune"),
        ("constants",),
    ],
)
def test_orders_that_work(steps: tuple[Any, ...]) -> None:
    check_order([make_step(step, {}) if isinstance(step, str) else step for step in steps])


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        (("prune", SPLIT), r"steps\[1\]: prune cannot stand after prune: experts are split before anything else"),
        (("quantize", SPLIT), r"steps\[1\]: prune cannot stand after quantize: experts are split before"),
        (("quantize", REFIT), r"steps\[1\]: prune cannot stand after quantize: it would write the experts"),
        (("prune", "constants"), r"steps\[1\]: constants cannot stand after prune: constants are measured on"),
        (("constants", "constants"), r"steps\[1\]: constants cannot stand after constants"),
        (("constants", "distill"), r"steps\[1\]: distill cannot stand after constants: stock transformers cannot"),
        (("quantize", "quantize"), r"steps\[1\]: quantize cannot stand after quantize: weights are quantised once"),
    ],
)
def test_orders_that_cannot_work_are_refused(steps: tuple[Any, ...], message: str) -> None:
    with pytest.raises(CompressionError, match=message):
        check_order([make_step(step, {}) if isinstance(step, str) else step for step in steps])


# --- files ------------------------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[str, str]] = {
    "misspelt": ("sed: 3", "has no field 'sed'; did you mean 'seed'"),
    "misspelt, of a step": ("steps: [prune: {stratgy: x}]", r"prune has no option 'stratgy' at steps\[0\]; did you"),
    "unknown": ("zzz: 3", "has no field 'zzz'; known are revision, dtype, model, base"),
    "no name": ("3: 4", "has no field 3; known are"),
    "text for a number": ("seed: many", "seed should be a whole number, it is 'many'"),
    "a switch for a number": ("steps: [prune: {experts: true}]", "experts is True, it should be a number"),
    "steps as a mapping": ("steps: {prune: {}}", "steps should be a list, such as"),
    "two steps in one": ("steps: [{prune: {}, correct: {}}]", r"steps\[0\] is .* it should be one step, such as"),
    "a step that is none": ("steps: [3]", r"steps\[0\] is 3; it should be one step"),
    "an unknown step": ("steps: [prune, distil]", r"no step 'distil' at steps\[1\]; did you mean 'distill'"),
    "a huge number": (f"seed: {'9' * 400}", "seed has too many digits"),
    "a number out of range": ("seed: -1", "seed should be greater than or equal to 0, it is -1"),
    "a correction that is none": ("steps: [prune: {correct: tuned}]", r"correct: method should be"),
    "no task": ("gate: {tasks: []}", "a gate judges tasks, answers or text; name tasks, prompts or text"),
    "a tag": ("model: !!python/object/apply:os.system ['true']", "is not valid YAML .*os.system"),
    "a field twice": ("seed: 1\nmodel: a\nseed: 2", r"is not valid YAML \(seed is given twice .*line 3"),
    "an option twice": ("steps: [prune: {ratio: 0.5, ratio: 0.5}]", r"is not valid YAML \(ratio is given twice"),
    "broken": ("seed: [4", "is not valid YAML"),
    "empty": ("", "should hold a mapping"),
    "deeper than PyYAML reads": ("steps: " + "[" * 3000, "is not valid YAML .nested too deeply"),
    "endless digits": (f"seed: {'9' * 5000}", "is not valid YAML"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_recipe_is_refused(name: str, tmp_path: Path) -> None:
    text, message = REFUSED[name]
    (tmp_path / "recipe.yaml").write_text(text)
    with pytest.raises(CompressionError, match=message) as fault:
        read_recipe(tmp_path / "recipe.yaml")
    assert "\n" not in str(fault.value) and len(str(fault.value)) < 400


def test_what_is_no_text_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    with pytest.raises(CompressionError, match="is not a file"):
        read_recipe(path)
    with pytest.raises(CompressionError, match="is not a file"):
        read_recipe(tmp_path)
    path.write_bytes(b"experts: \xff")
    with pytest.raises(CompressionError, match="is not valid YAML"):
        read_recipe(path)
