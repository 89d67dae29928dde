"""`quantize` among other steps: what it may stand before and after, and what comes of it."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml
from safetensors.torch import load_file
from torch import Tensor

import compressor
from compressor.errors import CompressionError
from compressor.recipe.recipe import default_steps
from compressor.recipe.step import StepOptions
from tests.support import fake_quantization, mtp_checkpoints, small, zoo
from tests.support.command_line import Run, refused
from tests.support.quantized import plain_model, save_compressed_tensors, save_fp8

pytestmark = [pytest.mark.usefixtures("offline"), pytest.mark.filterwarnings("ignore")]

SIZES: dict[str, Any] = {"samples": 16, "sequence_length": 32}
ROUTERS = {"rounds": 1, "sequences": 8, "sequence_length": 32}
TRAINED = {"steps": 2, "tokens_per_step": 64, "sequence_length": 32}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    small.text_file(tmp_path)
    return small.save(tmp_path / "model", intermediate_size=64)


def compressed(model: Path, steps: Sequence[StepOptions], out: str = "out") -> Path:
    folder = model.parent / out
    text = str(model.parent / "calibration.txt")
    compressor.compress(str(model), folder, list(steps), calibration=text, **SIZES)
    return folder


def stock(folder: Path) -> Any:
    return fake_quantization.decompressed(transformers.AutoModelForCausalLM.from_pretrained(folder))


def same(first: Any, second: Any, but: str = "-") -> bool:
    one, other = first.state_dict(), second.state_dict()
    assert one.keys() == other.keys()
    return all(torch.equal(value, other[name]) for name, value in one.items() if but not in name)


def packed(folder: Path) -> dict[str, Tensor]:
    return {name: value for name, value in load_file(folder / "model.safetensors").items() if ".weight_" in name}


@pytest.mark.parametrize("method", ["none", zoo.full("ridge"), zoo.full("tune")])
def test_what_prune_and_correct_have_made_is_quantised(method: str, model: Path, hasty: None) -> None:
    before = [compressor.Prune(strategy="reap", experts=4)]
    before += [] if method == "none" else [compressor.Correct(method)]
    plain = stock(compressed(model, before, "plain"))
    out = compressed(model, [*before, compressor.Quantize("int4")])
    fake_quantization.quantize(plain, "int4", 32)
    assert same(stock(out), plain)


def test_parts_of_experts_are_quantised(model: Path) -> None:
    before = [compressor.Split(2), compressor.Prune(strategy="reap", ratio=0.5)]
    plain = stock(compressed(model, before, "plain"))
    out = compressed(model, [*before, compressor.Quantize("mxfp4")])
    fake_quantization.quantize(plain, "mxfp4", 32)
    assert same(stock(out), plain)
    assert json.loads((out / "config.json").read_text())["num_local_experts"] == 8


@pytest.mark.parametrize(
    ("step", "sentence"),
    [
        (
            {"scheme": "int4", "group_size": 32},
            "groups of 32 do not divide matrices of 16, 32 columns; give group_size 16 or 8 or -1",
        ),
        ({"scheme": "mxfp4"}, "groups of 32 do not divide matrices of 16, 32 columns; choose int4 or fp8"),
    ],
)
def test_groups_must_divide_the_parts_of_experts(step: dict[str, Any], sentence: str, model: Path) -> None:
    for steps in ([compressor.Split(4)], [compressor.Split(4), compressor.Prune(strategy="reap", ratio=0.5)]):
        with pytest.raises(CompressionError, match=f"^quantize: {sentence}$"):
            compressed(model, [*steps, compressor.Quantize(**step)])
        assert not (model.parent / "out").exists()


@pytest.mark.parametrize("later", [zoo.full(compressor.Routers(**ROUTERS)), compressor.Distill("router", **TRAINED)])
def test_routers_are_moved_once_experts_are_packed(later: StepOptions, model: Path) -> None:
    first = [compressor.Prune(strategy="reap", experts=4), compressor.Quantize("int2")]
    before, out = compressed(model, first, "before"), compressed(model, [*first, later])
    assert packed(before).keys() == packed(out).keys()
    assert all(torch.equal(value, packed(out)[name]) for name, value in packed(before).items())
    result = json.loads((out / "compression.json").read_text())["plan"]["steps"][-1]["result"]
    assert result["after"] < result["before"]
    assert same(stock(out), stock(before), "mlp.gate.weight") and not same(stock(out), stock(before))


@pytest.mark.parametrize("train", ["experts", "lora", "all"])
def test_packed_weights_are_not_trained(train: str, model: Path) -> None:
    sentence = f"^distill: train {train} changes weights that quantize has packed; put distill before quantize, or give"
    with pytest.raises(CompressionError, match=sentence):
        compressed(model, [compressor.Quantize(), compressor.Distill(train, **TRAINED)])


def test_experts_that_are_trained_are_quantised_then(model: Path) -> None:
    before = [compressor.Prune(strategy="reap", experts=4), compressor.Distill("experts", **TRAINED)]
    plain = stock(compressed(model, before, "plain"))
    fake_quantization.quantize(plain, "int8", 32)
    assert same(stock(compressed(model, [*before, compressor.Quantize("int8")])), plain)


@pytest.mark.parametrize(
    ("steps", "sentence"),
    [
        ([compressor.Quantize(), compressor.Prune(experts=4), compressor.Correct("ridge")],
         "correct cannot stand after quantize: it would write the experts that it refits unquantised"),
        ([compressor.Quantize(), compressor.Split(2)], "split cannot stand after quantize"),
        ([compressor.Quantize(), compressor.Quantize()], "quantize cannot stand after quantize: weights"),
        ([compressor.Constants(experts=4), compressor.Quantize()],
         "quantize cannot stand after constants: constants stand for unquantised experts"),
        ([compressor.Quantize(), compressor.Constants(experts=4)], "constants cannot stand after quantize"),
    ],
)  # fmt: skip
def test_orders_that_cannot_be_are_refused(steps: list[StepOptions], sentence: str, model: Path) -> None:
    with pytest.raises(CompressionError, match=rf"^steps\[\d\]: {sentence}"):
        compressed(model, steps)


def test_packed_experts_are_dropped_as_they_are(model: Path) -> None:
    prune = compressor.Prune(strategy="aimer", experts=4)
    first = compressed(model, [compressor.Quantize("int4")], "first")
    out = compressed(model, [compressor.Quantize("int4"), prune])
    then = compressed(first.rename(model.parent / "one"), [prune], "then")
    trees = [small.tree(folder) for folder in (out, then)]
    for tree in trees:
        del tree["compression.json"], tree["recipe.yaml"]  # of which one run, or two, are told
    assert trees[0] == trees[1]
    kept = packed(out)
    before = packed(model.parent / "one")
    assert len(kept) == len(before) / 2
    pool = {bytes(value.numpy().tobytes()) for value in before.values()}
    assert {bytes(value.numpy().tobytes()) for value in kept.values()} <= pool


def test_packed_experts_are_not_merged(model: Path) -> None:
    sentence = (
        r"^steps\[1\]: quantize has packed experts that can only be merged, or dropped, once they are dequantised"
    )
    with pytest.raises(CompressionError, match=sentence):
        compressed(model, [compressor.Quantize(), compressor.Prune(strategy="hc-smoe", experts=4)])


@pytest.mark.parametrize(
    ("save", "targets"),
    [(lambda folder: save_fp8(folder), "experts"), zoo.full(lambda folder: save_compressed_tensors(folder), "all")],
)
def test_a_quantised_source_is_dequantised_layer_by_layer(save: Any, targets: str, tmp_path: Path) -> None:
    """Its own packed attention and dense layers are written plain, if they aren't quantised again."""
    save(tmp_path / "model")
    base = plain_model(tmp_path / "model", torch.bfloat16)
    made = compressor.compress(
        str(tmp_path / "model"), tmp_path / "out", [compressor.Quantize("int3", targets=targets)]
    )
    plan = made.plan.steps[0].decision
    assert plan is not None and plan["dequantized"] is True
    fake_quantization.quantize(base, "int3", 32, targets)
    assert same(stock(tmp_path / "out"), base)
    text = " ".join(str(block) for block in compressor.Quantize("int3").step().describe({"plan": plan}))
    assert "which were dequantised first" in text
    stored = load_file(tmp_path / "out" / "model.safetensors")
    of_experts = {name for name in stored if ".weight_" in name and ".experts." in name}
    assert targets == "all" or of_experts == {name for name in stored if ".weight_" in name}


@pytest.mark.parametrize("name", ["deepseek_v3", zoo.full("qwen3_next"), zoo.full("glm4_moe")])
def test_heads_of_further_tokens_stay_plain(name: str, tmp_path: Path) -> None:
    source = mtp_checkpoints.make(name, tmp_path / "model", moe_intermediate_size=32)
    compressor.compress(str(source.folder), tmp_path / "out", [compressor.Quantize("int4", targets="all")])
    before, after = source.tensors, mtp_checkpoints.tensors_of(tmp_path / "out")
    own = source.owned(before)
    assert own and own == source.owned(after) and all(torch.equal(before[key], after[key]) for key in own)
    ignored = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["ignore"]
    linear = {key.removesuffix(".weight") for key in own if key.endswith("weight") and before[key].dim() == 2}
    assert {name for name in linear if "embed" not in name} <= set(ignored)
    assert not fake_quantization.packed_modules(after) & set(ignored)
    compressor.inspect(str(tmp_path / "out"))


@pytest.mark.parametrize("method", ["rtn", zoo.full("gptq")])
def test_a_recipe_and_a_plan_repeat_the_bytes(method: str, run: Run, model: Path) -> None:
    text, sizes = model.parent / "calibration.txt", ("--samples", 16, "--sequence-length", 32)
    ask = (model, "--experts", 4, "--strategy", "reap", "--correct", "ridge", "--quantize", "int3")
    ask = (*ask, "--set", f"quantize.method={method}", "--calibration", text, *sizes)
    places = {name: model.parent / name for name in ("out", "again", "planned")}
    assert run("compress", *ask, "-o", places["out"]).status == 0
    assert run("compress", places["out"] / "recipe.yaml", "-o", places["again"]).status == 0
    assert run("plan", *ask, "-o", model.parent / "plan.json").status == 0
    assert run("apply", model.parent / "plan.json", "-o", places["planned"]).status == 0
    trees = [small.tree(folder) for folder in places.values()]
    assert trees[0] == trees[1] == trees[2]
    recipe = yaml.safe_load((places["out"] / "recipe.yaml").read_text())
    assert recipe["steps"][-1] == {"quantize": {"scheme": "int3"} | ({} if method == "rtn" else {"method": "gptq"})}


def test_the_option_quantize(run: Run, model: Path) -> None:
    assert run("compress", model, "--quantize", "int2", "-o", model.parent / "out").status == 0
    done = json.loads((model.parent / "out" / "compression.json").read_text())["plan"]["steps"]
    assert [(step["name"], step["options"]["scheme"]) for step in done] == [("quantize", "int2")]
    refused(run("compress", model, "--quantize", "int5", "-o", model.parent / "no"), "quantize: scheme is 'int5'")
    for size, fault in ((0, "group_size is 0; give the columns that share a scale, or -1"), (-2, "group_size is -2")):
        asked = ("--quantize", "int4", "--set", f"quantize.group_size={size}", "-o", model.parent / "no")
        refused(run("compress", model, *asked), fault)
    names = [step.name for step in default_steps(experts=4, distill="router", quantize={"scheme": "fp8"})]
    assert names == ["split", "prune", "correct", "distill", "quantize"]
    assert [step.name for step in default_steps(quantize="int4")] == ["quantize"]
