"""The judgement of corrections against whole stock models, and what becomes of corrections that do harm."""

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import kl_div, log_softmax
from transformers import PreTrainedModel

from compressor.planning.make import correct
from compressor.progress import Silent
from compressor.recipe.plan import CompressionPlan
from compressor.recipe.registry import load_exporter
from compressor.steps.correct import whole_model
from compressor.steps.correct.refit import Correction
from compressor.steps.correct.whole_model import Verdict, keep_the_better, read_verdict
from compressor.surgery.cutting import CutFiles, cut_layers
from compressor.surgery.job import make_job
from tests import zoo
from tests.ordered import drops, opened_wide, run, whole_plan, with_heldout
from tests.reference import cut

FAMILIES = ("mixtral", "deepseek_v3", "ernie4_5_vl_moe")


def by_sequence(original: PreTrainedModel, other: PreTrainedModel, ids: Tensor) -> list[float]:
    """KL in nats per predicted token from two plain forwards."""
    with torch.no_grad():
        one, two = (log_softmax(model(input_ids=ids).logits[:, :-1].double(), -1) for model in (original, other))
    return kl_div(two, one, reduction="none", log_target=True).sum(-1).mean(-1).tolist()


@pytest.mark.parametrize("name", FAMILIES)
def test_the_verdict_is_that_of_whole_models_and_harm_is_undone(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock, model = opened_wide(name, tmp_path / "in")
    plans, data, files = drops(model.architecture), with_heldout(stock, heldout=9), CutFiles(tmp_path / "cut")
    run(model, plans, data, correction=Correction("tune", steps=3, tokens=20), files=files)
    for layer in model.architecture.layers:  # a correction that does harm
        worse = {key: value * 3 if "experts" in key else value for key, value in files.tensors(layer).items()}
        files.save(files.plan(layer), layer, worse)  # type: ignore[arg-type]
    field, plan = zoo.family(name).count_field, whole_plan(model, plans)
    plain, harmed = (cut(stock, field, plan.to_dict()) for _ in range(2))
    state = {key: value for layer in model.architecture.layers for key, value in files.tensors(layer).items()}
    harmed.load_state_dict(state, strict=False)
    kept = tuple(found for layer in model.architecture.layers if (found := files.plan(layer)) is not None)
    text = data.heldout_batches
    expected = Verdict.of(*(by_sequence(stock, each, text[0]) for each in (harmed, plain)))

    better = keep_the_better(model, kept, files, text, Silent())

    found = read_verdict(files)
    assert found is not None and found.undoes and found.sequences == 9
    assert found.corrected == pytest.approx(expected.corrected, rel=1e-3)
    assert found.uncorrected == pytest.approx(expected.uncorrected, rel=1e-3)
    assert found.error == pytest.approx(expected.error, rel=1e-2)
    assert all(plan.figures["correction"]["kept"] == "none" for plan in better)
    assert all("without" in plan.figures["correction"]["reason"] for plan in better)
    assert [plan.groups for plan in better] == [plan.groups for plan in kept]
    for layer, plan in zip(model.architecture.layers, better, strict=True):
        model.partial.load(model.partial.keys_under(layer.unit))
        expected_cut = cut_layers(model.partial.model, [layer], {layer.name: plan})
        assert files.plan(layer) == plan
        assert all(torch.equal(files.tensors(layer)[key], value) for key, value in expected_cut.items())
        model.partial.release(layer.unit)
    monkeypatch.setattr(whole_model, "judge_corrections", None)  # a run that goes on asks nothing anew
    assert keep_the_better(model, kept, files, text, Silent()) == better


def test_a_plan_is_carried_out_without_the_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stock, model = opened_wide("mixtral", tmp_path / "in")
    data = with_heldout(stock, fit=32, heldout=8)
    asked = {"method": "tune", "steps": 100, "tokens": 64, "rate": 0.3, "dtype": "float32"}
    made = whole_plan(model, drops(model.architecture))
    plan = CompressionPlan.from_dict({**made.to_dict(), "correction": asked, "calibration": data.identity})
    for harm, verdict in ((False, Verdict(0.1, 0.2, 0.01, 8)), (True, Verdict(0.2, 0.1, 0.01, 8))):
        monkeypatch.setattr(whole_model, "judge_corrections", lambda *_, found=verdict: found)
        files, told = CutFiles(tmp_path / f"cut {harm}"), list[object]()
        corrected = correct(model, plan, Silent(), files, data, lambda *seen, to=told: to.append(seen))
        assert bool(told) is not harm  # whom the corrected layers were visited by
        written, plainly = tmp_path / f"out {harm}", tmp_path / f"plain {harm}"
        for job, out in ((make_job(model, corrected, cut=files)[0], written), (make_job(model, made)[0], plainly)):
            load_exporter("safetensors").write(job, out, False, lambda *_: None)
        found, plain = (load_file(folder / "model.safetensors") for folder in (written, plainly))
        assert found.keys() == plain.keys()
        assert all(torch.equal(found[name], plain[name]) for name in plain) is harm


@pytest.mark.parametrize(
    ("corrected", "uncorrected", "undoes"),
    [
        ([0.2] * 8, [0.1] * 8, True),
        ([0.1] * 8, [0.2] * 8, False),
        ([0.2] * 7, [0.1] * 7, False),  # too few to tell
        ([0.1, 0.3] * 4, [0.1] * 8, True),  # 0.1 higher, standard error 0.038
        ([0.0, 0.3] * 4, [0.1] * 8, False),  # 0.05 higher, standard error 0.057
        ([math.nan] * 8, [0.1] * 8, True),
        ([0.1] * 8, [math.nan] * 8, False),
        ([math.nan] * 8, [math.nan] * 8, False),
    ],
)
def test_only_sure_harm_is_undone(corrected: list[float], uncorrected: list[float], undoes: bool) -> None:
    assert Verdict.of(corrected, uncorrected).undoes is undoes


def test_too_little_text_judges_nothing(tmp_path: Path) -> None:
    stock, model = opened_wide("mixtral", tmp_path / "in")
    plans, data, files = drops(model.architecture), with_heldout(stock), CutFiles(tmp_path / "cut")
    made = tuple(run(model, plans, data, correction=Correction("ridge"), files=files).values())
    assert keep_the_better(model, made, files, data.heldout_batches, Silent()) == made
    found = read_verdict(files)
    assert found is not None and not found.undoes and found.sequences == 3
