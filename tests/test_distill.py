"""`distill` from the command line: what it changes, what it keeps, where it goes on, and what it refuses."""

import json
import re
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml
from safetensors.torch import load_file

import compressor
from compressor.formatting import short
from compressor.hub.card import card_text
from compressor.recipe.recipe import read_recipe
from compressor.recipe.steps_plan import Plan
from compressor.steps.distill import training
from tests.support import small, zoo
from tests.support.audit import paths_of
from tests.support.command_line import Result, Run, captured, names, refused
from tests.support.small import tree
from tests.support.training_setups import smaller

pytestmark = pytest.mark.usefixtures("offline")
SIZES = ("--sequence-length", 32, "--tokens-per-step", 128, "--steps", 8, "--dtype", "float32")


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, its copy of four experts, and text."""
    return smaller(tmp_path_factory.mktemp("originals"), 400)


def asked(folder: Path, out: Path, *more: Any, source: Path | None = None) -> list[str]:
    data = ("--calibration", folder / "calibration.txt", "--base", folder / "model")
    return [str(part) for part in ("distill", source or folder / "smaller", "-o", out, *data, *SIZES, *more)]


def result_of(result: Result) -> dict[str, Any]:
    """What a run with --json tells of its last step."""
    assert result.status == 0, result
    told: dict[str, Any] = json.loads(result.out)["steps"][-1]["result"]
    return told


@pytest.fixture(scope="module")
def whole(originals: Path) -> Callable[..., dict[str, str]]:
    """What a run that nothing stops writes, made once for the same arguments."""

    @cache
    def made(*more: str) -> dict[str, str]:
        out = originals / "-".join(("whole", *more))
        result = captured(*asked(originals, out, *more))
        assert result.status == 0, result
        return tree(out)

    return made


@pytest.mark.parametrize(
    ("method", "more", "parts"),
    [
        ("experts", (), {"gate.weight", "experts"}),
        ("router", ("--learning-rate", 0.1), {"gate.weight"}),
        zoo.full("lora", ("--stream",), {"gate.weight", "experts", "self_attn"}),
    ],
)
def test_the_output_is_stock_and_nearer_to_the_base(
    method: str, more: tuple[Any, ...], parts: set[str], run: Run, originals: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    told = result_of(run(*asked(originals, out, "--train", method, "--json", *more)))
    assert told["changed"] and told["after"] < told["before"] == told["curve"][0]["kl"]
    assert told["after"] == min(entry["kl"] for entry in told["curve"]) and told["curve"][-1]["step"] == 8
    before, after = (load_file(folder / "model.safetensors") for folder in (originals / "smaller", out))
    changed = {key for key in before if not torch.equal(before[key], after[key])}
    assert before.keys() == after.keys() and changed
    every = ("self_attn", "experts", "gate.weight", "norm", "embed")
    assert {part for part in every if any(part in key for key in changed)} == parts
    assert transformers.AutoModelForCausalLM.from_pretrained(out).config.num_local_experts == 4
    again = run(*asked(originals, tmp_path / "again", "--json", source=out))
    assert result_of(again)["before"] == pytest.approx(told["after"], rel=1e-4)  # what is written is what was measured


@pytest.mark.full
def test_the_record_says_how_and_the_same_command_writes_nothing(
    run: Run, originals: Path, whole: Callable[..., dict[str, str]], tmp_path: Path
) -> None:
    expected, out = whole(), tmp_path / "out"
    result = run(*asked(originals, out))
    assert result.status == 0 and "istillation (experts, at most 8 steps of 128 tokens)" in result.out, result
    assert tree(out) == expected and names(tmp_path) == ["out"]
    again = run(*asked(originals, out))
    assert again.status == 0 and "is in place already" in again.err and tree(out) == expected
    refused(run(*asked(originals, out, "--seed", 1)), "exists already")
    record, own = (json.loads((folder / "compression.json").read_text()) for folder in (out, originals / "smaller"))
    plan = Plan.from_dict(record["plan"])
    done = record["plan"]["steps"].pop()
    # The model that was read is the smaller one.
    assert record["plan"] == own["plan"] and set(record["bytes"].values()) == {own["bytes"]["after"]}
    assert (done["options"]["train"], done["options"]["steps"], done["name"]) == ("experts", 8, "distill")
    assert done["text"]["source"] == "calibration.txt" and len(done["text"]["sha256"]) == 64
    assert [entry["step"] for entry in done["result"]["curve"]] == list(range(9))
    assert plan.digest() == record["plan_digest"] != own["plan_digest"]
    assert Plan.from_dict(json.loads(plan.to_json())) == plan
    told = f"KL {short(done['result']['before'])} to {short(done['result']['after'])} nats per token from the base"
    card = " ".join(card_text(out, "me/small").text.split())
    assert "No text was read to choose experts" in card and "images/distillation.png" in card
    assert told in card and "trained the model end to end" in card and "Nothing was refitted" not in card
    before = card_text(originals / "smaller", "me/small").text
    assert "nats per token" not in before and "Nothing was refitted" in before
    assert run("report", out, "-o", tmp_path / "report.html").status == 0
    page = (tmp_path / "report.html").read_text()
    assert "Distillation (experts, at most 8 steps of 128 tokens): KL" in page


@pytest.mark.parametrize("stream", [(), ("--stream",)])
@pytest.mark.parametrize(
    ("more", "ended", "evaluations"),
    [
        (("--learning-rate", 1000), training.APART, 2),
        (("--learning-rate", 1e12, "--optimizer", "adam", "--evaluate-every", 8), training.NOT_A_NUMBER, 1),
    ],
)
def test_a_rate_that_diverges_changes_nothing(
    more: tuple[Any, ...], ended: str, evaluations: int, stream: tuple[str, ...], run: Run, originals: Path,
    tmp_path: Path,
) -> None:  # fmt: skip
    told = result_of(run(*asked(originals, tmp_path / "out", "--json", *more, *stream)))
    assert told["ended"] == ended and len(told["curve"]) == evaluations
    assert not told["changed"] and told["after"] == told["before"]
    smaller, written = (load_file(path / "model.safetensors") for path in (originals / "smaller", tmp_path / "out"))
    assert all(torch.equal(value, written[key]) for key, value in smaller.items())


def test_refusals(run: Run, originals: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for more, message in (
        (("--optimizer", "sgd"), "distill: optimizer should be 'adam' or 'adafactor', it is 'sgd'"),
        (("--kl", "nan"), "distill: kl should be a number, it is nan"),
    ):
        refused(run(*asked(originals, out, *more)), message)
    short = run(*asked(originals, out, "--tokens-per-step", 10**6))
    assert short.status == 2 and "31250" in short.err
    refused(
        run(*asked(originals, originals / "smaller")),
        "lies in the source checkpoint itself; name another output folder",
    )
    zoo.save("mixtral", tmp_path / "other")
    small.tokenizer().save_pretrained(tmp_path / "other")
    refused(run(*asked(originals, out, "--base", tmp_path / "other")), "knows 96 tokens, smaller 259")
    small.save(tmp_path / "zaya", "zaya")
    data = ("--base", tmp_path / "zaya", "--calibration", originals / "calibration.txt", *SIZES, "--stream")
    zaya = run("distill", tmp_path / "zaya", "-o", out, *data)
    assert zaya.status == 2 and re.search("Error: Zaya.* layer by layer; use what needs none, or takes them", zaya.err)
    assert not out.exists() and names(tmp_path) == ["other", "zaya"]


def test_another_base_than_the_source_is_told(run: Run, originals: Path, tmp_path: Path) -> None:
    shutil.copytree(originals / "model", tmp_path / "other")
    small.edit_tensors(tmp_path / "other", lambda tensors: [
        tensors.update({key: value + 0.1}) for key, value in list(tensors.items()) if key.endswith("gate.weight")
    ])  # fmt: skip
    warned = run(*asked(originals, tmp_path / "out", "--base", tmp_path / "other", "--steps", 1))
    assert warned.status == 0 and "whose fingerprint is not that of other" in warned.err
    fine = run(*asked(originals, tmp_path / "fine", "--steps", 1))
    assert fine.status == 0 and "fingerprint" not in fine.err


@pytest.mark.full
def test_compress_distils_and_plan_and_recipe_repeat_it(run: Run, originals: Path, tmp_path: Path) -> None:
    data = ("--calibration", originals / "calibration.txt", "--samples", 4, "--sequence-length", 64)
    ask: tuple[Any, ...] = (originals / "model", "--experts", 4, "--strategy", "count-guided", *data)
    ask = (*ask, "--dtype", "float32", "--distill", "experts", "--set", "distill.steps=2")
    ask = (*ask, "--set", "distill.sequence_length=256", "--set")  # the text is short
    with paths_of("os.rename", r"/distill/now/") as streamed:
        assert run("compress", *ask, "distill.stream=true", "-o", tmp_path / "one").status == 0
    assert streamed
    assert run("plan", *ask, "distill.stream=true", "-o", tmp_path / "plan.json").status == 0
    assert run("apply", tmp_path / "plan.json", "-o", tmp_path / "two").status == 0
    recipe, words = tmp_path / "one" / "recipe.yaml", "    steps: 2\n    sequence_length: 256\n    stream: true"
    assert words in recipe.read_text() and words in card_text(tmp_path / "one", "me/small").text
    assert run("compress", recipe, "-o", tmp_path / "three").status == 0
    assert tree(tmp_path / "one") == tree(tmp_path / "two") == tree(tmp_path / "three")
    record = json.loads((tmp_path / "one" / "compression.json").read_text())["plan"]
    result = record["steps"][-1]["result"]
    assert result["changed"] and result["after"] <= result["before"]
    refused(run("compress", *ask, "distill.stream=false", "-o", tmp_path / "one"), "exists already")


@pytest.mark.full
def test_plans_name_another_base_and_the_text_of_a_later_run_and_repeat_both(originals: Path, tmp_path: Path) -> None:
    small.save(tmp_path / "base", seed=1)
    text: dict[str, Any] = {"samples": 16, "sequence_length": 32, "dtype": "float32"}
    text["calibration"] = str(originals / "calibration.txt")
    training = compressor.Distill(steps=2, tokens_per_step=64, sequence_length=32)
    steps, base = [compressor.Prune(strategy="reap", experts=4), training], str(tmp_path / "base")
    made = compressor.compress(str(originals / "model"), tmp_path / "out", steps, base=base, **text)
    assert made.plan.base is not None and made.plan.base.model == base
    assert yaml.safe_load((tmp_path / "out" / "recipe.yaml").read_text())["base"] == "base"
    assert read_recipe(tmp_path / "out" / "recipe.yaml").base == base  # found again, as the model is
    compressor.apply(Plan.from_dict(made.plan.to_dict()), tmp_path / "again")
    weights = [(tmp_path / out / "model.safetensors").read_bytes() for out in ("out", "again")]
    assert weights[0] == weights[1]
    later = compressor.compress(str(tmp_path / "out"), tmp_path / "later", [training], **text)
    assert made.plan.calibration is not None and later.plan.calibration is not None and later.plan.base is not None
    assert later.plan.calibration["sha256"] == made.plan.calibration["sha256"]
    assert later.plan.base.fingerprint == made.plan.base.fingerprint
    assert later.plan.steps[-1].text is not None and "calibration" in later.plan.steps[-1].options
