"""The comparison of corrections against whole stock models, and what becomes of corrections that do harm."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import kl_div, log_softmax
from transformers import PreTrainedModel

from compressor.checkpoint.reader import Checkpoint
from compressor.evaluation.evaluator import Difference
from compressor.progress import Silent
from compressor.recipe.steps_plan import decisions
from compressor.steps.correct import in_order
from compressor.steps.correct.in_order import correct, keep_the_better, read_difference
from compressor.steps.correct.step import Correct
from compressor.surgery.cutting import CutFiles, cut_layers
from compressor.surgery.job import make_job
from compressor.workdir.workdir import write_stage
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
def test_the_difference_is_that_of_whole_models_and_harm_is_undone(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock, model = opened_wide(name, tmp_path / "in")
    plans, data, files = drops(model.architecture), with_heldout(stock, heldout=9), CutFiles(tmp_path / "cut")
    run(model, plans, data, correction=Correct("tune", steps=3, tokens=20), files=files)
    for layer in model.architecture.layers:  # a correction that does harm
        worse = {key: value * 3 if "experts" in key else value for key, value in files.tensors(layer).items()}
        files.save(files.plan(layer), layer, worse)  # type: ignore[arg-type]
    field, plan = zoo.family(name).count_field, whole_plan(model, plans)
    plain, harmed = (cut(stock, field, decisions(plan)) for _ in range(2))
    state = {key: value for layer in model.architecture.layers for key, value in files.tensors(layer).items()}
    harmed.load_state_dict(state, strict=False)
    kept = tuple(found for layer in model.architecture.layers if (found := files.plan(layer)) is not None)
    text = data.heldout_batches
    expected = Difference.of(*(by_sequence(stock, each, text[0]) for each in (harmed, plain)))

    better = keep_the_better(model, kept, files, text, Silent())

    found = read_difference(files)
    assert found is not None and found.accepted and found.sequences == 9
    assert found.before == pytest.approx(expected.before, rel=1e-3)
    assert found.after == pytest.approx(expected.after, rel=1e-3)
    assert found.standard_error == pytest.approx(expected.standard_error, rel=1e-2)
    assert all(plan.figures["correction"]["kept"] == "none" for plan in better)
    assert all("without" in plan.figures["correction"]["reason"] for plan in better)
    assert [plan.groups for plan in better] == [plan.groups for plan in kept]
    for layer, plan in zip(model.architecture.layers, better, strict=True):
        model.partial.load(model.partial.keys_under(layer.unit))
        expected_cut = cut_layers(model.partial.model, [layer], {layer.name: plan})
        assert files.plan(layer) == plan
        assert all(torch.equal(files.tensors(layer)[key], value) for key, value in expected_cut.items())
        model.partial.release(layer.unit)
    monkeypatch.setattr(in_order, "compare_corrections", None)  # a run that goes on asks nothing anew
    assert keep_the_better(model, kept, files, text, Silent()) == better


def test_a_plan_is_carried_out_without_the_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stock, model = opened_wide("mixtral", tmp_path / "in")
    data = with_heldout(stock, fit=32, heldout=8)
    asked, plans = Correct("tune", steps=100, tokens=64), drops(model.architecture)
    made = whole_plan(model, plans)
    correction = {**asked.to_dict(), "dtype": "float32"}
    plan = whole_plan(model, plans, correction=correction, calibration=data.identity)
    for harm, undoing in ((False, Difference(0.1, 0.2, 0.01, 8)), (True, Difference(0.2, 0.1, 0.01, 8))):
        monkeypatch.setattr(in_order, "compare_corrections", lambda *_, found=undoing: found)
        files, told = CutFiles(tmp_path / f"cut {harm}"), list[object]()
        corrected = correct(model, plan, Silent(), files, data, asked, lambda *seen, to=told: to.append(seen))
        assert bool(told) is not harm  # whom the corrected layers were visited by
        written, plainly = tmp_path / f"out {harm}", tmp_path / f"plain {harm}"
        for job, out in ((make_job(model, corrected, cut=files), written), (make_job(model, made), plainly)):
            write_stage(job, out, ["prune"], lambda *_: None)
        found, plain = (Checkpoint(folder) for folder in (written, plainly))
        assert found.tensors.keys() == plain.tensors.keys()
        assert all(torch.equal(found.read(name), plain.read(name)) for name in plain.tensors) is harm


def test_too_little_text_undoes_nothing(tmp_path: Path) -> None:
    stock, model = opened_wide("mixtral", tmp_path / "in")
    plans, data, files = drops(model.architecture), with_heldout(stock), CutFiles(tmp_path / "cut")
    made = tuple(run(model, plans, data, correction=Correct("ridge"), files=files).values())
    assert keep_the_better(model, made, files, data.heldout_batches, Silent()) == made
    found = read_difference(files)
    assert found is not None and not found.accepted and found.sequences == 3
