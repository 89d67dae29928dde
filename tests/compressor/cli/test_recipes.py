"""`compress recipe.yaml`: a run repeated from its output, what the command line overrides, and what is refused."""

import json
import shutil
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest
import torch
import yaml
from safetensors.torch import load_file

from compressor.cli.options import described
from compressor.cli.settings import paths_spelled_out, recipe_of, recipe_options
from compressor.errors import CompressionError
from compressor.quality_gate.options import GateOptions
from compressor.recipe.recipe import OutputOptions, Recipe, step_class
from compressor.recipe.step import EmphasisOptions, TextOptions
from compressor.steps.correct.options import Correct
from tests.support import small
from tests.support.command_line import Run, captured, names, refused
from tests.support.small import tree

pytestmark = pytest.mark.usefixtures("offline")
SIZES = ("--samples", 4, "--sequence-length", 64)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recipes")
    small.save(folder / "model")
    small.text_file(folder)
    ask = ("--ratio", 0.5, "--strategy", "data-centric", "--merge", "frequency", "--no-merge-routers", "--seed", 3)
    data = ("--calibration", folder / "calibration.txt", *SIZES)
    result = captured("compress", folder / "model", "-o", folder / "out", *ask, *data)
    assert result.status == 0, result
    return folder


@pytest.mark.parametrize(
    ("short", "spelled"),
    [
        ("--fast", "--strategy energy --sequential --correct ridge --prune.correct.toward 0"),
        ("--best", "--correct tune --distill experts"),
    ],
)
def test_a_shorthand_stands_for_options_and_gives_way_to_them(short: str, spelled: str, made: Path, run: Run) -> None:
    def steps(*options: str) -> Any:
        text = ("--experts", 4, "--calibration", made / "calibration.txt", *SIZES)
        return json.loads(run("compress", made / "model", *text, *options, "--dry-run", "--json").out)["steps"]

    assert steps(short) == steps(*spelled.split()) != steps()
    assert steps(short, "--correct", "none") == steps(*spelled.split(), "--correct", "none")
    refused(run("compress", made / "model", "-o", "out", "--fast", "--best"), "--fast and --best")


def written(folder: Path) -> Any:
    return yaml.safe_load((folder / "recipe.yaml").read_text())


def test_an_output_has_its_recipe(made: Path) -> None:
    options = {"merge": "frequency", "merge_routers": False}
    assert written(made / "out") == {
        "model": "model",
        "calibration": {"data": ["calibration.txt"], "samples": 4, "sequence_length": 64},
        "seed": 3,
        "dtype": "float32",
        "steps": [{"prune": {"strategy": "data-centric", "ratio": 0.5, "options": options}}],
    }
    assert str(made) not in (made / "out" / "recipe.yaml").read_text()


def test_a_run_is_repeated_from_it(run: Run, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run("compress", made / "out" / "recipe.yaml", "-o", tmp_path / "again").status == 0
    shutil.copy(made / "out" / "recipe.yaml", tmp_path / "mine.yaml")
    monkeypatch.chdir(made)
    assert run("compress", tmp_path / "mine.yaml", "-o", tmp_path / "copied").status == 0
    assert run("plan", tmp_path / "mine.yaml", "-o", tmp_path / "plan.json").status == 0
    assert run("apply", tmp_path / "plan.json", "-o", tmp_path / "applied").status == 0
    assert tree(made / "out") == tree(tmp_path / "again") == tree(tmp_path / "copied") == tree(tmp_path / "applied")


def test_a_copy_elsewhere_has_its_files_named(run: Run, made: Path, tmp_path: Path) -> None:
    recipe, out = tmp_path / "recipe.yaml", ("-o", tmp_path / "out")
    shutil.copy(made / "out" / "recipe.yaml", recipe)
    model = ("--set", f"model={made / 'model'}")
    refused(run("compress", recipe, *out), "names the model 'model', .*; add --set model=FOLDER")
    refused(run("compress", recipe, *model, *out), "calibration.txt, .* name it with --calibration")
    assert run("compress", recipe, *model, "--calibration", made / "calibration.txt", *out).status == 0
    assert tree(tmp_path / "out") == tree(made / "out")


def test_the_command_line_wins(made: Path) -> None:
    def changed(*settings: str, **flags: Any) -> Recipe:
        named = {name.replace("__", "."): value for name, value in flags.items()}
        return recipe_of(str(made / "out" / "recipe.yaml"), named, settings)

    def pruned(*settings: str, **flags: Any) -> Any:
        (step,) = changed(*settings, **flags).steps
        return step

    assert (pruned().experts, pruned().ratio, changed().seed) == (None, 0.5, 3)
    assert [pruned(prune__experts=3).experts, pruned(prune__experts=3).ratio] == [3, None]
    assert pruned(prune__ratio=0.25) == pruned("prune.ratio=0.25") == pruned().model_copy(update={"ratio": 0.25})
    assert changed(seed=0).seed == 0  # a default, but said
    assert pruned(prune__options__merge="max").options == {"merge": "max", "merge_routers": False}
    assert pruned(prune__strategy="count-guided").options == {}  # the options were another strategy's
    assert changed(calibration__samples=2).calibration == changed().calibration.model_copy(update={"samples": 2})
    assert changed(calibration__data=["demo"]).calibration.data == ("demo",)
    assert changed(f"model={made}").model == str(made)


def test_bad_recipes_leave_nothing(run: Run, made: Path, tmp_path: Path) -> None:
    recipe, model = tmp_path / "mine.yaml", f"model: {made / 'model'}"
    for text, message in (
        ("steps: [prune: {experts: 4}]", "no model is named; give MODEL, or a recipe with one"),
        (f"{model}\nsteps: [prune]", "say how many experts to keep: either --experts N or --ratio R"),
        (f"{model}\nsteps: [prune: {{experts: 4, ratio: 0.5}}]", "either --experts N or --ratio R"),
        (f"{model}\nsteps: [prune: {{experts: 4, correct: twist}}]", "correct: method should be"),
        (f"{model}\nsteps: [prune: {{experts: 4, protect: [{{layer: 0}}]}}]", "protect, entry 1.expert is missing"),
        (f"{model}\nsteps: [prune: {{experts: 4, options: {{speed: 1}}}}]", "has no option 'speed'"),
    ):
        recipe.write_text(text)
        refused(run("compress", recipe, "-o", tmp_path / "out"), message)
    assert names(tmp_path) == ["mine.yaml"]


def test_what_is_compressed_again_has_the_recipe_and_the_plan_of_both(
    run: Run, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = ("--experts", 3, "--strategy", "model-centric")
    assert run("compress", made / "out", "-o", tmp_path / "smaller", *ask).status == 0
    content = written(tmp_path / "smaller")
    assert content["model"] == "model"
    assert [step["prune"].get("experts") for step in content["steps"]] == [None, 3]
    plan = json.loads((tmp_path / "smaller" / "compression.json").read_text())["plan"]
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    shutil.copy(made / "calibration.txt", tmp_path)
    monkeypatch.chdir(tmp_path)
    assert run("apply", "plan.json", "--model", made / "model", "-o", tmp_path / "at-once").status == 0
    assert written(tmp_path / "at-once") == content
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("smaller", "at-once"))
    assert one.keys() == two.keys() and all(torch.equal(two[key], value) for key, value in one.items())


PATHS = [path for path, _ in recipe_options() if not path.startswith(("prune.options", "constants."))]


@pytest.mark.parametrize("path", PATHS)
def test_a_shorthand_sets_the_field_that_set_names(path: str) -> None:
    section, _, field = path.rpartition(".")
    models = {"": Recipe, "calibration": TextOptions, "gate": GateOptions, "output": OutputOptions}
    models |= {"prune.correct": Correct}
    entry = described(models.get(section) or step_class(section))[field]
    literals = [value for kind in entry.kinds for value in get_args(kind) if value not in (entry.default, ...)]
    values = {bool: not entry.default, int: 5, float: 0.75, str: "graph:2", Path: "folder", tuple: "a,b"}
    values |= {EmphasisOptions: "end=8", dict: "temperature=1", Correct: "ridge"}
    kind = get_origin(entry.kinds[0]) or entry.kinds[0]
    value = values[kind] if kind in values else literals[:2][-1]
    value = {"gate.suite": "base", "gate.expect": "c=0.5"}.get(path, value)
    flags = {"gate.tasks": ["c", "d,e"]} if section == "gate" else {}
    hub = ["output.push_to_hub=me/other"] if section == "output" else []
    by_flag = recipe_of("model", {**flags, path: value}, hub if field != "push_to_hub" else [])
    by_set = recipe_of("model", flags, [*hub, f"{path}={value if isinstance(value, str) else json.dumps(value)}"])
    assert by_flag == by_set and by_flag != recipe_of("model", flags, hub)


def test_options_of_the_strategy_and_settings_that_go_with_others() -> None:
    flags = {"prune.strategy": "data-centric", "prune.options.merge": "max", "prune.options.no_merge_routers": True}
    (prune,) = recipe_of("model", {**flags, "prune.options.option": ["align=true"]}, []).steps
    assert prune.options == {"merge": "max", "merge_routers": False, "align": True}  # type: ignore[attr-defined]
    for setting, message in {
        "gate.max_drop=0.02": "a gate judges tasks, answers or text; name tasks",
        "output.private=true": "--private goes with --push-to-hub",
        "seeds=3": "'seeds' names no option of a step; did you mean 'seed'",
        "distil.steps=3": "there is no step 'distil'; did you mean 'distill'",
        "distill.stepz=3": "step distill has no option 'stepz'; did you mean 'steps'",
        "constants.budget=even": "pass --format mone",
        "prune.options=fast": "options should be .*, it is 'fast'",
        "model.name=x": r"model.* it is {'name': 'x'}",
    }.items():
        with pytest.raises(CompressionError, match=message):
            recipe_of("model", {}, [setting])


@pytest.mark.parametrize(
    ("arguments", "spelled"),
    [
        (["--prune.sequential", "-o", "out"], ["--set", "prune.sequential=true", "-o", "out"]),
        (["--prune.sequential"], ["--set", "prune.sequential=true"]),
        (["--distill.learning-rate", "-1"], ["--set", "distill.learning_rate=-1"]),
        (["--prune.options.x1=--y", "model"], ["--set", "prune.options.x1=--y", "model"]),
    ],
)
def test_a_path_without_a_value_is_true(arguments: list[str], spelled: list[str]) -> None:
    assert paths_spelled_out(arguments) == spelled
