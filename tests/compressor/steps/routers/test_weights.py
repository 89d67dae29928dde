"""Moments of routers' inputs and gradients in every family; a bias where routers take one, by hand and as a command."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

import compressor
from compressor.divergence.evaluator import Evaluator
from compressor.errors import CompressionError
from compressor.model.router_logits import router_weight
from compressor.model.streaming import ReversePass
from compressor.progress import Silent
from compressor.steps.routers.options import Routers
from compressor.steps.routers.step import stored_names
from compressor.steps.routers.weights import RIDGE, Moments, RouterGradients, RouterShift, bias_places, calibrate_bias
from tests.compressor.model.test_reverse import REFUSED, loss
from tests.support import small, zoo
from tests.support.command_line import Run, names, refused
from tests.support.opened_models import batches, opened
from tests.support.small import tree
from tests.support.training_setups import smaller


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


pytestmark = pytest.mark.usefixtures("offline")


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


# --- the commands -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, a smaller one, text, and a reference set of the smaller one."""
    folder = smaller(tmp_path_factory.mktemp("models"))
    items = [
        {"prompt": f"{n} is", "answer": answer, "choices": [" a", " b"]} for n in "12345" for answer in (" a", " b")
    ]
    (folder / "items.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    compressor.reference(
        str(folder / "smaller"), folder / "reference", calibration=folder / "items.jsonl", device="cpu"
    )
    return folder


def bias(run: Run, folder: Path, out: Path, *more: Any) -> Any:
    data = ("--calibration", folder / "calibration.txt", "--base", folder / "model")
    given = ("--method", "bias", "--reference", folder / "reference", "--rounds", 1)
    sizes = ("--sequences", 8, "--sequence-length", 32)
    return run("calibrate-router", folder / "smaller", "-o", out, *data, *sizes, *given, *more)


@pytest.mark.full
def test_a_bias_of_a_reference_set_is_recorded_and_repeats(run: Run, models: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        assert (result := bias(run, models, tmp_path / name, "--optimizer", "kernel", "--json")).status == 0, result
    assert tree(tmp_path / "one") == tree(tmp_path / "two")
    entry = json.loads((tmp_path / "one" / "compression.json").read_text())["plan"]["steps"][-1]
    assert (entry["options"]["method"], entry["options"]["optimizer"]) == ("bias", "kernel")
    assert entry["result"]["items"] == 5 and entry["result"]["after"] <= entry["result"]["before"]
    assert names(tmp_path) == ["one", "two"]


def test_the_better_of_both_ways_is_taken(run: Run, models: Path, tmp_path: Path) -> None:
    result = bias(run, models, tmp_path / "out", "--method", "auto", "--json")
    assert result.status == 0, result
    (told,) = (step["result"] for step in json.loads(result.out)["steps"])
    tried = told["tried"]
    assert tried.keys() == {"router", "bias"} and told["after"] == min(tried.values()) <= told["before"]
    assert told["taken"] in (min(tried, key=lambda name: tried[name]), "none")


def test_what_does_not_belong_to_a_bias_is_refused(run: Run, models: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    refused(bias(run, models, out, "--method", "router"), "reference is for the methods bias and auto; name one of")
    refused(bias(run, models, out, "--optimizer", "oracle"), "optimizer is 'oracle'; input should be 'own', 'mode'")
    refused(bias(run, models, out, "--reference", tmp_path / "none"), "reference.json cannot be read")
    shutil.copytree(models / "reference", tmp_path / "foreign")
    small.edit_json(tmp_path / "foreign" / "reference.json", lambda content: content.update(embedding="some/model"))
    refused(bias(run, models, out, "--reference", tmp_path / "foreign"), "are embedded by 'some/model', not 'own'")
    with pytest.raises(CompressionError, match="make one with `moe-compress reference"):
        compressor.compress(
            str(models / "model"), out, [Routers("bias", reference=str(models / "reference"), rounds=1, sequences=8)],
            calibration=str(models / "calibration.txt"),
        )  # fmt: skip
    assert names(tmp_path) == ["foreign"]
