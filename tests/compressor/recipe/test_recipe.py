"""Recipes: YAML there and back, what a plan's recipe says, orders of steps, and files refused in one sentence."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from compressor.entry_points import STEPS
from compressor.errors import CompressionError
from compressor.model.opened import OpenModel
from compressor.pipeline.resolve import check_order, prepare, stage_numbers
from compressor.recipe.plan import Source
from compressor.recipe.recipe import Recipe, make_step, read_recipe, recipe_of_plan, recipe_yaml, refuse_missing
from compressor.recipe.step import TextOptions
from compressor.recipe.steps_plan import Plan, PlannedStep
from compressor.steps.correct.options import Correct
from compressor.steps.distill.options import Distill
from compressor.steps.prune.options import Prune
from compressor.steps.split.options import Split
from tests.support.command_line import Run
from tests.support.opened_models import opened
from tests.support.plugins import install


def a_plan(calibration: Any = None, **options: Any) -> Plan:
    """A plan of one step, by its options."""
    step = PlannedStep("prune", {"strategy": "hc-smoe", "experts": 2, **options})
    return Plan(Source("org/moe", "abc123", "f" * 64), (step,), calibration, seed=7)


def said(plan: Plan) -> dict[str, Any]:
    return dict(yaml.safe_load(recipe_yaml(recipe_of_plan(plan))))


def test_a_plan_without_data_names_no_calibration() -> None:
    assert said(a_plan(options={"merge": "max"})) == {
        "model": "org/moe",
        "revision": "abc123",
        "calibration": {"samples": 256, "sequence_length": 512},
        "seed": 7,
        "steps": [{"prune": {"strategy": "hc-smoe", "experts": 2, "options": {"merge": "max"}}}],
    }


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
    steps = (Split("auto"), Prune(ratio=0.25, protect=({"layer": 1, "expert": 2},)), Correct(), Distill(steps=9))
    whole = Recipe(
        model="org/moe", revision="abc", base="org/base", calibration=TextOptions(data="demo", samples=3), seed=5,
        dtype="bfloat16", steps=steps, gate={"tasks": ["piqa"], "max_drop": 0.5}, output={"max_shard_bytes": 9},
    )  # fmt: skip
    path = tmp_path / "recipe.yaml"
    for recipe in (whole, Recipe(model="org/moe"), Recipe(steps=["prune", {"distill": {"stream": True}}])):
        path.write_bytes(b"# heading\n" + recipe_yaml(recipe))
        assert read_recipe(path) == recipe
    assert yaml.safe_load(recipe_yaml(whole))["steps"][2:] == ["correct", {"distill": {"steps": 9}}]


# --- the order of steps -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("steps", "stages"),
    [
        ("split prune correct", [0, 0, 0]),
        ("prune correct prune correct", [0, 0, 1, 1]),
        ("prune correct routers distill", [0, 0, 1, 2]),
        ("routers prune", [0, 1]),
        ("constants correct", [0, 0]),
    ],
)
def test_layerwise_steps_that_follow_each_other_are_one_stage(steps: str, stages: list[int]) -> None:
    made = [make_step(name, {}) for name in steps.split()]
    check_order(made)
    assert stage_numbers(made) == stages


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ("prune split", r"steps\[1\]: split cannot stand after prune: experts are split before anything else"),
        ("split split prune", r"steps\[1\]: split cannot stand after split"),
        ("prune correct constants", r"steps\[2\]: constants cannot stand after prune: constants stand for whole"),
        ("constants constants", r"steps\[1\]: constants cannot stand after constants"),
        ("constants distill", r"steps\[1\]: distill cannot stand after constants: stock transformers cannot load"),
        ("correct", r"steps\[0\]: correct works on what prune or constants leaves; put prune right before it"),
        ("prune distill correct", r"steps\[2\]: correct works on what prune or constants leaves"),
        ("split correct", r"steps\[1\]: correct works on what prune"),
    ],
)
def test_orders_that_cannot_work_are_refused(steps: str, message: str) -> None:
    with pytest.raises(CompressionError, match=message):
        check_order([make_step(name, {}) for name in steps.split()])


def test_what_is_to_be_done_is_settled_on_a_model(tmp_path: Path) -> None:
    model = opened("mixtral", tmp_path)[1]

    def settled(model: OpenModel, *steps: Any) -> list[Any]:
        return list(prepare(Recipe(model="x", steps=steps), model, model, None).options)

    drop = {"prune": {"experts": 4, "strategy": "model-centric"}}
    assert settled(model, {"split": {"parts": 1}}, drop, {"correct": {"method": "auto"}}) == [
        Prune("model-centric", experts=4)
    ]
    with pytest.raises(CompressionError, match="the recipe has no step that does anything; add one, such as prune"):
        settled(model, {"split": {"parts": 1}}, {"distill": {"train": "none"}})
    with pytest.raises(CompressionError, match=r"steps\[1\]: split cannot stand after prune"):
        settled(model, drop, "split")


# --- an option is declared once ---------------------------------------------------------------------------------------

THINNED = '''
"""A step like prune, with a field of its own."""
from typing import ClassVar
from pydantic import Field
from compressor.steps.prune.options import Prune
class Thinned(Prune):
    """Prune, gently."""
    name: ClassVar[str] = "thinned"
    gentleness: int = Field(3, ge=1, description="How gently.")
'''


def test_a_new_field_of_a_step_is_an_option_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    install(tmp_path / "site", monkeypatch, "thinned", THINNED, group=STEPS)
    (tmp_path / "site" / "thinned_plugin-1.0.dist-info" / "entry_points.txt").write_text(
        f"[{STEPS}]\nthinned = thinned_plugin:Thinned\n"
    )
    path = tmp_path / "recipe.yaml"
    path.write_text("model: org/moe\nsteps: [thinned: {experts: 4, gentleness: 5}]")
    recipe = read_recipe(path)
    assert recipe.steps[0].gentleness == 5 and b"gentleness: 5" in recipe_yaml(recipe)  # type: ignore[attr-defined]
    plans = [
        Plan(Source("org/moe", None, "f" * 64), (PlannedStep("thinned", make_step("thinned", options).to_dict()),))
        for options in ({"gentleness": 5}, {})
    ]
    assert json.loads(plans[0].to_json())["steps"][0]["options"]["gentleness"] == 5
    assert plans[0].digest() != plans[1].digest()
    again = recipe_of_plan(Plan.from_dict(json.loads(plans[0].to_json()))).steps
    assert again == (make_step("thinned", {"gentleness": 5}),)
    ask = ("compress", path, "-o", tmp_path / "out", "--set")
    assert "gentleness is 0; input should be greater than or equal to 1" in run(*ask, "thinned.gentleness=0").err
    assert "no option 'gentlenes'; did you mean 'gentleness'" in run(*ask, "thinned.gentlenes=2").err
    assert "gentleness" in run("list", "steps").out
    install(tmp_path / "other", monkeypatch, "prune", THINNED, group=STEPS)
    with pytest.raises(CompressionError, match="two packages offer 'prune'"):
        make_step("prune", {})
    install(tmp_path / "odd", monkeypatch, "odd", THINNED, group=STEPS)
    with pytest.raises(CompressionError, match="step 'odd' is no plugin: its entry point should be a Step"):
        make_step("odd", {})


# --- files ------------------------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[str, str]] = {
    "misspelt": ("sed: 3", "has no field 'sed'; did you mean 'seed'"),
    "misspelt, of a step": ("steps: [prune: {stratgy: x}]", r"prune has no option 'stratgy' at steps\[0\]; did you"),
    "unknown": ("zzz: 3", "has no field 'zzz'; known are revision, dtype, model, base"),
    "no name": ("3: 4", "has no field 3; known are"),
    "text for a number": ("seed: many", "seed is 'many'; input should be a valid integer"),
    "a switch for a number": ("steps: [prune: {experts: true}]", "experts is True, it should be a number"),
    "a number for a switch": ("steps: [prune: {sequential: 3}]", "sequential is 3; input should be a valid boolean"),
    "steps as a mapping": ("steps: {prune: {}}", "steps should be a list, such as"),
    "two steps in one": ("steps: [{prune: {}, correct: {}}]", r"steps\[0\] is .* it should be one step, such as"),
    "a step that is none": ("steps: [3]", r"steps\[0\] is 3; it should be one step"),
    "an unknown step": ("steps: [prune, distil]", r"no step 'distil' at steps\[1\]; did you mean 'distill'"),
    "a huge number": (f"seed: {'9' * 400}", "seed is 9+"),
    "a number out of range": ("seed: -1", "seed is -1; input should be greater than or equal to 0"),
    "no task": ("gate: {tasks: []}", "a gate judges tasks, answers or text; name tasks, prompts or text"),
    "a tag": ("model: !!python/object/apply:os.system ['true']", "is not valid YAML .*os.system"),
    "a tag of a number": ('seed: !!int ""', "is not valid YAML"),
    "a tag of a time": ("seed: !!timestamp x", "seed is 'x'; input should be"),
    "a day that is none": ("seed: 2020-13-45", "seed is '2020-13-45'; input should be a valid integer"),
    "a field twice": ("seed: 1\nmodel: a\nseed: 2", r"is not valid YAML \(seed is given twice .*line 3"),
    "an option twice": ("steps: [prune: {ratio: 0.5, ratio: 0.5}]", r"is not valid YAML \(ratio is given twice"),
    "a list as a name": ("? [1]\n: 2", "is not valid YAML"),
    "broken": ("seed: [4", "is not valid YAML"),
    "empty": ("", "should hold a mapping"),
    "deep": ("steps: " + "[" * 500, "is not valid YAML"),
    "deeper than PyYAML reads": ("steps: " + "[" * 3000, "is not valid YAML"),
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


def test_what_is_not_here_is_to_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def refuse(data: Any = None, **fields: Any) -> None:
        refuse_missing(Path("recipe.yaml"), Recipe(calibration={"data": data}, **fields))

    with pytest.raises(CompressionError, match=r"the model 'gone', which is no folder here; add --set model=FOLDER"):
        refuse(model="gone")
    with pytest.raises(CompressionError, match=r"the base 'gone', which is no folder here; add --set base=FOLDER"):
        refuse(base="gone")
    for source in ("gone.txt", "gone.txt=2"):
        with pytest.raises(CompressionError, match=r"the text gone\.txt, .*; name it with --calibration"):
            refuse(["demo", source])
    (tmp_path / "here.txt").touch()
    refuse(["here.txt=2", "org/data"], model="org/moe")
    refuse("here.txt", model="moe", revision="abc")
