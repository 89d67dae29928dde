"""A pass in order against whole stock models, an interrupted one, and what becomes of corrections that do harm."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import kl_div, log_softmax
from transformers import PreTrainedModel

import compressor
from compressor.data.batches import Calibration
from compressor.divergence.evaluator import Difference, Evaluator
from compressor.errors import CompressionError
from compressor.model.opened import OpenModel
from compressor.progress import Silent
from compressor.recipe.plan import LayerPlan
from compressor.recipe.registry import load_strategy
from compressor.recipe.steps_plan import Plan
from compressor.steps.correct.options import Correct
from compressor.steps.correct.sequential import keep_the_better, read_difference
from compressor.steps.cutting import CutFiles, cut_layers
from compressor.steps.job import make_job
from compressor.steps.prune.planning import Planner, PruneSpec
from tests.support import zoo
from tests.support.audit import Moment, happening, paths_of, press_ctrl_c
from tests.support.opened_models import one_expert, plain_calls
from tests.support.plans import by_hand
from tests.support.sequential_runs import (
    SHARED,
    Corrected,
    Watched,
    drops,
    keeps,
    merges,
    opened_wide,
    run,
    take_for_text,
    watch_corrections,
    whole_plan,
    with_heldout,
)
from tests.support.surgery_reference import cut, realign

EVERY = pytest.mark.parametrize("name", zoo.sweep(but={*SHARED, *zoo.LOOPED}))
LOGITS = 1e-5
TUNE = Correct("tune", steps=3, tokens=20)


def watched_run(model: OpenModel, plans: dict[str, LayerPlan], ids: Tensor, **more: Any) -> dict[int, Tensor]:
    """Logits of batches of two and one sequences from a pass in order."""
    watched = Watched([ids[:2], ids[2:]])
    run(model, plans, probe=watched, **more)
    return watched.logits


@torch.no_grad()
def whole(model: PreTrainedModel, ids: Tensor) -> dict[int, Tensor]:
    """Logits of the same batches from a plain forward."""
    return {number: model(input_ids=part, use_cache=False).logits for number, part in enumerate((ids[:2], ids[2:]))}


def check(found: dict[int, Tensor], expected: dict[int, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for number, logits in expected.items():
        torch.testing.assert_close(found[number], logits, rtol=0, atol=LOGITS)


@EVERY
def test_every_family_puts_out_what_its_cut_and_corrected_stock_model_does(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock, model = opened_wide(name, tmp_path)
    data, plans, ids = with_heldout(stock), drops(model.architecture), zoo.tokens(stock, 3, seed=5)
    small = cut(stock, zoo.family(name).count_field, whole_plan(model, plans).to_dict())
    seen = watch_corrections(monkeypatch)
    if model.partial.model.get_output_embeddings() is None:
        with pytest.raises(CompressionError, match="has no language-model head"):
            Evaluator.of(model, [ids])
        run(model, plans, data, correction=TUNE)
        found = {}
    else:
        found = watched_run(model, plans, ids, data=data, correction=TUNE)
    state = small.state_dict()
    for name_of, corrected in seen.items():
        own = {tensor.key for tensor in corrected.layer.tensors}
        for key, value in corrected.before.items():
            if key.startswith(f"{corrected.layer.block}."):
                assert torch.equal(value, state[key]), key
                assert key in own or torch.equal(corrected.after[key], value), key
        figures = corrected.figures
        if "heldout_error" in figures:
            tried = [value for key, value in figures.items() if key.startswith("heldout_error_")]
            assert figures["heldout_error"] == min(tried) <= figures["heldout_error_before"]
            assert figures["heldout_error"] == figures[f"heldout_error_{figures['kept'].replace('none', 'before')}"]
        else:
            assert "vision" in name_of
        small.load_state_dict({key: corrected.after[key] for key in own}, strict=False)
    if found:
        check(found, whole(small, ids))
    assert seen.keys() == plans.keys()


@pytest.mark.parametrize(
    "name",
    [
        "mixtral",
        "gpt_oss",
        "deepseek_v4",
        "zaya",
        *map(zoo.full, ("gemma4", "deepseek_v2-group_limited", "granitemoe", "aria")),
    ],
)
def test_a_merge_without_calibration_equals_the_merged_stock_model(name: str, tmp_path: Path) -> None:
    stock, model = opened_wide(name, tmp_path)
    plans, ids = merges(model.architecture), zoo.tokens(stock, 3, seed=5)
    small = cut(stock, zoo.family(name).count_field, whole_plan(model, plans).to_dict())
    found = watched_run(model, plans, ids, data=None)
    check(found, whole(small, ids))
    assert not any(torch.equal(found[number], logits) for number, logits in whole(stock, ids).items())


@pytest.mark.parametrize("name", sorted(SHARED))
def test_experts_that_two_layers_share_are_refused(name: str, tmp_path: Path) -> None:
    stock, model = opened_wide(name, tmp_path)
    with pytest.raises(CompressionError, match="shares its experts with another layer, so it cannot be compressed in"):
        run(model, keeps(model.architecture), with_heldout(stock))


def asked(
    model: OpenModel, plans: dict[str, LayerPlan], how: Correct, data: Calibration, monkeypatch: pytest.MonkeyPatch
) -> Plan:
    """A plan that asks for a correction on random tokens, which stand in for its calibration text."""
    take_for_text(data, monkeypatch)
    request = {**how.to_dict(), "dtype": "auto"}
    wanted = request if how.wanted else None
    return by_hand(whole_plan(model, plans, calibration=data.identity, correction=wanted))


@pytest.mark.parametrize(
    ("name", "method", "dtype"),
    [
        ("mixtral-tied", "none", "float32"),
        ("zaya", "none", "float32"),
        ("gpt_oss", "tune", "float32"),
        ("deepseek_v4", "tune", "float32"),
        ("gemma4", "ridge", "float32"),
        ("mixtral", "tune", "bfloat16"),
    ],
)
def test_what_passes_is_what_is_written(
    name: str, method: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The logits of the pass are those of the stock model loaded from the output, corrected or not."""
    stock, model = opened_wide(name, tmp_path / "in", dtype)
    plans, ids, data = drops(model.architecture), zoo.tokens(stock, 3, seed=5), with_heldout(stock)
    how = Correct(method, steps=3, tokens=20)
    plan = asked(model, plans, how, data, monkeypatch)
    found = watched_run(model, plans, ids, data=data, correction=how)
    compressor.apply(plan, tmp_path / "out")
    written = zoo.reload(name, tmp_path / "out")
    realign(written)
    assert written.dtype == getattr(torch, dtype)
    check(found, whole(written, ids))


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.mark.parametrize("name", ["granitemoe_swa", "ernie4_5_vl_moe"])  # three layers; two experts modules in a layer
def test_an_interrupted_run_goes_on_where_it_was(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stock, model = opened_wide(name, tmp_path / "in")
    data, plans = with_heldout(stock), drops(model.architecture)
    plan = asked(model, plans, TUNE, data, monkeypatch)
    compressor.apply(plan, tmp_path / "whole")
    last = model.architecture.layers[-1]
    with (
        happening(Moment(pattern=rf"/kept/.*/{re.escape(last.name)}\.safetensors$"), press_ctrl_c),
        pytest.raises(KeyboardInterrupt),
    ):
        compressor.apply(plan, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with paths_of("os.rename", r"/kept/.*\.safetensors$") as corrected:
        compressor.apply(plan, tmp_path / "out")
    again = [layer.name for layer in model.architecture.layers if layer.decoder_layer == last.decoder_layer]
    assert [path.stem for path in corrected] == again
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")


def test_planning_in_order_sees_the_compressed_earlier_layers(tmp_path: Path) -> None:
    """The counts that decide the second layer are those of a stock model whose first layer is cut."""
    stock, model = opened_wide("qwen3_moe", tmp_path)
    data, spec = with_heldout(stock), PruneSpec(load_strategy("reap", {}), 6)
    made = Planner(model, data, Silent()).plan_sequentially(spec, None)
    assert {layer.upstream for layer in made.layers} == {"compressed"}
    first, second = model.architecture.layers
    only_first = {first.name: made.layers[0], second.name: LayerPlan.keep(second, range(6))}
    small = cut(stock, "num_experts", whole_plan(model, only_first).to_dict())
    stock.model.layers[0] = small.model.layers[0]
    calls = plain_calls(stock, model.architecture, [data.batches[0], data.batches[2]])[second.name]
    hidden, index, weights = calls.joined()
    scores = torch.zeros(8)
    for expert in range(8):
        rows, places = (index == expert).nonzero(as_tuple=True)
        norms = one_expert(stock.get_submodule(second.name), expert, hidden[rows]).norm(dim=-1)
        scores[expert] = (weights[rows, places] * norms).mean() if len(rows) else 0.0
    kept = sorted(scores.argsort(descending=True)[:6].tolist())
    assert [group.members[0] for group in made.layers[1].groups] == kept


def test_half_a_decoder_layer_on_disk_is_cut_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Text and vision experts of one decoder layer are finished together or not at all."""
    stock, model = opened_wide("ernie4_5_vl_moe", tmp_path / "in")
    plans, data, files = drops(model.architecture), with_heldout(stock), CutFiles(tmp_path / "cut")
    run(model, plans, data, correction=TUNE, files=files)
    before = files_of(files.folder)
    text, vision = model.architecture.layers[2:]
    assert text.decoder_layer == vision.decoder_layer
    (files.folder / f"{vision.name}.safetensors").unlink()
    seen = watch_corrections(monkeypatch)
    run(model, plans, data, correction=TUNE, files=files)
    assert list(seen) == [text.name, vision.name] and files_of(files.folder) == before


def test_a_corrected_layer_that_is_gone_is_never_written_uncorrected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock, model = opened_wide("mixtral", tmp_path / "in")
    plan = asked(model, drops(model.architecture), Correct("ridge"), with_heldout(stock), monkeypatch)
    job = make_job(model, plan.expert_plan, cut=CutFiles(tmp_path / "cut"))
    with pytest.raises(CompressionError, match="its corrected tensors can no longer be read from the work folder"):
        list(job.produce(model.architecture.layers[0].decoder_layer))


@pytest.mark.parametrize("name", zoo.sweep(["mixtral", "muse_spark", "ernie4_5_vl_moe", "deepseek_v4", "qwen3_next"]))
def test_one_layer_is_filled_at_a_time_and_the_originals_experts_have_gone(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock, model = opened_wide(name, tmp_path)

    def check(seen: Corrected) -> None:
        inside = {key for key in seen.after if key.startswith(f"{seen.layer.decoder_layer}.")}
        assert set(seen.after) == inside == {key for key in seen.model.state_dict() if key in inside}
        original = model.partial.model.get_submodule(seen.layer.name)
        assert {value.device.type for value in original.parameters()} == {"meta"}

    seen = watch_corrections(monkeypatch, check)
    run(model, drops(model.architecture), with_heldout(stock), measure=True)
    assert len(seen) == len(model.architecture.layers)
    for corrected in seen.values():
        assert {value.device.type for value in corrected.model.state_dict().values()} == {"meta"}
    assert {value.device.type for value in model.partial.model.state_dict().values()} == {"meta"}


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
    plain, harmed = (cut(stock, field, plan.to_dict()) for _ in range(2))
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
        model.partial.load(model.partial.keys_under(layer.decoder_layer))
        expected_cut = cut_layers(model.partial.model, [layer], {layer.name: plan})
        assert files.plan(layer) == plan
        assert all(torch.equal(files.tensors(layer)[key], value) for key, value in expected_cut.items())
        model.partial.release(layer.decoder_layer)
    with paths_of("os.rename", "/cut/") as written:  # a run that goes on asks nothing anew
        assert keep_the_better(model, kept, files, text, Silent()) == better
    assert not written


def test_too_little_text_undoes_nothing(tmp_path: Path) -> None:
    stock, model = opened_wide("mixtral", tmp_path / "in")
    plans, data, files = drops(model.architecture), with_heldout(stock), CutFiles(tmp_path / "cut")
    made = tuple(run(model, plans, data, correction=Correct("ridge"), files=files).values())
    assert keep_the_better(model, made, files, data.heldout_batches, Silent()) == made
    found = read_difference(files)
    assert found is not None and not found.accepted and found.sequences == 3
