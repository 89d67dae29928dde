"""Multi-token-prediction heads through `compress`, `plan` and `apply`: kept and pruned along, or dropped."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import compressor
from compressor import CompressionError
from compressor.data.batches import load_tokenizer, repeat_text
from compressor.recipe.steps_plan import Plan
from compressor.run_record import read_record
from tests import mtp_heads, small
from tests.mtp_heads import Made, tensors_of
from tests.mtp_plain import run_all
from tests.plans import edited, plan_of, pruned

Tensors = dict[str, Tensor]
CASES: dict[str, dict[str, Any]] = {"qwen3_next": {}, "deepseek_v3": {"own_ends": True}}


@pytest.fixture(scope="module", params=CASES)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    return mtp_heads.make(request.param, tmp_path_factory.mktemp(request.param) / "in", **CASES[request.param])


def read(folder: Path, name: str) -> Any:
    return json.loads((folder / name).read_text())


def with_text(folder: Path) -> dict[str, Any]:
    return {"calibration": str(small.text_file(folder)), "samples": 8, "sequence_length": 24}


def test_all_experts_kept_leave_every_tensor_as_it_is(made: Made, tmp_path: Path) -> None:
    summary = compressor.compress(str(made.folder), tmp_path / "out", strategy="model-centric", experts=8)
    before, after = made.tensors, tensors_of(tmp_path / "out")
    assert set(before) == set(after)
    assert all(before[name].numpy().tobytes() == after[name].numpy().tobytes() for name in before)
    assert (summary.left_out, summary.zeroed_fields) == ((), ())
    assert read(tmp_path / "out", "config.json")[made.field] == len(made.blocks)


def test_dropped_experts_leave_the_rows_of_the_others(made: Made, tmp_path: Path) -> None:
    summary = compressor.compress(str(made.folder), tmp_path / "out", strategy="reap", experts=4, **with_text(tmp_path))
    layers = {layer.module: layer for layer in summary.plan.stage.layers}
    assert [*layers][-len(made.blocks) :] == [f"{block}mlp.experts" for block in made.blocks]
    expected = dict(made.tensors)
    for module, layer in layers.items():
        kept = [group.members[0] for group in layer.groups]
        block = module.removesuffix("experts")
        for name in [name for name in expected if name.startswith(f"{module}.")]:
            del expected[name]
        for slot, expert in enumerate(kept):
            old, new = f"{module}.{expert}.", f"{module}.{slot}."
            expected |= {new + name.removeprefix(old): value for name, value in made.tensors.items()
                         if name.startswith(old)}  # fmt: skip
        for name in (f"{block}gate.weight", f"{block}gate.e_score_correction_bias"):
            if name in expected:
                expected[name] = expected[name][kept]
    found = tensors_of(tmp_path / "out")
    assert set(found) == set(expected)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert (summary.left_out, summary.zeroed_fields) == ((), ())
    assert read(tmp_path / "out", "config.json")[made.field] == len(made.blocks)
    record = read(tmp_path / "out", "compression.json")
    assert (record["left_out"], record["zeroed_fields"], pruned(record["plan"])["mtp"]) == ([], [], "keep")


def test_a_plan_is_carried_out_bit_for_bit_and_acceptance_is_that_of_plain_torch(made: Made, tmp_path: Path) -> None:
    asked: dict[str, Any] = dict(strategy="reap", experts=4, correct="ridge", **with_text(tmp_path))
    summary = compressor.compress(str(made.folder), tmp_path / "out", **asked)
    record = read_record(tmp_path / "out")
    assert record is not None and record.acceptance == summary.acceptance
    planned = Plan.from_dict(json.loads(plan_of(made.folder, **asked).to_json()))
    compressor.apply(planned, tmp_path / "later")
    for file in sorted((tmp_path / "out").iterdir()):
        assert file.read_bytes() == (tmp_path / "later" / file.name).read_bytes(), file.name
    assert pruned(read(tmp_path / "out", "compression.json")["plan"])["mtp"] == "keep"
    figures = summary.plan.stage.layers[-1].figures["correction"]
    assert figures["heldout_error"] < figures["heldout_error_before"]
    data = repeat_text(summary.plan.calibration or {}, load_tokenizer(made.folder), small.VOCABULARY).fit
    tokens = torch.cat([data.batches[number] for number in sorted(data.heldout)])
    smaller = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    halved = replace(made, folder=tmp_path / "out", model=smaller)
    (figure,) = summary.acceptance.values()
    assert figure["heldout"]
    for when, own in (("before", made), ("after", halved)):
        trunk, (seen,) = run_all(own, own.model, own.tensors, tokens)
        agreed = trunk[:, 1:] == seen.choices
        assert (figure[when], figure["positions"]) == (round(float(agreed.float().mean()), 6), agreed.numel())


def test_dropped_heads_are_left_out_as_ever(made: Made, tmp_path: Path) -> None:
    asked: dict[str, Any] = {"strategy": "model-centric", "experts": 4}
    kept = compressor.compress(str(made.folder), tmp_path / "kept", **asked)
    dropped = compressor.compress(str(made.folder), tmp_path / "out", mtp="drop", **asked)
    owned = made.owned(made.tensors)
    assert set(dropped.left_out) == owned
    assert dropped.zeroed_fields == (made.field,)
    assert read(tmp_path / "out", "config.json")[made.field] == 0
    found, both = tensors_of(tmp_path / "out"), tensors_of(tmp_path / "kept")
    assert set(found) == set(both) - made.owned(both)
    assert all(torch.equal(found[name], both[name]) for name in found)
    assert dropped.plan.stage.layers == kept.plan.stage.layers[: -len(made.blocks)]
    assert "mtp: drop" in (tmp_path / "out" / "recipe.yaml").read_text()
    older = edited(dropped.plan, lambda decided: decided.pop("mtp"))  # as plans were that knew of no heads
    compressor.apply(older, tmp_path / "older")
    file = "model.safetensors"
    assert (tmp_path / "older" / file).read_bytes() == (tmp_path / "out" / file).read_bytes()


def test_the_plan_of_a_head_fits_a_model_that_has_it(tmp_path: Path) -> None:
    made = mtp_heads.make("glm4_moe", tmp_path / "in", heads=2)
    planned = plan_of(made.folder, strategy="model-centric", experts=4)
    less = edited(planned, lambda decided: decided["layers"].pop())
    with pytest.raises(CompressionError, match=r"no entry for model.layers.4.mlp.experts; keep all .* heads or none"):
        compressor.apply(less, tmp_path / "less")
    without = tmp_path / "without"
    made.model.save_pretrained(without)
    small.tokenizer().save_pretrained(without)
    bare = plan_of(without, strategy="model-centric", experts=4)
    assert (bare.stage.mtp, len(bare.stage.layers)) == (None, len(planned.stage.layers) - 2)
    wrong = replace(planned, source=bare.source)
    with pytest.raises(CompressionError, match=r"speaks of model.layers.3.mlp.experts, which this model does not have"):
        compressor.apply(wrong, tmp_path / "wrong")
    with pytest.raises(CompressionError, match="--mtp keep: the checkpoint has no multi-token-prediction head"):
        plan_of(without, strategy="model-centric", experts=4, mtp="keep")
    with pytest.raises(CompressionError, match="mtp is 'half'; input should be 'keep' or 'drop'"):
        plan_of(without, strategy="model-centric", experts=4, mtp="half")


@pytest.mark.full
def test_heads_in_a_row_are_planned_in_order_and_carried_out_alike(tmp_path: Path) -> None:
    made = mtp_heads.make("glm4_moe", tmp_path / "in", heads=2)
    asked: dict[str, Any] = dict(strategy="reap", experts=4, correct="ridge", sequential=True, **with_text(tmp_path))
    summary = compressor.compress(str(made.folder), tmp_path / "out", **asked)
    compressor.apply(summary.plan, tmp_path / "later")
    for file in sorted((tmp_path / "out").iterdir()):
        assert file.read_bytes() == (tmp_path / "later" / file.name).read_bytes(), file.name
    assert [*summary.acceptance] == ["model.layers.3.mlp.experts", "model.layers.4.mlp.experts"]
    first, second = summary.acceptance.values()
    assert first["positions"] > second["positions"]
    for layer in summary.plan.stage.layers[-2:]:
        assert layer.upstream == "compressed"
        assert layer.figures["correction"]["heldout_error"] < layer.figures["correction"]["heldout_error_before"]
