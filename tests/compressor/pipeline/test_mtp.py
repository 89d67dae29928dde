"""Multi-token-prediction heads through `compress`, `plan` and `apply`: kept and pruned along, or dropped."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

import compressor
from compressor import CompressionError
from compressor.checkpoint.source import locate
from compressor.data.batches import repeat_text
from compressor.hub.check import verify_folder
from compressor.model.mtp import find_heads
from compressor.model.opened import open_model
from compressor.model.tokenizer import load_tokenizer
from compressor.recipe.steps_plan import Plan
from compressor.run_record import read_record
from tests.support import mtp_checkpoints, small
from tests.support.command_line import Run, succeeded
from tests.support.mtp_checkpoints import Made
from tests.support.mtp_forward import run_all
from tests.support.plans import edited, plan_of, pruned
from tests.support.small import tensors_of

Tensors = dict[str, Tensor]
CASES: dict[str, dict[str, Any]] = {"qwen3_next": {}, "deepseek_v3": {"own_ends": True}}


@pytest.fixture(scope="module", params=[pytest.param("qwen3_next", marks=pytest.mark.full), "deepseek_v3"])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    return mtp_checkpoints.make(request.param, tmp_path_factory.mktemp(request.param) / "in", **CASES[request.param])


def read(folder: Path, name: str) -> Any:
    return json.loads((folder / name).read_text())


def with_text(folder: Path) -> dict[str, Any]:
    return {"calibration": str(small.text_file(folder)), "samples": 8, "sequence_length": 24}


def test_dropped_experts_leave_the_rows_of_the_others(made: Made, tmp_path: Path) -> None:
    summary = compressor.compress(str(made.folder), tmp_path / "out", strategy="reap", experts=4, **with_text(tmp_path))
    layers = {layer.module: layer for layer in summary.plan.expert_plan.layers}
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
    figures = summary.plan.expert_plan.layers[-1].figures["correction"]
    assert figures["heldout_error"] < figures["heldout_error_before"]
    assert [layer.figures["correction"].get("toward", 0.0) for layer in summary.plan.expert_plan.layers] == [
        *(0.5 for _ in range(len(summary.plan.expert_plan.layers) - 1)),
        0.0,  # a head has no hidden states of the base's to go toward
    ]
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


@pytest.mark.parametrize(("mtp", "experts"), [("whole", 8), (6, 6), ("with", 4)])
def test_a_head_keeps_as_many_experts_as_are_asked_for(
    made: Made, tmp_path: Path, mtp: str | int, experts: int, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where the record finds the text
    text = small.text_file(tmp_path)
    asked = ("--strategy", "reap", "--correct", "ridge", "--experts", 4, "--mtp", mtp, "--calibration", text)
    sizes = ("--samples", 8, "--sequence-length", 24)
    result = succeeded(run("compress", made.folder, "-o", tmp_path / "out", *asked, *sizes))
    assert ("mtp_per_layer_config" in result.err) == (experts != 4)
    config = read(tmp_path / "out", "config.json")
    count = "num_experts" if "num_experts" in config else "n_routed_experts"
    assert config[count] == 4 and config.get("mtp_per_layer_config", {"0": {count: 4}}) == {"0": {count: experts}}
    before, found = made.tensors, tensors_of(tmp_path / "out")
    rows = [name for name in found if name.startswith(made.blocks[0]) and name.endswith("mlp.gate.weight")]
    assert [len(found[name]) for name in rows] == [experts]
    if mtp == "whole":
        assert all(torch.equal(found[name], before[name]) for name in made.owned(before))
    assert (made.owned(found) == made.owned(before)) == (mtp == "whole")
    verify_folder(tmp_path / "out")
    # later steps keep the head as the config describes it
    succeeded(run("compress", tmp_path / "out", "-o", tmp_path / "fp8", "--quantize", "fp8"))
    assert made.owned(tensors_of(tmp_path / "fp8")) >= made.owned(found)
    again = read(tmp_path / "fp8", "config.json")
    assert again.get("mtp_per_layer_config") == config.get("mtp_per_layer_config")
    acceptance = read_record(tmp_path / "out").acceptance  # type: ignore[union-attr]
    (figure,) = acceptance.values()
    smaller = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    own = replace(made, folder=tmp_path / "out", model=smaller)
    planned = Plan.from_dict(read(tmp_path / "out", "compression.json")["plan"])
    data = repeat_text(planned.calibration or {}, load_tokenizer(made.folder), small.VOCABULARY).fit
    tokens = torch.cat([data.batches[number] for number in sorted(data.heldout)])
    trunk, (seen,) = run_all(own, own.model, own.tensors, tokens)
    assert figure["after"] == round(float((trunk[:, 1:] == seen.choices).float().mean()), 6)


def fused(tensors: Tensors, prefix: str) -> Tensors:
    """The tensors with the experts of a decoder layer put together."""
    name = f"{prefix}mlp.experts"
    fused = {key: value for key, value in tensors.items() if not key.startswith(f"{name}.")}
    count = len({key for key in tensors if key.startswith(f"{name}.") and "down_proj" in key})
    parts = {part: [tensors[f"{name}.{expert}.{part}_proj.weight"] for expert in range(count)]
             for part in ("gate", "up", "down")}  # fmt: skip
    pairs = [torch.cat(pair) for pair in zip(parts["gate"], parts["up"], strict=True)]
    return fused | {f"{name}.gate_up_proj": torch.stack(pairs), f"{name}.down_proj": torch.stack(parts["down"])}


@pytest.mark.parametrize("mtp", ["with", "whole"])
@pytest.mark.parametrize("of_head", [True, False])
def test_a_head_may_store_its_experts_otherwise_than_the_trunk(
    made: Made, tmp_path: Path, mtp: str, of_head: bool
) -> None:
    def changed(tensors: Tensors) -> Tensors:
        names = {name.partition("mlp.experts.")[0] for name in tensors if "mlp.experts." in name}
        for prefix in names:
            if (prefix in made.blocks) == of_head:
                tensors = fused(tensors, prefix)
        return tensors

    shutil.copytree(made.folder, tmp_path / "in")
    save_file(changed(made.tensors), tmp_path / "in" / "model.safetensors", {"format": "pt"})
    asked: dict[str, Any] = {"strategy": "aimer", "experts": 4, "correct": "none", "mtp": mtp}
    compressor.compress(str(made.folder), tmp_path / "usual", **asked)
    compressor.compress(str(tmp_path / "in"), tmp_path / "out", **asked)
    expected, found = changed(tensors_of(tmp_path / "usual")), tensors_of(tmp_path / "out")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


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
    assert dropped.plan.expert_plan.layers == kept.plan.expert_plan.layers[: -len(made.blocks)]
    assert "mtp: drop" in (tmp_path / "out" / "recipe.yaml").read_text()


def test_the_plan_of_a_head_fits_a_model_that_has_it(tmp_path: Path) -> None:
    made = mtp_checkpoints.make("glm4_moe", tmp_path / "in", heads=2)
    planned = plan_of(made.folder, strategy="model-centric", experts=4)
    less = edited(planned, lambda decided: decided["layers"].pop())
    with pytest.raises(CompressionError, match=r"no entry for model.layers.4.mlp.experts; keep all .* heads or none"):
        compressor.apply(less, tmp_path / "less")
    without = tmp_path / "without"
    made.model.save_pretrained(without)
    small.tokenizer().save_pretrained(without)
    bare = plan_of(without, strategy="model-centric", experts=4)
    assert (bare.expert_plan.mtp, len(bare.expert_plan.layers)) == (None, len(planned.expert_plan.layers) - 2)
    wrong = replace(planned, source=bare.source)
    with pytest.raises(CompressionError, match=r"speaks of model.layers.3.mlp.experts, which this model does not have"):
        compressor.apply(wrong, tmp_path / "wrong")
    with pytest.raises(CompressionError, match="--mtp keep: the checkpoint has no multi-token-prediction head"):
        plan_of(without, strategy="model-centric", experts=4, mtp="keep")
    said = "mtp should be 'keep', 'with', 'whole' or 'drop', or a whole number, it is 'half'"
    with pytest.raises(CompressionError, match=said):
        plan_of(without, strategy="model-centric", experts=4, mtp="half")


@pytest.mark.parametrize(("says", "stored", "kept"), [(0, 1, 1), (2, 1, 1), (3, 2, 2), (1, 0, 0)])
def test_the_config_counts_the_heads_that_are_stored(tmp_path: Path, says: int, stored: int, kept: int) -> None:
    made = mtp_checkpoints.make("glm4_moe", tmp_path / "in", heads=stored)
    small.edit_json(made.folder / "config.json", lambda config: config.update({made.field: says}))
    summary = compressor.compress(str(made.folder), tmp_path / "out", strategy="model-centric", experts=4)
    assert read(tmp_path / "out", "config.json")[made.field] == kept
    assert summary.zeroed_fields == (() if kept else (made.field,))
    assert len(made.owned(tensors_of(tmp_path / "out"))) > 0 if kept else not summary.left_out
    verify_folder(tmp_path / "out")
    assert len(find_heads(open_model(locate(str(tmp_path / "out"))))) == kept


def as_other_tools_leave_it(made: Made, out: Path, trunk: int, head: int) -> Path:
    """The checkpoint with its first `trunk` experts in the model's layers and `head` of them in the head."""
    block = made.blocks[0]

    def fewer(name: str, value: Tensor) -> Tensor | None:
        count = head if name.startswith(block) else trunk
        if ".mlp.experts." in name:
            return value if int(name.partition(".mlp.experts.")[2].split(".")[0]) < count else None
        return value[:count].clone() if ".mlp.gate." in name else value

    shutil.copytree(made.folder, out)
    left = {name: each for name, value in made.tensors.items() if (each := fewer(name, value)) is not None}
    save_file(left, out / "model.safetensors", {"format": "pt"})
    field = "n_routed_experts" if made.name == "deepseek_v3" else "num_experts"
    small.edit_json(out / "config.json", lambda config: config.update({field: trunk}))
    return out


def test_a_head_with_more_experts_than_the_trunk_is_cut_to_the_trunks(made: Made, tmp_path: Path) -> None:
    source, out = as_other_tools_leave_it(made, tmp_path / "odd", 4, 8), tmp_path / "out"
    with pytest.raises(
        CompressionError, match=r"has 8 experts and the other layers 4, .* compress it with --experts 4"
    ):
        verify_folder(source)
    summary = compressor.compress(str(source), out, strategy="reap", experts=4, mtp="keep", **with_text(tmp_path))
    before, after = tensors_of(source), tensors_of(out)
    names = {name for name in before if not made.owned([name])}
    assert names == {name for name in after if not made.owned([name])}  # the trunk keeps all that it has
    assert all(torch.equal(before[name], after[name]) for name in names)
    module = f"{made.blocks[0]}mlp.experts"
    [layer] = [layer for layer in summary.plan.expert_plan.layers if layer.module == module]
    kept = [group.members[0] for group in layer.groups]
    assert layer.experts == 8 and len(kept) == 4
    for slot, expert in enumerate(kept):
        for part in ("gate_proj", "up_proj", "down_proj"):
            assert torch.equal(after[f"{module}.{slot}.{part}.weight"], before[f"{module}.{expert}.{part}.weight"])
    gate = f"{made.blocks[0]}mlp.gate.weight"
    assert torch.equal(after[gate], before[gate][kept])
    assert f"{module}.4.up_proj.weight" not in after and {"before", "after"} <= summary.acceptance[module].keys()
    verify_folder(out)
    [head] = find_heads(open_model(locate(str(out))))
    assert head.layer.experts == 4


def test_a_head_with_fewer_experts_than_are_kept_is_left_out(
    made: Made, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = as_other_tools_leave_it(made, tmp_path / "odd", 8, 4)
    asked: dict[str, Any] = {"strategy": "model-centric", "experts": 6}
    with pytest.raises(
        CompressionError, match=r"has 4 experts, fewer than the 6 .*; pass --experts 4 or fewer, or --mtp"
    ):
        plan_of(source, mtp="keep", **asked)
    compressor.compress(str(source), tmp_path / "out", **asked)
    assert "is left out: it has 4 experts, and the other layers 6" in caplog.text
    assert read(tmp_path / "out", "config.json")[made.field] == 0
    assert not made.owned(tensors_of(tmp_path / "out"))
    verify_folder(tmp_path / "out")
    compressor.compress(str(source), tmp_path / "less", strategy="model-centric", experts=4)
    [head] = find_heads(open_model(locate(str(tmp_path / "less"))))
    assert head.layer.experts == 4


def test_more_experts_than_a_head_has_are_refused(made: Made) -> None:
    with pytest.raises(CompressionError, match=r"--mtp 9: .* has 8 experts, fewer than the 9 .* pass --mtp 8"):
        plan_of(made.folder, strategy="model-centric", experts=4, mtp="9")


@pytest.mark.full
def test_heads_in_a_row_are_planned_in_order_and_carried_out_alike(tmp_path: Path) -> None:
    made = mtp_checkpoints.make("glm4_moe", tmp_path / "in", heads=2)
    asked: dict[str, Any] = dict(strategy="reap", experts=4, correct="ridge", sequential=True, **with_text(tmp_path))
    summary = compressor.compress(str(made.folder), tmp_path / "out", **asked)
    compressor.apply(summary.plan, tmp_path / "later")
    for file in sorted((tmp_path / "out").iterdir()):
        assert file.read_bytes() == (tmp_path / "later" / file.name).read_bytes(), file.name
    assert [*summary.acceptance] == ["model.layers.3.mlp.experts", "model.layers.4.mlp.experts"]
    first, second = summary.acceptance.values()
    assert first["positions"] > second["positions"]
    for layer in summary.plan.expert_plan.layers[-2:]:
        assert layer.upstream == "compressed"
        assert layer.figures["correction"]["heldout_error"] < layer.figures["correction"]["heldout_error_before"]
