"""Quantised checkpoints: a drop keeps them quantised byte for byte, a merge gives the plain model that it should."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import compressor
from compressor.checkpoint.source import locate
from compressor.errors import CompressionError
from compressor.model.opened import open_model
from compressor.recipe.plan import LayerPlan, Source
from compressor.steps.quantize.options import Quantize
from tests.support import surgery_reference, zoo
from tests.support.per_expert_checkpoints import FUSED, save_packed
from tests.support.plans import Decided, by_hand, disposition
from tests.support.quantized import (
    MODELOPT,
    plain_model,
    save_autofp8,
    save_compressed_tensors,
    save_fp8,
    save_modelopt,
    save_mxfp4,
)

KEPT = (1, 2, 5, 7)
# of each kind of storage one, without `make test-all`
FEW = ("fp8-deepseek_v3", "mxfp4-gpt_oss", "packed-qwen3_moe", "modelopt-nvfp4")
CASES: dict[str, Callable[[Path], None]] = {
    "fp8-qwen3_moe": save_fp8,
    "fp8-deepseek_v3": lambda folder: save_fp8(folder, "deepseek_v3"),
    "fp8-minimax_m2": lambda folder: save_fp8(folder, "minimax_m2"),
    "autofp8-matrix": save_autofp8,
    "autofp8-row": lambda folder: save_autofp8(folder, "mixtral", "row"),
    "mxfp4-gpt_oss": save_mxfp4,
    "packed-qwen3_moe": save_compressed_tensors,
    "packed-mixtral": lambda folder: save_compressed_tensors(folder, "mixtral"),
    "float-qwen3_moe": lambda folder: save_compressed_tensors(folder, "qwen3_moe", "float-quantized"),
    "nvfp4-qwen3_moe": lambda folder: save_compressed_tensors(folder, format="nvfp4-pack-quantized"),
    "mxfp4-mixtral": lambda folder: save_compressed_tensors(folder, "mixtral", "mxfp4-pack-quantized"),
    "modelopt-nvfp4": save_modelopt,
    "modelopt-fp8": lambda folder: save_modelopt(folder, algorithm="FP8"),
    "int8-mixtral": lambda folder: save_compressed_tensors(folder, "mixtral", "int-quantized"),
}
IDS = torch.randint(0, 64, (2, 12), generator=torch.Generator().manual_seed(3))


def drop_plan(folder: Path) -> Decided:
    """Keep experts that are no prefix."""
    model = open_model(locate(str(folder)))
    layers = tuple(LayerPlan.keep(layer, KEPT) for layer in model.architecture.layers)
    return Decided(Source(str(folder), None, model.fingerprint), len(KEPT), "by hand", {}, None, layers)


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=IDS, use_cache=False).logits
    return found


@pytest.mark.parametrize("case", [case if case in FEW else zoo.full(case) for case in CASES])
def test_a_drop_stays_quantised_and_equals_the_cut_plain_model(tmp_path: Path, case: str) -> None:
    source, out = tmp_path / "in", tmp_path / "out"
    CASES[case](source)
    plan = drop_plan(source)
    compressor.apply(by_hand(plan), out)
    before, after = load_file(source / "model.safetensors"), load_file(out / "model.safetensors")
    assert {value.dtype for value in after.values()} == {value.dtype for value in before.values()}
    assert json.loads((out / "config.json").read_text())["quantization_config"]
    for name, value in after.items():
        if ".experts." in name and name.split(".experts.")[1][0].isdigit():
            number, rest = name.split(".experts.")[1].split(".", 1)
            old = f"{name.split('.experts.')[0]}.experts.{KEPT[int(number)]}.{rest}"
            assert torch.equal(value.reshape(-1).view(torch.uint8), before[old].reshape(-1).view(torch.uint8)), name
        elif value.shape == before[name].shape:
            assert torch.equal(value.reshape(-1).view(torch.uint8), before[name].reshape(-1).view(torch.uint8)), name
        else:
            expected = before[name][list(KEPT)].contiguous()
            assert torch.equal(value.reshape(-1).view(torch.uint8), expected.reshape(-1).view(torch.uint8)), name
    model, field = plain_model(source), open_model(locate(str(source))).architecture.count_field
    expected_model = surgery_reference.cut(model, field, plan.to_dict())
    torch.testing.assert_close(logits(plain_model(out)), logits(expected_model), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("case", [case if case in FEW else zoo.full(case) for case in CASES])
def test_a_merge_is_written_plain_and_equals_the_merged_plain_model(tmp_path: Path, case: str) -> None:
    source, out = tmp_path / "in", tmp_path / "out"
    CASES[case](source)
    summary = compressor.compress(str(source), out, experts=4, strategy="model-centric")
    assert "quantization_config" not in json.loads((out / "config.json").read_text())
    opened = open_model(locate(str(source)))
    expected = surgery_reference.cut(
        plain_model(source, torch.bfloat16), opened.architecture.count_field, disposition(summary.plan)
    )
    from transformers import AutoModelForCausalLM

    found = AutoModelForCausalLM.from_pretrained(out)
    assert found.dtype == torch.bfloat16
    wanted = dict(expected.state_dict())
    for key, value in found.state_dict().items():
        torch.testing.assert_close(value.float(), wanted[key].float(), atol=1e-6, rtol=1e-2)


def test_modelopt_s_own_file_follows_the_experts(tmp_path: Path) -> None:
    source, dropped, merged = (tmp_path / name for name in ("in", "dropped", "merged"))
    save_modelopt(source, algorithm="MIXED_PRECISION", declared=[MODELOPT])
    content = json.loads((source / MODELOPT).read_text())
    experts = "model.layers.1.mlp.experts"
    content["quantization"]["exclude_modules"] += [f"{experts}.5.up_proj", f"{experts}.6", "model.layers.*.norm*"]
    (source / MODELOPT).write_text(json.dumps(content))
    compressor.apply(by_hand(drop_plan(source)), dropped)
    assert "quantization_config" not in json.loads((dropped / "config.json").read_text())
    written = json.loads((dropped / MODELOPT).read_text())["quantization"]
    assert written["exclude_modules"][-2:] == [f"{experts}.{KEPT.index(5)}.up_proj", "model.layers.*.norm*"]
    assert {f"{experts}.3.up_proj", "model.layers.1.self_attn.q_proj"} <= written["quantized_layers"].keys()
    assert f"{experts}.4.up_proj" not in written["quantized_layers"]
    opened = open_model(locate(str(dropped)))
    assert opened.architecture.experts == len(KEPT) and opened.layout.quantized and not opened.layout.left_out
    compressor.compress(str(source), merged, experts=4, strategy="model-centric")
    assert not (merged / MODELOPT).exists() and not open_model(locate(str(merged))).layout.quantized
    compressor.compress(str(source), tmp_path / "again", [Quantize(scheme="int4", group_size=16)])
    assert not (tmp_path / "again" / MODELOPT).exists()
    assert open_model(locate(str(tmp_path / "again"))).checkpoint.quantization["quant_method"] == "compressed-tensors"
    content["quantization"]["exclude_modules"].append(f"{experts}.[0-3].up_proj")
    (source / MODELOPT).write_text(json.dumps(content))
    with pytest.raises(CompressionError, match=r"experts\.\[0-3\]\.up_proj', by which .* speaks of single experts"):
        compressor.apply(by_hand(drop_plan(source)), tmp_path / "refused")


@pytest.mark.parametrize("name", zoo.sweep(FUSED))
def test_packed_experts_of_a_family_that_fuses_plain_ones_are_dropped_as_stored(name: str, tmp_path: Path) -> None:
    source, out = tmp_path / "in", tmp_path / "out"
    model = save_packed(name, source)
    plan, opened = drop_plan(source), open_model(locate(str(source)))
    compressor.apply(by_hand(plan), out)
    before, after = load_file(source / "model.safetensors"), load_file(out / "model.safetensors")
    for layer in opened.architecture.layers:
        for slot, expert in enumerate(KEPT):
            old, new = f"{layer.name}.{expert}.", f"{layer.name}.{slot}."
            kept = {name: value for name, value in before.items() if name.startswith(old)}
            assert len(kept) == 9
            assert all(torch.equal(value, after[name.replace(old, new)]) for name, value in kept.items())
        assert not any(name.startswith(f"{layer.name}.{len(KEPT)}.") for name in after)
    written = open_model(locate(str(out)), "float32", "cpu").partial
    written.load(written.empty)
    expected = surgery_reference.cut(model, opened.architecture.count_field, plan.to_dict()).state_dict()
    for key, value in written.model.state_dict().items():
        assert torch.equal(value, expected[key]), key


def test_merged_experts_are_written_fused_again(tmp_path: Path) -> None:
    source, out = tmp_path / "in", tmp_path / "out"
    model = save_packed("gpt_oss", source)
    summary = compressor.compress(str(source), out, experts=4, strategy="model-centric", dtype="float32")
    expected = surgery_reference.cut(model, "num_local_experts", disposition(summary.plan)).state_dict()
    found = zoo.reload("gpt_oss", out)
    assert not hasattr(found.config, "quantization_config")
    for key, value in found.state_dict().items():
        torch.testing.assert_close(value.float(), expected[key], atol=2e-3, rtol=1e-2)  # written in bfloat16
