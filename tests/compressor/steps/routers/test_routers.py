"""Router calibration: by the moments of inputs and gradients, by a bias, and the command, which keeps its promises."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

import compressor
from compressor.divergence.evaluator import Evaluator
from compressor.divergence.teacher_outputs import read_base
from compressor.errors import CompressionError
from compressor.hub.card import card_text
from compressor.model.opened import OpenModel
from compressor.model.router_logits import router_weight
from compressor.model.streaming import ReversePass
from compressor.progress import Silent
from compressor.steps.routers.options import Routers
from compressor.steps.routers.step import stored_names
from compressor.steps.routers.weights import (
    RIDGE,
    Answered,
    Moments,
    RouterGradients,
    RouterShift,
    Weights,
    bias_places,
    calibrate_bias,
    calibrate_weights,
    evaluate_trials,
)
from tests.compressor.model.test_reverse import REFUSED, loss
from tests.support import small, zoo
from tests.support.audit import Moment, happening, paths_of, press_ctrl_c
from tests.support.command_line import Run, names, refused
from tests.support.opened_models import batches, opened
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
    # The model that was read is the smaller one.
    assert record["plan"] == own["plan"] and set(record["bytes"].values()) == {own["bytes"]["after"]}
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
    with happening(Moment(pattern=r"/step-1/model\.layers\.1\.safetensors$", nth=2), press_ctrl_c):
        assert calibrate(run, models, tmp_path / "out").status == 130
    with paths_of("os.rename", r"/kept/") as kept:
        assert calibrate(run, models, tmp_path / "out").status == 0
    assert not kept, "routers were calibrated again"
    assert tree(tmp_path / "out") == tree(tmp_path / "whole") and names(tmp_path) == ["out", "whole"]


def test_refusals(run: Run, models: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    refused(calibrate(run, models, out, "--method", "biases"), "routers: method should be 'router', .*, it is 'biases'")
    refused(calibrate(run, models, out, "--rounds", 9), "8 sequences are fewer than 9 rounds; give at least as many")
    shutil.copytree(models / "model", tmp_path / "renamed")
    small.edit_json(tmp_path / "renamed" / "tokenizer.json", lambda content: _swap(content["model"]["vocab"]))
    refused(calibrate(run, models, out, "--base", tmp_path / "renamed"), "have different tokenizers")
    refused(
        run("compress", models / "model", "-o", out, "--experts", 4, "--routers", "x"),
        "method should .*'x'",
    )
    assert not out.exists() and names(tmp_path) == ["renamed"]


def _swap(vocabulary: dict[str, int]) -> None:
    one, two, *_ = [token for token in vocabulary if len(token) == 1]
    vocabulary[one], vocabulary[two] = vocabulary[two], vocabulary[one]


@pytest.mark.parametrize("name", zoo.sweep())
def test_inputs_times_gradients_are_the_gradient_of_the_weight(name: str, tmp_path: Path) -> None:
    if name in REFUSED:
        pytest.skip("no gradients go through it layer by layer")
    stock, model = opened(name, tmp_path)
    parts, seen = batches(stock, (2, 1)), RouterGradients()
    ReversePass(model, parts).run(loss, seen)
    stock.requires_grad_(True)
    for number, tokens in enumerate(parts):
        loss(number, stock(input_ids=tokens, use_cache=False)).backward()  # type: ignore[no-untyped-call]
    for key, moments in seen.moments.items():
        expected = stock.get_parameter(key).grad
        assert expected is not None and moments.tokens == sum(part.numel() for part in parts)
        scale = max(float(expected.abs().max()), 1e-3)
        torch.testing.assert_close(moments.both.T.float(), expected, atol=1e-4 * scale, rtol=1e-3, msg=key)
        assert torch.equal(moments.gradients, moments.gradients.T)
    keys = map(router_weight, model.architecture.layers)
    assert seen.moments.keys() == {key for key in keys if stock.get_parameter(key).grad is not None}


def test_a_direction_solves_the_ridge_equations() -> None:
    generator = torch.Generator().manual_seed(0)
    x, g = (torch.randn(50, size, generator=generator).double() for size in (6, 4))
    moments = Moments.empty(6, 4)
    for part in range(0, 50, 7):
        moments.add(x[part : part + 7], g[part : part + 7])
    change = moments.direction(0.3)
    left = x.T @ x + 0.3 * (x.square().sum() / 6) * torch.eye(6)
    right = g.T @ g + 0.3 * (g.square().sum() / 4) * torch.eye(4)
    torch.testing.assert_close(right @ change @ left, -(g.T @ x))  # as one system: kron(right, left) vec = -vec
    assert moments.mean_square(change) == pytest.approx(float((x @ change.T).square().mean()))
    assert float((change * (g.T @ x)).sum()) < 0  # downhill


def router_logits(stock: Any, tokens: Tensor, router: str) -> tuple[Tensor, Tensor]:
    """What a stock model's router is given [T, H], and the logits [T, E] that its linear map makes of it."""
    seen: list[Tensor] = []
    module = stock.get_submodule(router)
    handle = module.register_forward_pre_hook(lambda _, args: seen.append(args[0].reshape(-1, args[0].shape[-1])))
    with torch.no_grad():
        stock(input_ids=tokens)
    handle.remove()
    return seen[0], torch.nn.functional.linear(seen[0], module.weight, getattr(module, "bias", None))


@pytest.mark.parametrize(
    ("name", "kind"), [("gpt_oss", "router bias"), ("deepseek_v3", "selection bias"), ("mixtral", "router weight")]
)
def test_a_bias_goes_where_the_router_takes_one(name: str, kind: str, tmp_path: Path) -> None:
    stock, model = opened(name, tmp_path)
    tokens = zoo.tokens(stock, 6, 16, seed=1)
    layer = model.architecture.layers[0]
    (place,) = bias_places(model, [layer], [tokens[:4], tokens[4:]])
    assert place.kind == kind
    own = stock.state_dict()[place.key]
    change = torch.linspace(-1, 1, layer.experts, dtype=torch.float64)
    moved = place.moved(own, change, change / 2)
    if kind == "selection bias":  # which is added to scores
        torch.testing.assert_close(moved.double() - own.double(), change / 2, atol=1e-6, rtol=0)
        return
    x, before = router_logits(stock, tokens, layer.router)
    stock.load_state_dict({**stock.state_dict(), place.key: moved})
    _, after = router_logits(stock, tokens, layer.router)
    if place.direction is None:
        torch.testing.assert_close(after - before, change.float().expand_as(before), atol=1e-5, rtol=0)
        return
    data = x.double().numpy()  # ridge regression of one, as least squares with rows for the penalty
    penalty = numpy.sqrt(RIDGE * (data**2).sum(0).mean()) * numpy.eye(data.shape[1])
    target = numpy.concatenate([numpy.ones(len(data)), numpy.zeros(data.shape[1])])
    expected = numpy.linalg.lstsq(numpy.concatenate([data, penalty]), target, rcond=None)[0]
    numpy.testing.assert_allclose(place.direction.numpy(), expected, rtol=1e-4, atol=1e-5)
    along = data @ expected
    assert (place.mean, place.deviation) == pytest.approx((along.mean(), along.std()), rel=1e-3)
    torch.testing.assert_close(
        (after - before).double(), torch.outer(torch.from_numpy(along), change), atol=1e-4, rtol=0
    )


def test_the_scale_that_undoes_a_known_bias_is_found_and_a_wrong_direction_is_left(tmp_path: Path) -> None:
    stock, model = opened("gpt_oss", tmp_path)
    batches = tuple(zoo.tokens(stock, 24, 16, seed=1).split(8))
    evaluator = Evaluator.of(model, batches)
    layers = model.architecture.layers
    places = bias_places(model, layers, batches)
    known = torch.randn(len(layers), layers[0].experts, generator=torch.Generator().manual_seed(0)).double()
    own = {key: model.checkpoint.read(name) for key, name in stored_names(model, [p.key for p in places]).items()}
    spoilt = {place.key: (own[place.key] + 2 * known[n]).float() for n, place in enumerate(places)}
    made = calibrate_bias(model, spoilt, places, RouterShift(-known, -known, 9, 1.0), evaluator, Silent())
    assert made.after.means["kl"] < 1e-5 < made.before.means["kl"] and made.steps[0].step == 2
    for key, value in own.items():
        torch.testing.assert_close(made.weights[key], value, atol=1e-6, rtol=0)
    left = calibrate_bias(model, spoilt, places, RouterShift(50 * known, 50 * known, 9, 1.0), evaluator, Silent())
    assert left.after is left.before and left.steps[0].step == 0
    assert all(torch.equal(left.weights[key], spoilt[key]) for key in spoilt)
    wrong = RouterShift(50 * known, 50 * known, 9, 1.0)
    forced = calibrate_bias(model, spoilt, places, wrong, evaluator, Silent(), forced=True)
    assert forced.steps[0].step > 0 > forced.steps[0].gain
    assert forced.after.means["kl"] > forced.before.means["kl"]


@pytest.fixture(scope="module")
def reference(models: Path) -> Path:
    """A reference set of the smaller model."""
    items = [
        {"prompt": f"{n} is", "answer": answer, "choices": [" a", " b"]} for n in "12345" for answer in (" a", " b")
    ]
    (models / "items.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    out = models / "reference"
    compressor.reference(str(models / "smaller"), out, calibration=models / "items.jsonl", device="cpu")
    return out


def bias(run: Run, reference: Path, out: Path, *more: Any) -> Any:
    given = ("--method", "bias", "--reference", reference, "--rounds", 1)
    return calibrate(run, reference.parent, out, *given, *more)


@pytest.mark.full
def test_a_bias_of_a_reference_set_is_recorded_and_repeats(run: Run, reference: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        result = bias(run, reference, tmp_path / name, "--optimizer", "kernel", "--json")
        assert result.status == 0, result
    assert tree(tmp_path / "one") == tree(tmp_path / "two")
    entry = json.loads((tmp_path / "one" / "compression.json").read_text())["plan"]["steps"][-1]
    assert (entry["options"]["method"], entry["options"]["optimizer"]) == ("bias", "kernel")
    assert entry["result"]["items"] == 5 and entry["result"]["after"] <= entry["result"]["before"]
    assert names(tmp_path) == ["one", "two"]


def test_a_change_without_a_gain_can_be_forced(run: Run, reference: Path, tmp_path: Path) -> None:
    more = ("--optimizer", "kernel", "--accept", "always", "--overwrite")
    result = bias(run, reference, tmp_path / "out", *more)
    assert result.status == 0 and "forced; held-out text confirms" in result.out, result
    entry = json.loads((tmp_path / "out" / "compression.json").read_text())["plan"]["steps"][-1]
    figures = entry["result"]
    gained = figures["steps"][0]["gain"] > figures["steps"][0]["standard_error"]
    assert entry["options"]["accept"] == "always" and figures["changed"] and figures["confirmed"] == gained
    before, after = (load_file(path / "model.safetensors") for path in (reference.parent / "smaller", tmp_path / "out"))
    assert any(not torch.equal(before[key], after[key]) for key in before)
    card = card_text(tmp_path / "out", "org/model").text
    assert "forced; held-out text confirms" in card
    assert gained or "It was forced (routers.accept: always)" in card


def test_the_better_of_both_ways_is_taken(run: Run, reference: Path, tmp_path: Path) -> None:
    result = bias(run, reference, tmp_path / "out", "--method", "auto", "--json")
    assert result.status == 0, result
    (told,) = (step["result"] for step in json.loads(result.out)["steps"])
    tried = told["tried"]
    assert tried.keys() == {"router", "bias"} and told["after"] == min(tried.values()) <= told["before"]
    assert told["taken"] in (min(tried, key=lambda name: tried[name]), "none")


def test_what_does_not_belong_to_a_bias_is_refused(run: Run, reference: Path, tmp_path: Path) -> None:
    out, foreign = tmp_path / "out", shutil.copytree(reference, tmp_path / "foreign")
    small.edit_json(foreign / "reference.json", lambda content: content.update(embedding="some/model"))
    for more, message in (
        (("--method", "router"), "reference is for the methods bias and auto; name one of"),
        (("--optimizer", "oracle"), "optimizer should be 'own', 'mode'"),
        (("--reference", tmp_path / "none"), "reference.json cannot be read"),
        (("--reference", foreign), "are embedded by 'some/model', not 'own'"),
    ):
        refused(bias(run, reference, out, *more), message)
    model, text = reference.parent / "model", str(reference.parent / "calibration.txt")
    step = Routers("bias", reference=str(reference), rounds=1, sequences=8)
    with pytest.raises(CompressionError, match="make one with `moe-compress reference"):
        compressor.compress(str(model), out, [step], calibration=text)
    assert names(tmp_path) == ["foreign"]
