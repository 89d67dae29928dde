"""`--recipe`: a run repeated from its output, what the command line overrides, and what is refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import small
from tests.command_line import Run, captured, names, refused
from tests.small import tree

pytestmark = pytest.mark.usefixtures("offline")
SIZES = ("--samples", 4, "--sequence-length", 64)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, a text and an output of them."""
    folder = tmp_path_factory.mktemp("recipes")
    small.save(folder / "model")
    small.text_file(folder)
    ask = ("--ratio", 0.5, "--strategy", "data-centric", "--merge", "frequency", "--no-merge-routers", "--seed", 3)
    data = ("--calibration", folder / "calibration.txt", *SIZES)
    result = captured("compress", folder / "model", "-o", folder / "out", *ask, *data)
    assert result.status == 0, result
    return folder


def plan_of(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "compression.json").read_text())["plan"])


def test_an_output_has_its_recipe(made: Path) -> None:
    text = (made / "out" / "recipe.yaml").read_text()
    assert yaml.safe_load(text) == {
        "model": "model", "experts": 4, "strategy": "data-centric",
        "options": {"merge": "frequency", "merge_routers": False}, "calibration": ["calibration.txt"], "samples": 4,
        "sequence_length": 64, "seed": 3, "correct": "none",
    }  # fmt: skip
    assert str(made) not in text


def test_a_run_is_repeated_from_it(run: Run, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From anywhere on this machine, and from a copy of the recipe where the files are."""
    monkeypatch.chdir(tmp_path)
    assert run("compress", "--recipe", made / "out" / "recipe.yaml", "-o", tmp_path / "again").status == 0
    shutil.copy(made / "out" / "recipe.yaml", tmp_path / "mine.yaml")
    monkeypatch.chdir(made)
    assert run("compress", "--recipe", tmp_path / "mine.yaml", "-o", tmp_path / "copied").status == 0
    assert run("plan", "--recipe", tmp_path / "mine.yaml", "-o", tmp_path / "plan.json").status == 0
    assert run("apply", tmp_path / "plan.json", "-o", tmp_path / "applied").status == 0
    assert tree(made / "out") == tree(tmp_path / "again") == tree(tmp_path / "copied") == tree(tmp_path / "applied")


def test_a_copy_elsewhere_has_its_files_named(run: Run, made: Path, tmp_path: Path) -> None:
    recipe, out = tmp_path / "recipe.yaml", ("-o", tmp_path / "out")
    shutil.copy(made / "out" / "recipe.yaml", recipe)
    refused(run("compress", "--recipe", recipe, *out), "names the model 'model', .*; name it as MODEL")
    refused(run("compress", made / "model", "--recipe", recipe, *out), "calibration.txt, .* name it with --calibration")
    text = made / "calibration.txt"
    assert run("compress", made / "model", "--recipe", recipe, "--calibration", text, *out).status == 0
    assert tree(tmp_path / "out") == tree(made / "out")


def test_the_command_line_wins(run: Run, made: Path, tmp_path: Path) -> None:
    recipe, out = made / "out" / "recipe.yaml", tmp_path / "plan.json"

    def planned(*more: Any) -> dict[str, Any]:
        result = run("plan", "--recipe", recipe, "-o", out, "--overwrite", "--json", *more)
        assert result.status == 0, result
        return dict(json.loads(result.out))

    assert planned()["experts"] == 4
    assert planned("--experts", 3)["experts"] == 3
    assert planned("--ratio", 0.25)["experts"] == 6  # in place of the recipe's count
    assert planned("--seed", 0)["seed"] == 0  # a default, but said
    assert planned("--merge", "max")["options"] == {"merge": "max", "merge_routers": False}
    assert planned("--strategy", "count-guided")["options"] == {}  # the options were another strategy's
    assert planned("--samples", 2)["calibration"]["asked"]["samples"] == 2
    assert planned("--calibration", "demo")["calibration"]["source"] == "demo"
    small.save(tmp_path / "other", num_hidden_layers=1)
    assert len(planned()["layers"]) == 2
    assert len(json.loads(run("plan", tmp_path / "other", "--recipe", recipe, "-o", tmp_path / "o.json", "--json").out)[
        "layers"
    ]) == 1  # fmt: skip


def test_protected_experts_stand_in_the_recipe(run: Run, made: Path, tmp_path: Path) -> None:
    hubs = tmp_path / "hubs.json"
    hubs.write_text('[{"layer": 1, "expert": 5}, {"layer": 0, "expert": 2}]')
    ask = ("--experts", 4, "--strategy", "reap", "--calibration", made / "calibration.txt", *SIZES)
    assert run("compress", made / "model", "-o", tmp_path / "out", *ask, "--protect", hubs).status == 0
    hubs.unlink()
    content = yaml.safe_load((tmp_path / "out" / "recipe.yaml").read_text())
    assert content["protect"] == [{"layer": 0, "expert": 2}, {"layer": 1, "expert": 5}]
    assert run("compress", "--recipe", tmp_path / "out" / "recipe.yaml", "-o", tmp_path / "again").status == 0
    assert tree(tmp_path / "out") == tree(tmp_path / "again")
    assert plan_of(tmp_path / "again")["protected"]


def test_a_recipe_of_one_s_own(run: Run, made: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(
        f"model: {made / 'model'}\nratio: 0.5\nstrategy: reap\ncalibration: demo\nsamples: 4\nsequence_length: 32\n"
        "protect: [{layer: 0, expert: 1}]\nsequential: true\n"
    )
    assert run("compress", "--recipe", recipe, "-o", tmp_path / "out").status == 0
    plan = plan_of(tmp_path / "out")
    assert (plan["experts"], plan["sequential"], len(plan["protected"])) == (4, True, 1)


def test_bad_recipes_leave_nothing(run: Run, made: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    for text, message in (
        ("strateggy: reap", "has no field 'strateggy'; did you mean 'strategy'"),
        ("samples: [1]", r"samples is \[1\], it should be a whole number"),
        ("experts: 4", "Missing argument 'MODEL', and .*mine.yaml names none"),
        (f"model: {made / 'model'}\nexperts: 4\nratio: 0.5", "either --experts N or --ratio R"),
        (f"model: {made / 'model'}\nexperts: 4\ncorrect: twist", "no correction 'twist'"),
        (f"model: {made / 'model'}\nexperts: 4\nsamples: 0\nstrategy: reap\ncalibration: demo", "--samples 0"),
        (f"model: {made / 'model'}\nexperts: 4\nprotect: [{{layer: 0}}]", "protect, entry 1 has no 'expert'"),
        (f"model: {made / 'model'}\nexperts: 4\noptions: {{speed: 1}}", "has no option 'speed'"),
    ):
        recipe.write_text(text)
        refused(run("compress", "--recipe", recipe, "-o", tmp_path / "out"), message)
    assert names(tmp_path) == ["mine.yaml"]


def test_a_recipe_is_not_carried_along(run: Run, made: Path, tmp_path: Path) -> None:
    """What is compressed again gets a recipe of its own."""
    ask = ("--experts", 3, "--strategy", "model-centric")
    assert run("compress", made / "out", "-o", tmp_path / "smaller", *ask).status == 0
    content = yaml.safe_load((tmp_path / "smaller" / "recipe.yaml").read_text())
    assert (content["model"], content["experts"]) == ("out", 3)
