"""The recipes of routing attribution on the demo model, and that of DeepSeek-MoE-16B on a tiny checkpoint."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, DeepseekOcr2TextConfig, DeepseekOcr2TextModel

from compressor.checkpoint.source import locate
from compressor.errors import CompressionError
from compressor.model.opened import load_whole, open_model
from tests.support import zoo
from tests.support.doc_pages import ROOT
from tests.support.recipes import run_recipe

FOLDER = ROOT / "recipes" / "attribution"
LEAST = {"SAMPLES": 2, "LENGTH": 32}
FIGURES = ("influence.png", "scores.png", "experts.png", "causal.png")


@pytest.mark.full
def test_figures_and_zeroing(tmp_path: Path) -> None:
    run_recipe(FOLDER / "figures.sh", tmp_path, **LEAST)
    assert all((tmp_path / "figures" / name).is_file() for name in FIGURES)
    printed = run_recipe(FOLDER / "zeroing.sh", tmp_path, **LEAST, EXPERT="L1E3")
    senders = json.loads((tmp_path / "zeroing" / "attribution.json").read_text())["senders"]
    (expert,) = (sender for sender in senders if sender["name"] == "model.layers.1.mlp.experts expert 3")
    rows = [line.split() for line in printed.splitlines() if line.startswith("L")]
    assert [float(row[1]) for row in rows] == pytest.approx([*filter(None.__ne__, expert["rank_change"])], abs=1e-4)


@pytest.mark.full
def test_blocking(tmp_path: Path) -> None:
    run_recipe(FOLDER / "blocking.sh", tmp_path, **LEAST)
    content = json.loads((tmp_path / "blocking" / "all" / "attribution.json").read_text())
    without = sorted((tmp_path / "blocking").glob("without-*"))
    assert len(without) == 3
    before = {sender["name"]: sender for sender in content["senders"]}
    for folder in without:
        found = json.loads((folder / "attribution.json").read_text())
        assert sorted(found["without"]["experts"]) == sorted(folder.name.split("-")[1:])
        shares = {f"L{each['layer']}E{each['number']}": each["share"] for each in found["senders"] if each["number"]}
        assert {shares.get(label, 0.0) for label in found["without"]["experts"]} == {0.0}
        for each in found["without"]["before"]:
            assert each["influence"] == before[each["name"]]["influence"]


@pytest.mark.full
def test_heads_of_ioi_by_role(tmp_path: Path) -> None:
    run_recipe(FOLDER / "ioi.py", tmp_path, PROMPTS=2, TOP=3, OUT=tmp_path / "ioi.json")
    rows = json.loads((tmp_path / "ioi.json").read_text())
    assert len(rows) == 3 and all(row[role] >= 0 for row in rows for role in ("IO", "S1", "S2", "END", "other"))
    assert max(row["IO"] + row["S1"] for row in rows) > 0


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
    run_recipe(ROOT / "recipes" / "deepseek_moe.py", tmp_path, tmp_path / "deepseek", tmp_path / "converted")
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
