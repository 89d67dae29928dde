"""The bake into the routers: a planted fault is won back, what is right stays, and the command keeps its promises."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

import compressor
from compressor.checkpoint.source import locate
from compressor.errors import CompressionError
from compressor.evaluation.teacher import distributions
from compressor.model.opened import OpenModel, open_model
from compressor.progress import Silent
from compressor.recipe.plan import CompressionPlan
from compressor.steps.routers import finished
from compressor.steps.routers.bake import stored_routers
from compressor.steps.routers.bake_routers import RoutersBaked
from compressor.steps.routers.bake_weights import bake_weights
from compressor.steps.routers.judging import Text, Weights, judged
from compressor.steps.routers.keeping import keep, kept
from tests import small, zoo
from tests.command_line import Run, names, refused
from tests.opened import opened
from tests.small import tree

pytestmark = pytest.mark.usefixtures("offline")
SIZES = ("--sequences", 8, "--sequence-length", 32, "--rounds", 2)


def weights(model: OpenModel) -> Weights:
    return {key: model.checkpoint.read(name).clone() for key, name in stored_routers(model).items()}


def disturbed(own: Weights, seed: int, size: float) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {key: value + size * torch.randn(value.shape, generator=generator) for key, value in own.items()}


def texts(model: OpenModel, parts: Sequence[Tensor]) -> list[Text]:
    return [Text((part,), (made,)) for part, made in zip(parts, distributions(model, parts, Silent()), strict=True)]


@pytest.mark.parametrize("name", ["olmoe", "mixtral", "gpt_oss"])
def test_routers_that_were_disturbed_come_back_toward_the_original(name: str, tmp_path: Path) -> None:
    stock, model = opened(name, tmp_path)
    *fit, heldout, test = texts(model, zoo.tokens(stock, 72, 24, seed=1).split(12))
    spoilt = disturbed(weights(model), 0, 0.15)
    made = bake_weights(model, spoilt, fit, heldout, Silent())
    trials = [spoilt, made.weights, weights(model)]
    before, after, right = (float(found.mean()) for found in judged(model, test, trials))
    assert right < 1e-6 and after < 0.6 * before
    assert made.after < 0.6 * made.before and made.steps[0].gain > made.steps[0].error > 0
    assert made.before - made.after == pytest.approx(sum(step.gain for step in made.steps), rel=1e-6)


def test_nothing_changes_where_nothing_is_wrong(tmp_path: Path) -> None:
    stock, model = opened("mixtral", tmp_path)
    *fit, heldout = texts(model, zoo.tokens(stock, 12, 16, seed=1).split(4))
    own = weights(model)
    made = bake_weights(model, own, fit, heldout, Silent())
    assert all(torch.equal(made.weights[key], own[key]) for key in own) and made.before == made.after < 1e-6
    assert not any(step.step for step in made.steps)


def test_trials_in_one_pass_are_judged_as_each_alone(tmp_path: Path) -> None:
    stock, model = opened("mixtral", tmp_path)
    (text,) = texts(model, [zoo.tokens(stock, 3, 16, seed=1)])
    trials = [disturbed(weights(model), seed, 0.1) for seed in range(3)]
    for trial, found in zip(trials, judged(model, text, trials), strict=True):
        whole = zoo.build("mixtral")
        whole.load_state_dict({**whole.state_dict(), **trial})
        logs = stock(input_ids=text.batches[0]).logits.double().log_softmax(-1)
        ours = whole(input_ids=text.batches[0]).logits.double().log_softmax(-1)
        expected = (logs.exp() * (logs - ours)).sum(-1).mean(1)
        torch.testing.assert_close(found, expected, rtol=0.2, atol=1e-6)  # of the likeliest tokens, a lower bound
        assert (found <= expected + 1e-6).all()


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, its copy of four experts with spoilt routers, and text."""
    folder = tmp_path_factory.mktemp("originals")
    small.save(folder / "model")
    text = "\n\n".join(f"Sentence {number} says {'so ' * (number % 7)}and {number**2}." for number in range(200))
    small.text_file(folder, text)
    plain = {"strategy": "model-centric", "correct": "none", "calibration": str(folder / "calibration.txt")}
    compressor.compress(str(folder / "model"), folder / "smaller", experts=4, **plain)
    generator = torch.Generator().manual_seed(0)
    small.edit_tensors(folder / "smaller", lambda tensors: [
        tensors.update({key: value + 0.2 * torch.randn(value.shape, generator=generator)})
        for key, value in list(tensors.items()) if key.endswith("gate.weight")
    ])  # fmt: skip
    return folder


def bake(run: Run, folder: Path, out: Path, *more: Any) -> Any:
    data = ("--data", folder / "calibration.txt", "--teacher", folder / "model")
    return run("calibrate-router", folder / "smaller", "-o", out, *data, *SIZES, *more)


def test_the_command_moves_routers_alone_and_says_what_it_took(run: Run, originals: Path, tmp_path: Path) -> None:
    outs = [tmp_path / name for name in ("one", "two")]
    for out in outs:
        result = bake(run, originals, out, "--json")
        assert result.status == 0, result
    told = json.loads(result.out)
    assert told["changed"] and told["after"] < told["before"] and len(told["steps"]) == 2
    assert tree(outs[0]) == tree(outs[1]) and names(tmp_path) == ["one", "two"]
    before, after = (load_file(folder / "model.safetensors") for folder in (originals / "smaller", outs[0]))
    changed = {key for key in before if not torch.equal(before[key], after[key])}
    assert before.keys() == after.keys() and changed and all(key.endswith("gate.weight") for key in changed)
    assert transformers.AutoModelForCausalLM.from_pretrained(outs[0]).config.num_local_experts == 4
    record, own = (json.loads((folder / "compression.json").read_text()) for folder in (outs[0], originals / "smaller"))
    baked = record["plan"].pop("bake")
    assert record["plan"] == own["plan"] and record["bytes"] == own["bytes"]
    assert (baked["method"], baked["rounds"], baked["teacher"]) == ("router", 2, "model")
    assert baked["result"]["after"] == told["after"] and baked["calibration"]["source"] == "calibration.txt"
    again = bake(run, originals, outs[1])
    assert again.status == 0 and "is in place already" in again.err and tree(outs[0]) == tree(outs[1])
    refused(bake(run, originals, outs[0], "--seed", 1), "exists already")


def test_compress_bakes_and_apply_repeats_it(run: Run, originals: Path, tmp_path: Path) -> None:
    data = ("--calibration", originals / "calibration.txt", "--samples", 4, "--sequence-length", 64)
    ask = (originals / "model", "--experts", 4, "--strategy", "count-guided", *data)
    made = run("compress", *ask, "--bake", "router", "--correct", "ridge", "-o", tmp_path / "one", "--json")
    assert made.status == 0
    assert run("plan", *ask, "--bake", "router", "--correct", "ridge", "-o", tmp_path / "plan.json").status == 0
    assert run("apply", tmp_path / "plan.json", "-o", tmp_path / "two").status == 0
    assert tree(tmp_path / "one") == tree(tmp_path / "two")
    record = json.loads((tmp_path / "one" / "compression.json").read_text())["plan"]["bake"]
    assert record["result"]["after"] <= record["result"]["before"]
    assert json.loads(made.out)["bake"] == record["result"]
    assert "bake: router" in (tmp_path / "one" / "recipe.yaml").read_text()


def test_a_run_that_is_stopped_while_routers_are_written_goes_on_to_the_same_bytes(
    run: Run, originals: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert bake(run, originals, tmp_path / "whole").status == 0
    write = finished.put_into

    def stop(folder: Path, tensors: dict[str, Tensor]) -> None:
        write(folder, dict(list(tensors.items())[:1]))
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(finished, "put_into", stop)
        assert bake(run, originals, tmp_path / "out").status == 130
    monkeypatch.setattr(finished, "bake_routers", None)  # which is not asked again
    assert bake(run, originals, tmp_path / "out").status == 0
    assert tree(tmp_path / "out") == tree(tmp_path / "whole") and names(tmp_path) == ["out", "whole"]


def test_refusals(run: Run, originals: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    refused(bake(run, originals, out, "--bake", "biases"), "no bake 'biases'; known are router")
    refused(bake(run, originals, out, "--rounds", 9), "--sequences 8 is out of range")
    refused(bake(run, originals, originals / "smaller"), "is read; name another output folder")
    zoo.save("mixtral", tmp_path / "other")
    small.tokenizer().save_pretrained(tmp_path / "other")
    refused(bake(run, originals, out, "--teacher", tmp_path / "other"), "knows 96 tokens, smaller 259")
    shutil.copytree(originals / "model", tmp_path / "renamed")
    small.edit_json(tmp_path / "renamed" / "tokenizer.json", lambda content: _swap(content["model"]["vocab"]))
    refused(bake(run, originals, out, "--teacher", tmp_path / "renamed"), "have different tokenizers")
    refused(run("compress", originals / "model", "-o", out, "--experts", 4, "--bake", "x"), "there is no bake 'x'")
    small.save(tmp_path / "zaya", "zaya")
    zaya = ("--teacher", tmp_path / "zaya", "--data", originals / "calibration.txt", *SIZES)
    refused(run("calibrate-router", tmp_path / "zaya", "-o", out, *zaya), "gradients cannot be taken layer by layer")
    assert not out.exists() and names(tmp_path) == ["other", "renamed", "zaya"]


def _swap(vocabulary: dict[str, int]) -> None:
    one, two, *_ = [token for token in vocabulary if len(token) == 1]
    vocabulary[one], vocabulary[two] = vocabulary[two], vocabulary[one]


def test_the_plan_says_what_decides_a_bake(originals: Path) -> None:
    model = open_model(locate(str(originals / "model")), "float32", "cpu")
    data: dict[str, Any] = {"calibration": str(originals / "calibration.txt"), "samples": 2, "sequence_length": 64}
    plain, baked, other = (
        compressor.plan(str(originals / "model"), experts=4, strategy="count-guided", **data, **more)
        for more in ({}, {"bake": "router"}, {"bake": "router", "seed": 1})
    )
    assert plain.bake is None and baked.bake is not None and baked.bake["calibration"]["sha256"]
    assert len({plan.digest() for plan in (plain, baked, other)}) == 3
    assert type(baked).from_dict(json.loads(baked.to_json())) == baked and model.fingerprint == baked.source.fingerprint


def test_the_text_of_a_bake_is_bounded_as_a_plans_own_is(originals: Path) -> None:
    plan = compressor.plan(
        str(originals / "model"), experts=4, strategy="model-centric", bake="router",
        calibration=str(originals / "calibration.txt"),
    ).to_dict()  # fmt: skip
    plan["bake"]["calibration"]["asked"].update(samples=10**9)
    with pytest.raises(CompressionError, match="samples of 256 tokens are more than"):
        CompressionPlan.from_dict(plan)
    plan["bake"] = [1]
    with pytest.raises(CompressionError, match="not built like a plan"):
        CompressionPlan.from_dict(plan)


def test_kept_routers_that_cannot_be_read_count_as_none(tmp_path: Path) -> None:
    place = tmp_path / "bake"
    keep(place, RoutersBaked({"gate": torch.ones(2, 3)}, {"after": 0.5}))
    whole, found = place.read_bytes(), kept(place)
    assert found is not None and found.result == {"after": 0.5} and torch.equal(found.tensors["gate"], torch.ones(2, 3))
    for damaged in (b"", whole[:-1], whole[:20]):
        place.write_bytes(damaged)
        assert kept(place) is None
