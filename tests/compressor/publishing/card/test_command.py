"""The command in a model card makes the same plan when it is run."""

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

from compressor.api import compressing as api
from compressor.api.baking import calibrate_router
from compressor.api.planning import plan_per_source
from compressor.api.recovering import recover
from compressor.errors import CompressionError
from compressor.publishing.card.build import card_text
from compressor.publishing.card.command import option_text, protected_list, rebuilt
from compressor.recipe.plan import CompressionPlan
from compressor.recipe.registry import read_option
from tests.command_line import captured

DEMO = Path("compressor/demo/checkpoint").absolute()
SMALL: dict[str, Any] = {"experts": 12, "samples": 4, "sequence_length": 32}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the model and two texts, where the command is run."""
    shutil.copytree(DEMO, tmp_path / "checkpoint")
    for name, text in (("a.txt", "one two three "), ("b=2.txt", "7 + 5 = 12; ")):
        (tmp_path / name).write_text(text * 400)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def published(folder: Path) -> tuple[dict[str, Any], CompressionPlan]:
    """The plan in an output, as it has it, and read."""
    content = json.loads((folder / "compression.json").read_text())["plan"]
    return content, CompressionPlan.from_dict(content)


def run_again(folder: Path, place: Path) -> CompressionPlan:
    """Run the rebuilt command and read the plan of what it made."""
    plan = published(folder)[1]
    command = rebuilt(plan, "again")
    assert command is not None and str(place) not in "".join(command.lines)
    if command.protected is not None:
        (place / "protected.json").write_text(command.protected)
    for line in command.lines:
        name, *arguments = shlex.split(line)
        result = captured(*arguments)
        assert name == "moe-compress" and result.status == 0, result
    return published(place / "again")[1]


@pytest.mark.parametrize(
    ("wanted", "extra"),
    [
        ({"strategy": "count-guided", "calibration": ["a.txt=3", "b=2.txt=1"]}, []),
        ({"strategy": "reap", "calibration": ["b=2.txt"], "options": {"saliency": "mean-norm"}, "seed": 3}, []),
        ({"strategy": "count-guided", "calibration": "demo", "correct": "ridge"}, ["--correct ridge", "--dtype"]),
        ({"strategy": "count-guided", "calibration": "demo", "sequential": True, "seed": 5}, ["--sequential"]),
        (
            {"strategy": "hc-smoe", "calibration": "demo", "options": {"merge_routers": False, "merge": "max"}},
            ["merge_routers=false", "merge=max"],
        ),
        ({"strategy": "model-centric", "options": {"representation": "vectorized"}}, ["--correct none"]),
    ],
)
def test_the_rebuilt_command_makes_the_same_plan(wanted: dict[str, Any], extra: list[str], place: Path) -> None:
    api.compress("checkpoint", "out", **SMALL, **wanted)
    content, plan = published(place / "out")
    again = run_again(place / "out", place)
    assert again.digest() == plan.digest()
    assert again.layers == plan.layers and again.to_dict()["calibration"] == content["calibration"]
    command = rebuilt(plan, "again")
    assert command is not None and all(part in command.lines[0] for part in extra)


def test_protected_experts_come_as_the_file_that_the_command_reads(place: Path) -> None:
    listed = [{"layer": 0, "expert": 3}, {"layer": 2, "expert": 15}, {"layer": 2, "expert": 1}]
    (place / "mine.json").write_text(json.dumps(listed))
    api.compress("checkpoint", "out", **SMALL, strategy="count-guided", calibration="demo", protect="mine.json")
    plan = published(place / "out")[1]
    assert json.loads(protected_list(plan)) == sorted(listed, key=lambda entry: (entry["layer"], entry["expert"]))
    again = run_again(place / "out", place)
    assert again.digest() == plan.digest() and again.protected == plan.protected


def test_a_plan_for_one_source_of_several_takes_two_commands(place: Path) -> None:
    plans = plan_per_source("checkpoint", **SMALL, strategy="count-guided", calibration=["a.txt", "b=2.txt"])
    assert plans[1].digest() != plans[2].digest()
    api.apply(plans[2], "out")
    again = run_again(place / "out", place)
    assert again.digest() == plans[2].digest() and again.calibration is not None and again.calibration["only"] == "b=2"


RECOVERY: dict[str, Any] = {"steps": 2, "length": 32, "tokens_per_step": 64, "method": "router"}
BAKE: dict[str, Any] = {"rounds": 1, "sequences": 8, "sequence_length": 32}


def test_separate_commands_follow_in_the_order_in_which_they_were_given(place: Path) -> None:
    api.compress("checkpoint", "small", **SMALL, strategy="count-guided", calibration="demo")
    recover("small", "recovered", teacher="checkpoint", data=["demo", "a.txt"], seed=3, learning_rate=1e-4, **RECOVERY)
    calibrate_router("recovered", "out", teacher="checkpoint", calibration="demo", **BAKE)
    plan = published(place / "out")[1]
    command = rebuilt(plan, "again")
    assert command is not None and plan.afterwards == ("recover", "bake")
    assert [line.split()[1] for line in command.lines] == ["compress", "recover", "calibrate-router"]
    assert "--learning-rate 0.0001" in command.lines[1] and "--bake" not in command.lines[0]
    for known in (None, "moe-compress calibrate-router recovered -o out"):  # the last one alone would not tell it all
        card = " ".join(card_text(place / "out", "me/again", command=known).text.split())
        assert "These commands, one after another" in card and all(line in card for line in command.lines)
    again = run_again(place / "out", place)
    assert again.digest() == plan.digest() and again.to_dict() == plan.to_dict()
    assert (place / "again" / "model.safetensors").read_bytes() == (place / "out" / "model.safetensors").read_bytes()
    recipe = (place / "out" / "recipe.yaml").read_text()
    heading = [line for line in recipe.splitlines() if line.startswith("#")]
    assert [line.split()[2] for line in heading] == ["compress", "recover", "calibrate-router"]
    assert heading[0].endswith("-o OUTPUT-before-recover") and "bake:" not in recipe and "recover:" not in recipe
    api.apply(plan, "applied")  # in that order, too
    assert (place / "applied" / "model.safetensors").read_bytes() == (place / "out" / "model.safetensors").read_bytes()


def test_a_second_recovery_leaves_no_command_and_no_plan_to_carry_out(place: Path) -> None:
    api.compress("checkpoint", "small", **SMALL, strategy="count-guided", calibration="demo", recover="router",
                 recover_steps=1)  # fmt: skip
    recover("small", "out", teacher="checkpoint", data="demo", **RECOVERY)
    plan = published(place / "out")[1]
    assert (plan.recover or {})["after"] == ["recover"] and rebuilt(plan, "again") is None
    card = card_text(place / "out", "me/again", command="moe-compress recover small -o out").text
    assert (
        "By this command as the last of several" in card and "does not record" in card_text(place / "out", "me/a").text
    )
    with pytest.raises(CompressionError, match="the last of several bakes or recoveries alone"):
        api.apply(plan, "applied")


def test_the_recovery_of_a_model_that_is_whole_needs_no_compress(place: Path) -> None:
    recover("checkpoint", "out", teacher="checkpoint", data="demo", **RECOVERY)
    command = rebuilt(published(place / "out")[1], "again")
    assert command is not None and len(command.lines) == 1
    assert command.lines[0].startswith("moe-compress recover ./checkpoint -o again --teacher ./checkpoint")


@pytest.mark.parametrize("value", [1, 2.5, True, None, "text", "7", "true", '"quoted"', "a b'c", [1, "x"]])
def test_options_are_read_back_as_they_were(value: Any) -> None:
    (argument,) = shlex.split(shlex.quote(option_text("merge_routers", value)))
    assert read_option(argument, "fault") == ("merge_routers", value)


def test_without_sizes_no_command_is_claimed(place: Path) -> None:
    api.compress("checkpoint", "out", **SMALL, strategy="count-guided", calibration="demo")
    content = published(place / "out")[0]
    del content["calibration"]["asked"]
    assert rebuilt(CompressionPlan.from_dict(content), "again") is None
