"""`export --format keep-list`: its lists, read as the clients read them, give the model that `compress` writes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from compressor.recipe.steps_plan import Plan
from exporters.keep_list import prune_ratio
from tests.support import small
from tests.support.command_line import Run, refused
from tests.support.plans import pruned

pytestmark = pytest.mark.usefixtures("offline")
DROP = ("--experts", 5, "--strategy", "count-guided", "--correct", "none")


def text(folder: Path) -> tuple[Any, ...]:
    return ("--calibration", small.text_file(folder), "--samples", 16, "--sequence-length", 32)


def kept_by_client(folder: Path, ratio: float, experts: int, top_k: int) -> dict[int, list[int]]:
    """What vllm-ascend keeps of each layer: its rules for `expert_list_file` and `expert_prune_ratio`."""
    assert 0 <= ratio < 1
    count = int(experts * (1.0 - ratio))
    assert 0 < top_k <= count
    found = dict[int, list[int]]()
    for line in (folder / "experts.jsonl").read_text(encoding="utf-8").splitlines():
        [(layer, ids)] = json.loads(line).items()
        assert int(layer) not in found and len(set(ids)) == len(ids) >= count
        assert all(type(expert) is int and 0 <= expert < experts for expert in ids)
        found[int(layer)] = ids[:count]
    return found


def constants_by_client(config: dict[str, Any]) -> dict[tuple[int, int], str]:
    """The tensor of each constant by layer and expert: vLLM 0.33's rules for `expert_substitution`."""
    raw = config["compression_config"]["transform_config"]["expert_substitution"]
    assert raw["version"] == 1 and raw["router_semantics"] == {
        "preserve_logical_expert_ids": True,
        "preserve_router_weights": True,
        "renormalize_after_substitution": False,
    }
    found, layers = dict[tuple[int, int], str](), set[int]()
    for path, target in raw["targets"].items():
        [layer] = [int(part) for part in path.split(".") if part.isdigit()]
        assert layer not in layers and target["weight_layout"] == "compact_retained_experts"
        layers.add(layer)
        for expert, replacement in target["replacements"].items():
            assert replacement["format"] == "constant-v1"
            found[layer, int(expert)] = replacement["tensors"]["value"]
    return found


@pytest.mark.parametrize("planned", [False, True])
def test_the_client_makes_of_base_and_list_what_compress_writes(run: Run, tmp_path: Path, planned: bool) -> None:
    source, out, lists = small.save(tmp_path / "base", "qwen3_moe"), tmp_path / "out", tmp_path / "lists"
    written = run("compress", source, "-o", out, *DROP, *text(tmp_path))
    assert written.status == 0, written
    given = out
    if planned:
        given = tmp_path / "plan.json"
        given.write_text(json.dumps(json.loads((out / "compression.json").read_text())["plan"]))
    result = run("export", given, "--format", "keep-list", "-o", lists, "--json")
    assert result.status == 0, result
    found = json.loads(result.out)
    assert found["kept"] == 5 * found["layers"] and found["model"] == "base" and found["not_listed"] == []
    assert found["command"].startswith("vllm serve base --additional-config '{")

    model, tokens = AutoModelForCausalLM.from_pretrained(source), torch.arange(3, 60)[None]
    config = model.config
    chosen = kept_by_client(lists, found["expert_prune_ratio"], 8, config.num_experts_per_tok)
    for layer, ids in chosen.items():
        block = model.model.layers[layer].mlp
        block.gate.weight.data = block.gate.weight.data[ids]
        block.experts.gate_up_proj.data = block.experts.gate_up_proj.data[ids]
        block.experts.down_proj.data = block.experts.down_proj.data[ids]
        for module in (block.gate, block.experts):
            module.num_experts = len(ids)
    with torch.no_grad():
        wanted, got = AutoModelForCausalLM.from_pretrained(out)(tokens).logits, model(tokens).logits
    assert len(chosen) == found["layers"] == config.num_hidden_layers
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-6)

    again = run("export", given, "--format", "keep-list", "-o", lists, "--json")
    assert json.loads(again.out) == found and "in place already" in again.err


def test_a_list_tells_which_steps_it_leaves_out(run: Run, tmp_path: Path) -> None:
    source, out, lists = small.save(tmp_path / "base"), tmp_path / "out", tmp_path / "lists"
    assert run("compress", source, "-o", out, *DROP[:-1], "ridge", *text(tmp_path)).status == 0
    result = run("export", out, "--format", "keep-list", "-o", lists)
    assert result.status == 0 and "without what these steps did: correct" in result.out, result
    assert json.loads((lists / "keep_list.json").read_text())["not_listed"] == ["correct"]


def test_constants_as_vllm_reads_them(run: Run, tmp_path: Path) -> None:
    source, out, lists = small.save(tmp_path / "base"), tmp_path / "out", tmp_path / "lists"
    made = run("compress", source, "-o", out, "--format", "mone", "--experts", 6, *text(tmp_path))
    assert made.status == 0, made
    result = run("export", out, "--format", "keep-list", "-o", lists, "--json")
    assert result.status == 0, result
    overrides = json.loads((lists / "hf_overrides.json").read_text())
    assert overrides["approximate_experts"] is None  # as vLLM refuses both at once
    tensors = constants_by_client(overrides)
    config = json.loads((out / "config.json").read_text())
    listed = {(int(layer), expert) for layer, experts in config["approximate_experts"].items() for expert in experts}
    assert tensors.keys() == listed and listed
    with safe_open(out / "model.safetensors", "pt") as file:
        assert all(file.get_tensor(name).shape == (config["hidden_size"],) for name in tensors.values())

    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps(json.loads((out / "compression.json").read_text())["plan"]))
    refused(run("export", plan, "--format", "keep-list", "-o", tmp_path / "no"), "holds no constants; name the output")


def merge(content: dict[str, Any]) -> None:
    layer = pruned(content)["layers"][0]
    first, *others = layer["groups"]
    gone = layer["dropped"].pop()
    layer["groups"] = [{"members": [first["members"][0], gone], "coefficients": [0.5, 0.5]}, *others]


def split(content: dict[str, Any]) -> None:
    pruned(content)["split"] = {"parts": 2, "experts": 4, "neurons": {}, "calibration": None}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (merge, "model.layers.0.mlp.experts: a keep list can drop experts, and this plan merges or scales them"),
        (split, "names experts of the base, and this plan splits each into 2"),
        (lambda content: pruned(content).update(top_k=1), "this plan routes tokens to 1 experts"),
        (lambda content: content.update(steps=[]), "decides on no experts"),
    ],
)
def test_what_no_list_can_express_is_refused(run: Run, tmp_path: Path, change: Any, message: str) -> None:
    source, plan = small.save(tmp_path / "base"), tmp_path / "plan.json"
    made = run("plan", source, "-o", plan, *DROP, *text(tmp_path))
    assert made.status == 0, made
    small.edit_json(plan, change)
    Plan.load(plan)  # each is a plan that can be read
    refused(run("export", plan, "--format", "keep-list", "-o", tmp_path / "no"), message)
    assert not (tmp_path / "no").exists()


def test_other_exports_take_no_plan(run: Run, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text("{}")
    refused(run("export", tmp_path / "plan.json", "--format", "onnx", "-o", tmp_path / "no"), "is not a folder")


def test_the_ratio_keeps_what_the_plan_keeps() -> None:
    for experts in (8, 60, 64, 128, 160, 288, 512):
        for kept in range(1, experts + 1):
            ratio = prune_ratio(experts, kept)
            assert 0 <= ratio < 1 and int(experts * (1.0 - ratio)) == kept
