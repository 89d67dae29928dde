import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import compressor
from compressor import Distill, Routers, StepOptions
from compressor.hub.card import card_text, recipe_text
from compressor.recipe.recipe import on_text
from compressor.recipe.step import TextOptions
from compressor.recipe.steps_plan import Plan
from tests.support.command_line import captured, succeeded

DEMO = Path("compressor/demo/checkpoint").absolute()
SMALL: dict[str, Any] = {"experts": 12, "samples": 4, "sequence_length": 32}
DISTILL: dict[str, Any] = {"steps": 2, "sequence_length": 32, "tokens_per_step": 64, "train": "router"}
ROUTERS: dict[str, Any] = {"rounds": 1, "sequences": 8, "sequence_length": 32}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(DEMO, tmp_path / "checkpoint")
    for name, text in (("a.txt", "one two three "), ("b=2.txt", "7 + 5 = 12; ")):
        (tmp_path / name).write_text(text * 400)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def published(folder: Path) -> Plan:
    return Plan.from_dict(json.loads((folder / "compression.json").read_text())["plan"])


def told(plan: Plan) -> str:
    recipe = recipe_text(plan)
    assert recipe is not None
    return recipe


def run_again(folder: Path, place: Path) -> Plan:
    recipe = told(published(folder))
    assert str(place) not in recipe
    (place / "recipe.yaml").write_text(recipe)
    succeeded(captured("compress", "recipe.yaml", "-o", "again"))
    return published(place / "again")


def weights(folder: Path) -> dict[str, bytes]:
    found = load_file(folder / "model.safetensors")
    return {name: value.flatten().view(torch.uint8).numpy().tobytes() for name, value in found.items()}


@pytest.mark.full
@pytest.mark.parametrize(
    ("wanted", "extra"),
    [
        ({"strategy": "count-guided", "calibration": ["a.txt=3", "b=2.txt=1"]}, []),
        ({"strategy": "ean", "calibration": ["b=2.txt"], "seed": 3}, ["seed: 3"]),
        ({"strategy": "count-guided", "calibration": "demo", "correct": "ridge"}, ["correct: ridge"]),
        ({"strategy": "count-guided", "calibration": "demo", "sequential": True, "seed": 5}, ["sequential: true"]),
        (
            {"strategy": "hc-smoe", "calibration": "demo", "options": {"merge_routers": False, "merge": "max"}},
            ["merge_routers: false", "merge: max"],
        ),
        ({"strategy": "model-centric", "options": {"representation": "vectorized"}}, []),
    ],
)
def test_the_recipe_makes_the_same_plan(wanted: dict[str, Any], extra: list[str], place: Path) -> None:
    compressor.compress("checkpoint", "out", **SMALL, **wanted)
    plan, found = published(place / "out"), run_again(place / "out", place)
    assert found.digest() == plan.digest() and found.to_dict() == plan.to_dict()
    recipe = told(plan)
    assert all(part in recipe for part in extra) and ("correct" in recipe) == ("correct" in wanted)


@pytest.mark.full
def test_protected_experts_are_in_the_recipe_one_by_one(place: Path) -> None:
    listed = [{"layer": 0, "expert": 3}, {"layer": 2, "expert": 15}, {"layer": 2, "expert": 1}]
    (place / "mine.json").write_text(json.dumps([{**entry, "influence": 3.5} for entry in listed]))
    compressor.compress("checkpoint", "out", **SMALL, strategy="count-guided", calibration="demo", protect="mine.json")
    plan = published(place / "out")
    assert plan.of("prune")[0].options["protect"] == listed
    (place / "mine.json").unlink()
    found = run_again(place / "out", place)
    assert found.digest() == plan.digest() and found.expert_plan.protected == plan.expert_plan.protected


def changed(folder: str, out: str, step: StepOptions, base: str = "checkpoint", **text: Any) -> None:
    changing = on_text(step.name, step.model_dump(mode="json", exclude_defaults=True), TextOptions(**text))
    compressor.compress(folder, out, [changing], base=base, seed=3)


@pytest.mark.full
def test_steps_of_later_runs_follow_in_their_order(place: Path) -> None:
    """One of them twice: a run of the recipe does them all at once, and gives the same bytes."""
    compressor.compress("checkpoint", "small", **SMALL, strategy="count-guided", calibration="demo", seed=3)
    changed("small", "first", Distill(**DISTILL, learning_rate=1e-4), data=("demo", "a.txt"))
    changed("first", "second", Routers(**ROUTERS), data=("demo",))
    changed("second", "out", Distill(**DISTILL), data=("demo",))
    plan = published(place / "out")
    assert [step.name for step in plan.steps] == ["prune", "distill", "routers", "distill"]
    assert "learning_rate: 0.0001" in told(plan)
    for known in (None, "moe-compress distill second -o out"):  # which alone would not tell it all
        card = card_text(place / "out", "me/again", command=known).text
        assert "all steps in one run" in card and told(plan) in card
    found = run_again(place / "out", place)
    assert found.digest() == plan.digest() and found.to_dict() == plan.to_dict()
    assert weights(place / "again") == weights(place / "out")
    assert (place / "out" / "recipe.yaml").read_text() == (place / "again" / "recipe.yaml").read_text()
    compressor.apply(plan, "applied")
    files = [(place / name / "model.safetensors").read_bytes() for name in ("applied", "again")]
    assert files[0] == files[1]


@pytest.mark.full
def test_the_distillation_of_a_whole_model_prunes_nothing(place: Path) -> None:
    changed("checkpoint", "out", Distill(**DISTILL), data=("demo",))
    recipe = told(published(place / "out"))
    assert "- distill:" in recipe and "prune" not in recipe and "model: checkpoint" in recipe
