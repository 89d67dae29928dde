"""Golden answers: what is different is called so, what only rounds is not, wherever the model runs."""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import compressor
from compressor.checkpoint.source import locate
from compressor.golden.measure import open_exactly
from compressor.golden.rounding import own_rounding
from exporters.onnx import export
from tests.compressor.golden.test_causes import FAULTS as PLANTED
from tests.support import quantized, small, zoo
from tests.support.audit import Moment, happening
from tests.support.command_line import Run, refused
from tests.support.model_server import compute_as_vllm, serving

pytestmark = pytest.mark.usefixtures("offline", "golden")
FAMILIES = (zoo.full("qwen3_moe"), zoo.full("mixtral"), zoo.full("deepseek_v3"), "gpt_oss")
GOLDEN = "golden_answers.json"


@pytest.fixture(params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path: Path, run: Run) -> Path:
    """A model with its golden answers."""
    folder = small.save(tmp_path / "model", request.param)
    small.tokenizer(small.CHAT).save_pretrained(folder)
    assert run("check", "--write", folder).status == 0
    return folder


def changed(folder: Path, change: Callable[[Any], Any]) -> Path:
    """A copy whose model `change` has changed in place; without golden answers."""
    copy = folder.with_name("changed")
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(folder, copy)
    (copy / GOLDEN).unlink()
    family = json.loads((folder / "config.json").read_text())["model_type"]
    stock = zoo.reload(family, copy)
    with torch.no_grad():
        change(stock)
    stock.save_pretrained(copy)
    return copy


def expert_modules(model: Any) -> list[Any]:
    return list(zoo.experts(model).values())


def one_fewer(model: Any) -> None:
    model.config.num_experts_per_tok -= 1


def unnormalised(model: Any) -> None:
    model.config.norm_topk_prob = not model.config.norm_topk_prob


FAULTS: dict[str, Callable[[Any], Any]] = {
    "experts permuted": PLANTED["permuted"][1],
    "gate and up swapped": PLANTED["swapped"][1],
    "gates not normalised": unnormalised,
    "bias dropped": PLANTED["biases"][1],
    "top-k off by one": one_fewer,
    "one scale wrong": lambda model: expert_modules(model)[0].down_proj.mul_(1.1),
    "router shifted": PLANTED["router"][1],
    "expert zeroed": PLANTED["zeroed"][1],
    "vocabulary shifted": lambda model: model.lm_head.weight.copy_(model.lm_head.weight.roll(1, 0)),
}

CAUSES = {
    "experts permuted": "shifted by one against",
    "gate and up swapped": "gate and up projections are swapped",
    "gates not normalised": "not normalised",
    "bias dropped": "bias is missing",
    "top-k off by one": "one expert less",
    "one scale wrong": "multiplied by about 1.1 in layer",
    "router shifted": "shifted by one against",
    "expert zeroed": "some expert",
    "vocabulary shifted": "the vocabulary is shifted",
}


def has(model: Path, fault: str) -> bool:
    """Whether the family has what the fault changes."""
    config = json.loads((model / "config.json").read_text())
    needed = {"gates not normalised": "norm_topk_prob" in config}
    needed["bias dropped"] = config["model_type"] in ("gpt_oss", "deepseek_v3")
    return needed.get(fault, True)


def to_blocks(value: Tensor) -> Tensor:
    """Q8_0 of llama.cpp, by its equations."""
    blocks = value.reshape(-1, 32)
    scales = blocks.abs().amax(1, keepdim=True).half().float() / 127
    return ((blocks / scales.clamp(min=1e-12)).round() * scales).view_as(value)


def round_matrices(model: Any) -> None:
    for name, value in model.named_parameters():
        if value.dim() > 1 and not any(part in name for part in zoo.ROUTERS):
            value.copy_(to_blocks(value))


@pytest.mark.full
def test_what_rounds_is_the_same_model(model: Path, run: Run, tmp_path: Path) -> None:
    verdict = json.loads(run("check", model, "--json").out)
    assert verdict["verdict"] == "same" and verdict["largest"] < 1e-4
    for change, arguments in ((lambda model: model.bfloat16(), ()), (round_matrices, ("--bits", "8"))):
        copy = changed(model, change)
        result = run("check", copy, "--answers", model, "--json", *arguments)
        assert result.status == 0 and json.loads(result.out)["verdict"] == "same up to rounding"
        with serving(copy) as served:
            assert run("check", model, "--server", served.address).status == 0


@pytest.mark.full
def test_faults_are_called_different(model: Path, run: Run) -> None:
    for fault, change in FAULTS.items():
        if not has(model, fault):
            continue
        copy = changed(model, change)
        result = run("check", copy, "--answers", model, "--json")
        assert (result.status, json.loads(result.out)["verdict"]) == (1, "different"), fault
        with serving(copy, like_llama=fault < "f") as served:
            assert run("check", model, "--server", served.address).status == 1, fault


@pytest.mark.full
@pytest.mark.parametrize("model", ["deepseek_v3"], indirect=True)
def test_ten_faults_of_onnx_exports_are_named(model: Path, run: Run, tmp_path: Path) -> None:
    export(model, tmp_path / "sound")
    assert json.loads(run("check", tmp_path / "sound", "--answers", model, "--json").out)["verdict"] == "same"
    small.tokenizer(small.CHAT.replace("<", "[")).save_pretrained(tmp_path / "sound")
    folders = {"wrong template": tmp_path / "sound"}
    for fault, change in FAULTS.items():
        folders[fault] = tmp_path / fault
        export(changed(model, change), folders[fault])
    causes = dict[str, str]()
    for fault, folder in folders.items():
        result = run("check", folder, "--answers", model, "--json")
        assert (result.status, json.loads(result.out)["verdict"]) == (1, "different"), fault
        causes[fault] = json.loads(result.out)["cause"]
    unnamed = {fault: cause for fault, cause in causes.items() if CAUSES.get(fault, "template") not in cause}
    assert len(unnamed) <= 1, unnamed


def test_continuations_are_greedy_and_compared(model: Path, run: Run) -> None:
    prompts = json.loads((model / GOLDEN).read_text())["prompts"]
    continued = [prompt for prompt in prompts if prompt["continued"]]
    assert [prompt["continued"] for prompt in continued] == [2, 2, 2, 2]
    stock = zoo.reload(json.loads((model / "config.json").read_text())["model_type"], model)
    for prompt in continued:
        logs = zoo.logits(stock, torch.tensor([prompt["ids"]]))[0].log_softmax(-1)
        for position in (-3, -2):
            # drafted in bfloat16
            assert logs[position, prompt["ids"][position + 1]] > logs[position].max() - 0.1
    with serving(model, forgets=True, like_llama=True) as served:
        result = run("check", model, "--server", served.address)
        assert result.status == 1 and "key-value cache" in result.out


@pytest.mark.parametrize("model", ["qwen3_moe"], indirect=True)
def test_fp8_and_templates(model: Path, run: Run, tmp_path: Path) -> None:
    steps = tmp_path / "quantize.yaml"
    steps.write_text(f"model: {model}\nsteps: [{{quantize: {{scheme: fp8}}}}]\n", encoding="utf-8")
    assert run("compress", steps, "-o", tmp_path / "fp8").status == 0
    result = run("check", tmp_path / "fp8", "--answers", model)
    assert result.status == 0 and "as 8-bit weights" in result.out
    small.tokenizer(small.CHAT.replace("<", "[")).save_pretrained(tmp_path / "fp8")
    with serving(model) as served:
        served.tokenizer = small.tokenizer(small.CHAT.replace("<", "["))
        for result in (run("check", tmp_path / "fp8"), run("check", model, "--server", served.address)):
            assert result.status == 1 and "chat template" in result.out


def served_as_fp8(folder: Path) -> Any:
    """What vLLM computes of a checkpoint in fp8, in bfloat16: with activations of fp8 weights rounded, too."""
    model = quantized.plain_model(folder, torch.bfloat16)
    stored = {name.removesuffix("_scale") for name in small.tensors_of(folder) if name.endswith("weight_scale")}
    linear = [name for name, _ in model.named_modules() if f"{name}.weight" in stored]
    compute_as_vllm(model, linear, expert_modules(model))
    return model


@pytest.mark.full
@pytest.mark.parametrize("targets", ["experts", zoo.full("all")])
@pytest.mark.parametrize("model", ["qwen3_moe", zoo.full("mixtral")], indirect=True)
def test_servers_round_activations_of_fp8_weights(model: Path, targets: str, run: Run, tmp_path: Path) -> None:
    out = tmp_path / "fp8"
    compressor.compress(str(model), out, [compressor.Quantize("fp8", targets=targets)])
    sound = served_as_fp8(out)
    assert bool(sound.get_submodule("model.layers.0.self_attn.q_proj")._forward_pre_hooks) == (targets == "all")
    with serving(out, sound) as served:
        result = run("check", out, "--server", served.address, "--json")
    verdict = json.loads(result.out)
    assert (result.status, verdict["widest"]) == (0, "fp8") and verdict["band"] in ("8-bit", "fp8")
    assert 0.5 < verdict["distance"] / (verdict["allowed"] / 1.8) < 1.5  # as measured when they were written
    for fault in ("experts permuted", "gate and up swapped", "top-k off by one", "router shifted"):
        faulty = served_as_fp8(out)
        with torch.no_grad():
            FAULTS[fault](faulty)
        if fault == "top-k off by one":
            for module in faulty.modules():
                vars(module).update({"top_k": module.top_k - 1} if hasattr(module, "top_k") else {})
        with serving(out, faulty) as served:
            assert run("check", out, "--server", served.address).status == 1, fault


SCHEMES = {
    "fp8 in blocks": zoo.full("fp8", quantized.save_fp8),
    "modelopt": zoo.full("modelopt", partial(quantized.save_modelopt, algorithm="FP8")),
    "int8": zoo.full("int8", partial(quantized.save_compressed_tensors, format="int-quantized")),
    "nvfp4": zoo.full("nvfp4", partial(quantized.save_compressed_tensors, format="nvfp4-pack-quantized")),
    "mxfp4": zoo.full("mxfp4", partial(quantized.save_compressed_tensors, format="mxfp4-pack-quantized")),
    "int4": zoo.full("int4", quantized.save_compressed_tensors),
}


@pytest.mark.parametrize(("scheme", "save"), SCHEMES.values())
def test_formats_that_round_activations_are_known(scheme: str, save: Callable[[Path], Any], tmp_path: Path) -> None:
    save(tmp_path)
    model = open_exactly(locate(str(tmp_path)), "cpu")
    rounding = own_rounding(model)
    names = {module for module, _ in model.partial.model.named_modules() if module.endswith(("experts", "q_proj"))}
    assert names <= rounding.keys() if scheme != "int4" else not rounding
    value = torch.randn(3, 5, 64, generator=torch.Generator().manual_seed(0))
    for change in {} if scheme == "int4" else {"q_proj": rounding["model.layers.0.self_attn.q_proj"]}.values():
        error = (change(value) - value).norm() / value.norm()
        assert {"int8": 0.004, "nvfp4": 0.07, "mxfp4": 0.08}.get(scheme, 0.02) < error
        assert error < {"int8": 0.01, "nvfp4": 0.12, "mxfp4": 0.16}.get(scheme, 0.03)
        rows = change(value.flatten(0, 1)).view_as(value)  # of experts, whose tokens are in one dimension
        assert torch.equal(rows, change(value))


@pytest.mark.parametrize("model", ["gpt_oss"], indirect=True)
def test_what_stock_transformers_loads_otherwise_is_said(model: Path, run: Run, tmp_path: Path) -> None:
    compressor.compress(str(model), tmp_path / "int8", [compressor.Quantize("int8")])
    result = run("check", tmp_path / "int8", "--json")
    assert json.loads(result.out)["verdict"] == "same" and "draws at random" in json.loads(result.out)["stock"]


@pytest.mark.full
@pytest.mark.parametrize("model", ["qwen3_moe"], indirect=True)
def test_a_plain_model_may_be_served_in_fp8(model: Path, run: Run) -> None:
    sound = zoo.reload("qwen3_moe", model)
    names = [name for name, module in sound.named_modules() if isinstance(module, torch.nn.Linear) and "layers" in name]
    compute_as_vllm(sound, names, expert_modules(sound))
    with serving(model, sound) as served:
        assert run("check", model, "--server", served.address).status == 1
        result = run("check", model, "--server", served.address, "--bits", "8")
    assert result.status == 0 and "(fp8)" in result.out


@pytest.mark.parametrize("model", ["qwen3_moe"], indirect=True)
@pytest.mark.parametrize("value", [torch.inf, 3e38])
def test_answers_that_are_no_numbers_are_different(value: float, model: Path, run: Run) -> None:
    changes: list[Callable[[Any], Any]] = [
        lambda model: model.lm_head.weight[3].fill_(value),
        lambda model: expert_modules(model)[-1].down_proj[1, 2].fill_(value),
    ]
    for change in changes:
        copy = changed(model, change)
        result = run("check", copy, "--answers", model, "--json")
        verdict = json.loads(result.out)
        assert (result.status, verdict["verdict"]) == (1, "different")
        assert verdict["compared"] < verdict["asked"] and "no finite numbers" in verdict["cause"]
        refused(run("check", "--write", copy), "not finite")
        assert not (copy / GOLDEN).exists()
    copy = changed(model, lambda model: model.lm_head.weight[3].fill_(torch.nan))
    refused(run("check", copy, "--answers", model), "lm_head.weight.* holds NaN")


@pytest.mark.full
@pytest.mark.parametrize("model", ["qwen3_moe"], indirect=True)
def test_an_export_that_answers_no_numbers_is_different(model: Path, run: Run, tmp_path: Path) -> None:
    import onnx

    export(model, tmp_path / "onnx")
    graph = onnx.load(tmp_path / "onnx" / "model.onnx")
    norm = next(value for value in graph.graph.initializer if "norm" in value.name and len(value.dims) == 1)
    values = onnx.numpy_helper.to_array(norm).copy()
    values[0] = torch.nan
    norm.CopyFrom(onnx.numpy_helper.from_array(values, norm.name))
    onnx.save(graph, tmp_path / "onnx" / "model.onnx")
    result = run("check", tmp_path / "onnx", "--answers", model)
    assert result.status == 1 and "no finite numbers" in result.out


@pytest.mark.parametrize("model", ["qwen3_moe"], indirect=True)
def test_what_was_not_answered_is_no_pass(model: Path, run: Run, tmp_path: Path) -> None:
    gguf = tmp_path / "model.gguf"
    gguf.touch()
    with serving(model) as served:
        whole = json.loads(run("check", model, "--server", served.address, "--json").out)
    assert whole["verdict"] == "same" and whole["compared"] == whole["asked"]
    for mute in (range(7, 8), range(3, 10**6)):
        for like_llama in (False, True):
            with serving(model, mute=mute, like_llama=like_llama) as served:
                asked = [gguf, "--answers", model] if like_llama else [model]
                result = run("check", *asked, "--server", served.address, "--json")
            partial = json.loads(result.out)
            assert (result.status, partial["verdict"]) == (1, "different")
            assert partial["compared"] < partial["asked"]
            assert f"({partial['compared']} of {partial['asked']} answers compared)" in partial["sentence"]
            assert "out" in partial["cause"]


@pytest.mark.parametrize("model", ["qwen3_moe"], indirect=True)
def test_a_file_that_appears_while_answers_are_made_stays(model: Path, run: Run, tmp_path: Path) -> None:
    out = tmp_path / "mine.json"
    with happening(Moment("open", r"mine\.json\.moe-compressor/mine\.json$"), lambda: out.write_text("mine")):
        refused(run("check", "--write", model, "--output", out), "--overwrite")
    assert out.read_text() == "mine" and not list(tmp_path.glob(".mine*"))


@pytest.mark.parametrize("model", ["qwen3_moe"], indirect=True)
def test_bad_input_is_one_sentence(model: Path, run: Run, tmp_path: Path) -> None:
    bare = shutil.copytree(model, tmp_path / "bare")
    (bare / GOLDEN).unlink()
    refused(run("check", bare), "has no golden_answers.json")
    refused(run("check", "--write", model), "exists")
    gguf = tmp_path / "model.gguf"
    gguf.touch()
    refused(run("check", gguf, "--answers", model), f"llama-server -m {gguf}")
    with serving(model, most=0) as served:
        refused(run("check", model, "--server", served.address), "gives no log-probabilities")
    with serving(model, most=5) as served:
        assert run("check", model, "--server", served.address).status == 0
        small.edit_json(model / GOLDEN, lambda golden: [x.update(text_tokens=7) for x in golden["prompts"]])
        refused(run("check", model, "--server", served.address), "is a server of another model")
    small.edit_json(model / GOLDEN, lambda golden: golden.update(format=99))
    refused(run("check", model), "of format 99")
