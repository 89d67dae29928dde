"""The recipes and scripts in examples/, each used as a reader would: with the demo model in the place of theirs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, DeepseekOcr2TextConfig, DeepseekOcr2TextModel

from compressor.checkpoint.source import locate
from compressor.errors import CompressionError
from compressor.model.opened import load_whole, open_model
from compressor.recipe.recipe import read_recipe
from tests.support import zoo
from tests.support.command_line import Run, names, succeeded
from tests.support.doc_pages import ROOT

RECIPES = sorted((ROOT / "examples" / "recipes").glob("*.yaml"))
DEMO = ROOT / "compressor" / "demo" / "checkpoint"
MINE = ("--set", f"model={DEMO}", "--calibration", "demo", "--samples", "16", "--sequence-length", "128")
MORE = {  # in the place of what a demo model has not, or is too small for
    "smallest-that-passes": ("--gate", "moe_demo_sorting", "--limit", "50", "--set", "gate.max_drop=0.3"),
    "fit-a-size": ("--bytes", "2MB", "--for", "vllm"),
}


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_recipes_name_what_a_reader_has_to_change(recipe: Path) -> None:
    content = read_recipe(recipe)
    assert (content.model, content.calibration.data) == ("org/model", ("texts.jsonl",))
    assert f"moe-compress compress {recipe.name}" in recipe.read_text(encoding="utf-8")


@pytest.mark.full
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_recipes_run(recipe: Path, run: Run, offline: None, hasty: None, tmp_path: Path) -> None:
    succeeded(run("compress", recipe, "-o", tmp_path / "smaller", *MINE, *MORE.get(recipe.stem, ())))
    assert (tmp_path / "smaller" / "model.safetensors").stat().st_size < (DEMO / "model.safetensors").stat().st_size


def script(name: str, folder: Path, *arguments: object) -> str:
    """Run a script of the clone in a folder; returns what it prints."""
    words = [sys.executable, ROOT / "examples" / f"{name}.py", *arguments]
    environment = {
        **os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "MOE_COMPRESSOR_CACHE": str(folder / "cache"),
    }  # fmt: skip
    done = subprocess.run([*map(str, words)], cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.full
def test_scripts_run(tmp_path: Path) -> None:
    printed = script("compress_and_gate", tmp_path, DEMO, "demo", "gated", "moe_demo_sorting")
    assert printed.splitlines() == ["16 experts became 12", "pass"] and (tmp_path / "gated").is_dir()
    printed = script("choose_by_loss", tmp_path, DEMO, "demo", "chosen", "2", "12", "8")
    assert printed.startswith("8 experts cost") and (tmp_path / "chosen").is_dir()
    printed = script("distill_and_publish", tmp_path, "chosen", DEMO, "demo", "distilled", "org/distilled")
    assert "files would go to" in printed
    assert {"distilled", "distilled.html", "distilled.md"} <= set(names(tmp_path))
    assert "license" not in (tmp_path / "distilled.md").read_text(encoding="utf-8").partition("# distilled")[0]


@pytest.mark.full
def test_the_worked_examples_of_papers_run(tmp_path: Path) -> None:
    printed = script("block_experts", tmp_path, DEMO, "demo").splitlines()
    blocked = printed[0].removeprefix("without ").removesuffix(":")
    assert printed[1].startswith(f"{blocked}: influence ") and printed[1].endswith("now 0.000") and len(printed) == 7
    printed = script("pathways", tmp_path, DEMO, "moe_demo_facts,moe_demo_sorting", "moe_demo_recall").splitlines()
    assert [line.partition(":")[0] for line in printed] == ["mode", "kernel", "oracle"]
    assert all(" of 10 right, " in line for line in printed)
    rows = [{"prompt": "<|end|>sort 21 ->", "answer": " 12"}, {"prompt": "<|end|>sort 9830 ->", "answer": " 0389"}]
    (tmp_path / "items.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    printed = script("lora_experts", tmp_path, DEMO, "items.jsonl", "moe_demo_sorting", 2).splitlines()
    assert [line.partition(":")[0] for line in printed] == ["contrastive 0.0", "contrastive 0.01"]
    printed = script("routed_tokens", tmp_path, DEMO, "demo", 12).splitlines()
    assert all((tmp_path / line.split(", ")[1]).is_file() for line in printed) and len(printed) == 2


def deepseek_layout(folder: Path) -> tuple[torch.nn.Module, torch.Tensor]:
    """Write a checkpoint as DeepSeek-MoE-16B is stored, of a stock model of its layers; returns that and its head."""
    sizes = {
        "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 4, "n_routed_experts": 8, "n_shared_experts": 2, "num_experts_per_tok": 3,
        "moe_intermediate_size": 24, "rms_norm_eps": 1e-6, "max_position_embeddings": 64,
    }  # fmt: skip
    stock = DeepseekOcr2TextModel(DeepseekOcr2TextConfig(**sizes, mlp_layer_types=["dense", "sparse", "sparse"]))
    stock.train(False)
    zoo.randomise(stock, torch.Generator().manual_seed(0))
    head = torch.randn(96, 32, generator=torch.Generator().manual_seed(1))
    tensors = {"lm_head.weight": head}
    for name, value in stock.state_dict().items():
        if name.endswith("experts.gate_up_proj"):
            for expert, (gate, up) in enumerate(one.chunk(2) for one in value):
                start = f"model.{name.removesuffix('gate_up_proj')}{expert}"
                tensors |= {f"{start}.gate_proj.weight": gate.clone(), f"{start}.up_proj.weight": up.clone()}
        elif name.endswith("experts.down_proj"):
            for expert, down in enumerate(value):
                tensors[f"model.{name.removesuffix('down_proj')}{expert}.down_proj.weight"] = down.clone()
        else:
            tensors[f"model.{name}"] = value
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    more = {"first_k_dense_replace": 1, "moe_layer_freq": 1, "scoring_func": "softmax", "norm_topk_prob": False}
    kind = {"model_type": "deepseek", "architectures": ["DeepseekForCausalLM"], "hidden_act": "silu"}
    (folder / "config.json").write_text(json.dumps({**kind, **sizes, **more, "rope_theta": 10000.0}))
    return stock, head


@pytest.mark.full
def test_deepseek_moe_is_a_qwen2_moe_and_no_deepseek_v2(tmp_path: Path) -> None:
    stock, head = deepseek_layout(tmp_path / "deepseek")
    script("deepseek_moe", tmp_path, tmp_path / "deepseek", tmp_path / "converted")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "converted", dtype=torch.float32)
    tokens = torch.randint(96, (2, 12), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        expected = stock(input_ids=tokens).last_hidden_state @ head.T
        torch.testing.assert_close(model(input_ids=tokens).logits, expected, rtol=1e-5, atol=1e-5)
    opened = open_model(locate(str(tmp_path / "converted")), "float32", "cpu")
    assert (opened.architecture.experts, len(opened.architecture.layers)) == (8, 2)
    config = json.loads((tmp_path / "deepseek" / "config.json").read_text())
    renamed = {**config, "model_type": "deepseek_v2", "architectures": ["DeepseekV2ForCausalLM"], "q_lora_rank": None}
    renamed |= {"qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 8, "kv_lora_rank": 16}  # as wide as stored
    (tmp_path / "deepseek" / "config.json").write_text(json.dumps(renamed))
    with pytest.raises(CompressionError, match=r"lacks .*self_attn\.kv_"):
        load_whole(tmp_path / "deepseek")
