"""`moe-compress export` and `compress --format` as a user runs them: files, summaries, refusals, and what generates."""

import json
import shutil
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support import small, zoo
from tests.support.audit import Moment
from tests.support.command_line import Run, captured, names, refused, run_killed
from tests.support.quantized import plain_model

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytestmark = [pytest.mark.full, pytest.mark.usefixtures("offline")]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small.save(tmp_path_factory.mktemp("export") / "model", num_hidden_layers=1)


@pytest.fixture(scope="module")
def both(checkpoint: Path) -> Path:
    out = checkpoint.parent / "both"
    ask = ("--experts", 4, "--strategy", "model-centric", "--format", "safetensors,onnx")
    result = captured("compress", checkpoint, "-o", out, *ask)
    assert result.status == 0, result
    return out


def test_compress_writes_both_formats_at_once(run: Run, both: Path) -> None:
    assert {"model.safetensors", "compression.json", "onnx"} <= set(names(both))
    assert {"model.onnx", "onnx_export.json", "config.json", "tokenizer.json"} <= set(names(both / "onnx"))
    assert names(both.parent) == ["both", "model"]
    text = run("generate", both / "onnx", "Document 7", "--max-new-tokens", 16, "--json")
    assert text.status == 0, text
    model, tokenizer = AutoModelForCausalLM.from_pretrained(both), AutoTokenizer.from_pretrained(both)
    ids = tokenizer("Document 7", return_tensors="pt")
    tokens = model.generate(**ids, do_sample=False, max_new_tokens=16)[0, ids["input_ids"].shape[1] :]
    assert json.loads(text.out)["text"] == tokenizer.decode(tokens, skip_special_tokens=True)


def test_export_of_what_compress_left(run: Run, both: Path, tmp_path: Path) -> None:
    result = run("export", both, "--format", "onnx", "-o", tmp_path / "graph", "--no-past", "--json")
    assert result.status == 0, result
    found = json.loads(result.out)
    assert found["verification"]["largest_difference"] <= found["verification"]["tolerance"]
    assert found["fallen_back"] == 0 and {route["route"] for route in found["routes"]} == {"MoE"}
    assert not any("past" in name for name in found["inputs"])
    before = small.tree(tmp_path)
    refused(run("export", both, "-o", tmp_path / "graph", "--json"), "exists already")
    again = run("export", both, "--format", "onnx", "-o", tmp_path / "graph", "--no-past", "--json")
    assert again.status == 0 and "is in place already and is what this command asks for" in again.err
    assert json.loads(again.out) == found
    assert small.tree(tmp_path) == before and names(tmp_path) == ["graph"]
    (tmp_path / "graph" / "model.onnx").write_bytes(b"touched")
    refused(run("export", both, "-o", tmp_path / "graph", "--no-past", "--json"), "exists already")


@pytest.mark.parametrize("scheme", ["int4", "nvfp4"])
def test_a_quantised_output_is_exported_with_what_its_weights_mean(scheme: str, run: Run, tmp_path: Path) -> None:
    """Also where stock transformers reads them wrongly."""
    small.save(tmp_path / "model", num_hidden_layers=1, intermediate_size=32)
    steps = [{"prune": {"experts": 6, "strategy": "model-centric"}}, {"quantize": {"scheme": scheme}}]
    recipe = {"model": str(tmp_path / "model"), "steps": steps, "output": {"formats": ["safetensors", "onnx"]}}
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    result = run("compress", tmp_path / "recipe.yaml", "-o", tmp_path / "out")
    assert result.status == 0, result
    plain = plain_model(tmp_path / "out")
    from tests.support.onnx_answers import Runner, session_of

    tokens = zoo.tokens(plain, 2, 12)
    with torch.no_grad():
        wanted = plain(input_ids=tokens, use_cache=False).logits
    found = Runner(session_of(tmp_path / "out" / "onnx"), 2)(tokens)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-3)
    assert "quantization_config" not in json.loads((tmp_path / "out" / "onnx" / "config.json").read_text())


def test_compress_writes_onnx_alone(run: Run, checkpoint: Path, tmp_path: Path) -> None:
    ask = ("--experts", 4, "--strategy", "model-centric", "--format", "onnx")
    result = run("compress", checkpoint, "-o", tmp_path / "graph", *ask, "--json")
    assert result.status == 0, result
    assert json.loads(result.out)["output"] == str(tmp_path / "graph")
    assert names(tmp_path) == ["graph"]
    assert "model.onnx" in names(tmp_path / "graph") and "model.safetensors" not in names(tmp_path / "graph")
    before, again = small.tree(tmp_path), run("compress", checkpoint, "-o", tmp_path / "graph", *ask, "--json")
    assert again.status == 0 and "is in place already and is what this command asks for" in again.err
    told = [json.loads(each.out) for each in (result, again)]
    assert told[0]["bytes"] == told[1]["bytes"] and small.tree(tmp_path) == before
    refused(run("compress", checkpoint, "-o", tmp_path / "graph", *ask[:4], "--json"), "exists already")
    assert small.tree(tmp_path) == before


@pytest.mark.parametrize(
    ("format", "renamed"), [("onnx", "/out$"), ("safetensors,onnx", "/onnx$"), ("safetensors,onnx", "/out$")]
)
def test_killed_with_an_export_and_run_again(
    format: str, renamed: str, run: Run, checkpoint: Path, tmp_path: Path
) -> None:
    ask = ["compress", str(checkpoint), "--experts", "4", "--strategy", "model-centric", "--format", format]
    assert run_killed([*ask, "-o", str(tmp_path / "out")], Moment(pattern=renamed)) == -signal.SIGKILL
    assert run(*ask, "-o", tmp_path / "out").status == 0
    assert names(tmp_path) == ["out"] and not [name for name in names(tmp_path / "out") if name.startswith(".")]
    assert ("model.safetensors" in names(tmp_path / "out")) == (format != "onnx")


def test_bad_options_are_refused(run: Run, checkpoint: Path, tmp_path: Path) -> None:
    export = ("export", checkpoint, "-o", tmp_path / "out", "--json")
    refused(run(*export, "--format", "gguf"), "there is no exporter 'gguf'; known are keep-list, onnx")
    refused(run(*export, "--dtype", "fp8"), "dtype should be 'fp32' or 'fp16', it is 'fp8'")
    compress = ("compress", checkpoint, "-o", tmp_path / "out", "--experts", 4, "--strategy", "model-centric")
    refused(run(*compress, "--format", "safetensors,gguf"), "there is no exporter 'gguf'; known are keep-list, onnx")
    refused(run(*compress, "--format", ","), "formats should have at least 1 item")
    refused(run(*compress, "--format", "onnx", "--gate", "moe_demo_sorting"), "--gate judges a safetensors output")
    assert names(tmp_path) == []


def test_a_failed_export_leaves_no_output(run: Run, checkpoint: Path, tmp_path: Path) -> None:
    sick = Path(shutil.copytree(checkpoint, tmp_path / "sick"))
    tensors = load_file(sick / "model.safetensors")
    tensors["model.norm.weight"].fill_(float("nan"))
    save_file(tensors, sick / "model.safetensors", metadata={"format": "pt"})
    result = run("export", sick, "-o", tmp_path / "graph", "--json")
    assert result.status == 2 and result.err.startswith("Error: "), result
    assert names(tmp_path) == ["sick"]
    zoo.save("openai_privacy_filter", tmp_path / "filter")
    refused(run("export", tmp_path / "filter", "-o", tmp_path / "graph", "--json"), "does not generate .* --no-past")
    assert names(tmp_path) == ["filter", "sick"]
