"""Router calibration: a planted fault is won back, what is right stays, and the command keeps its promises."""

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

from compressor.divergence.evaluator import Evaluator
from compressor.divergence.teacher_outputs import read_base
from compressor.model.opened import OpenModel
from compressor.progress import Silent
from compressor.steps.routers.step import stored_names
from compressor.steps.routers.weights import Answered, Weights, calibrate_weights, evaluate_trials
from tests.support import small, zoo
from tests.support.audit import Moment, happening, paths_of, press_ctrl_c
from tests.support.command_line import Run, names, refused
from tests.support.opened_models import opened
from tests.support.small import tree
from tests.support.training_setups import smaller

pytestmark = pytest.mark.usefixtures("offline")
SIZES = ("--sequences", 8, "--sequence-length", 32, "--rounds", 2)


def weights(model: OpenModel) -> Weights:
    return {key: model.checkpoint.read(name).clone() for key, name in stored_names(model).items()}


def disturbed(own: Weights, seed: int, size: float) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {key: value + size * torch.randn(value.shape, generator=generator) for key, value in own.items()}


def texts(model: OpenModel, parts: Sequence[Tensor]) -> list[Answered]:
    answers = read_base(model, {"text": parts}, None, Silent(), model.source.folder / "kept")["text"]
    return [[pair] for pair in zip(parts, answers, strict=True)]


@pytest.mark.parametrize("name", zoo.sweep(["olmoe", "mixtral", "gpt_oss"]))
def test_routers_that_were_disturbed_come_back_toward_the_base(name: str, tmp_path: Path) -> None:
    stock, model = opened(name, tmp_path)
    *fit, heldout, test = zoo.tokens(stock, 72, 24, seed=1).split(12)
    spoilt = disturbed(weights(model), 0, 0.15)
    made = calibrate_weights(model, spoilt, texts(model, fit), Evaluator.of(model, [heldout]), Silent())
    trials = [spoilt, made.weights, weights(model)]
    figures = evaluate_trials(model, Evaluator.of(model, [test]), trials)
    before, after, right = (each.means["kl"] for each in figures)
    assert right == 0 and after < 0.6 * before
    first, last = made.before.means["kl"], made.after.means["kl"]
    assert last < 0.6 * first and made.steps[0].gain > made.steps[0].standard_error > 0
    assert first - last == pytest.approx(sum(step.gain for step in made.steps), rel=1e-6)


def test_nothing_changes_where_nothing_is_wrong(tmp_path: Path) -> None:
    stock, model = opened("mixtral", tmp_path)
    fit, heldout = zoo.tokens(stock, 16, 16, seed=1).split(8)
    own = weights(model)
    made = calibrate_weights(model, own, texts(model, fit.split(4)), Evaluator.of(model, [heldout]), Silent())
    assert all(torch.equal(made.weights[key], own[key]) for key in own)
    assert made.before is made.after and made.before.means["kl"] == 0
    assert not any(step.step for step in made.steps)


def test_trials_in_one_pass_have_the_figures_of_each_alone(tmp_path: Path) -> None:
    stock, model = opened("mixtral", tmp_path)
    tokens = zoo.tokens(stock, 3, 16, seed=1)
    trials = [disturbed(weights(model), seed, 0.1) for seed in range(3)]
    for trial, found in zip(trials, evaluate_trials(model, Evaluator.of(model, [tokens]), trials), strict=True):
        whole = zoo.build("mixtral")
        whole.load_state_dict({**whole.state_dict(), **trial})
        logs = stock(input_ids=tokens).logits[:, :-1].double().log_softmax(-1)
        ours = whole(input_ids=tokens).logits[:, :-1].double().log_softmax(-1)
        torch.testing.assert_close(found.kl, (logs.exp() * (logs - ours)).sum(-1).mean(1), rtol=1e-4, atol=1e-6)


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, its copy of four experts with spoilt routers, and text."""
    folder = smaller(tmp_path_factory.mktemp("models"))
    generator = torch.Generator().manual_seed(0)
    small.edit_tensors(folder / "smaller", lambda tensors: [
        tensors.update({key: value + 0.2 * torch.randn(value.shape, generator=generator)})
        for key, value in list(tensors.items()) if key.endswith("gate.weight")
    ])  # fmt: skip
    return folder


def calibrate(run: Run, folder: Path, out: Path, *more: Any) -> Any:
    data = ("--calibration", folder / "calibration.txt", "--base", folder / "model")
    return run("calibrate-router", folder / "smaller", "-o", out, *data, *SIZES, *more)


def test_the_command_moves_routers_alone_and_says_what_it_took(run: Run, models: Path, tmp_path: Path) -> None:
    outs = [tmp_path / name for name in ("one", "two")]
    for out in outs:
        result = calibrate(run, models, out, "--json")
        assert result.status == 0, result
    (told,) = [step["result"] for step in json.loads(result.out)["steps"]]
    assert told["after"] < told["before"] and len(told["steps"]) == 2
    assert tree(outs[0]) == tree(outs[1]) and names(tmp_path) == ["one", "two"]
    in_place = calibrate(run, models, out)
    assert f"  moe-compress gate {models / 'model'} {out}\n" in in_place.out
    before, after = (load_file(folder / "model.safetensors") for folder in (models / "smaller", outs[0]))
    changed = {key for key in before if not torch.equal(before[key], after[key])}
    assert before.keys() == after.keys() and changed and all(key.endswith("gate.weight") for key in changed)
    assert transformers.AutoModelForCausalLM.from_pretrained(outs[0]).config.num_local_experts == 4
    record, own = (json.loads((folder / "compression.json").read_text()) for folder in (outs[0], models / "smaller"))
    entry = record["plan"]["steps"].pop()
    assert record["plan"] == own["plan"] and record["bytes"] == own["bytes"]
    assert (entry["name"], entry["options"]["method"], entry["options"]["rounds"]) == ("routers", "router", 2)
    assert entry["result"] == told and entry["text"]["source"] == "calibration.txt"
    again = calibrate(run, models, outs[1])
    assert again.status == 0 and "is in place already" in again.err and tree(outs[0]) == tree(outs[1])
    refused(calibrate(run, models, outs[0], "--seed", 1), "exists already")


@pytest.mark.full
def test_a_run_that_is_stopped_while_routers_are_written_goes_on_to_the_same_bytes(
    run: Run, models: Path, tmp_path: Path
) -> None:
    assert calibrate(run, models, tmp_path / "whole").status == 0
    with happening(Moment(pattern=r"/stage-1/model\.layers\.1\.safetensors$", nth=2), press_ctrl_c):
        assert calibrate(run, models, tmp_path / "out").status == 130
    with paths_of("os.rename", r"/kept/") as kept:
        assert calibrate(run, models, tmp_path / "out").status == 0
    assert not kept, "routers were calibrated again"
    assert tree(tmp_path / "out") == tree(tmp_path / "whole") and names(tmp_path) == ["out", "whole"]


def test_refusals(run: Run, models: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    refused(calibrate(run, models, out, "--method", "biases"), "routers: method is 'biases'; input should be 'router'")
    refused(calibrate(run, models, out, "--rounds", 9), "8 sequences are fewer than 9 rounds; give at least as many")
    shutil.copytree(models / "model", tmp_path / "renamed")
    small.edit_json(tmp_path / "renamed" / "tokenizer.json", lambda content: _swap(content["model"]["vocab"]))
    refused(calibrate(run, models, out, "--base", tmp_path / "renamed"), "have different tokenizers")
    refused(run("compress", models / "model", "-o", out, "--experts", 4, "--routers", "x"), "routers: method is 'x'")
    assert not out.exists() and names(tmp_path) == ["renamed"]


def _swap(vocabulary: dict[str, int]) -> None:
    one, two, *_ = [token for token in vocabulary if len(token) == 1]
    vocabulary[one], vocabulary[two] = vocabulary[two], vocabulary[one]
