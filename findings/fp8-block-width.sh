#!/usr/bin/env bash
# transformers guesses FP8 blocks from the shape of the scales: experts of width 192 load wrongly,
# of 320 not at all.
#
# Versions: transformers 5.24.0 (5.23.0 alike), torch 2.13.0, accelerate 1.15.0.
# Guess:    weight_block_size [128, 128] in the config says what a scale covers; a last block may be
#           narrower, as it is in DeepSeek-V3's own files (kv_a_proj_with_mqa has 576 rows and 5
#           rows of scales).
# Seen:     dequantising divides each dimension by the number of its scales. 192 rows with 2 scales
#           become blocks of 96: rows 96 to 127 of gate_proj and up_proj, and those columns of
#           down_proj, get the second block's scale, without a message. Widths that the number of
#           scales does not divide, as 320 by 3 and 576 by 5, raise.
# Where:    no page was found. Without a GPU of compute capability 8.9 such models are dequantised
#           by default.
# Hurts:    experts split, pruned or trained to a width that is no multiple of the block; whoever
#           takes this loader as the reference for another program.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install --quiet torch==2.13.0 transformers==5.24.0 accelerate==1.15.0

venv/bin/python - <<'END'
import json
import logging
import sys
import tempfile
import torch
import transformers
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, FineGrainedFP8Config

EXPERTS = "model.layers.0.mlp.experts."
PLAIN = ["lm_head", "model.layers.0.mlp.gate", *(f"model.layers.0.self_attn.{x}_proj" for x in "qkvo")]
logging.disable()


def quantised(rows, columns):
    """Random FP8 weights with scales for blocks of 128 by 128, and what they stand for."""
    scales = 2.0 ** torch.randint(-4, 4, (-(-rows // 128), -(-columns // 128))).float()
    weights = torch.randn(rows, columns).to(torch.float8_e4m3fn)
    spread = scales.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
    return weights, scales, weights.float() * spread


def wrong_rows(width):
    """The rows of gate_proj of the first expert that come out with another scale, or the error's kind."""
    config = AutoConfig.for_model(
        "qwen3_moe", vocab_size=64, hidden_size=256, moe_intermediate_size=width, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, head_dim=64, num_local_experts=2, num_experts_per_tok=1,
    )
    state = AutoModelForCausalLM.from_config(config).state_dict()
    tensors = {name: value.contiguous() for name, value in state.items() if ".mlp.experts." not in name}
    meant = {}
    for expert in range(2):
        for part, shape in (("gate", (width, 256)), ("up", (width, 256)), ("down", (256, width))):
            name = f"{EXPERTS}{expert}.{part}_proj.weight"
            tensors[name], tensors[name + "_scale_inv"], meant[name] = quantised(*shape)
    fields = config.to_dict()
    fields["quantization_config"] = dict(
        quant_method="fp8", weight_block_size=[128, 128], activation_scheme="dynamic", modules_to_not_convert=PLAIN)
    with tempfile.TemporaryDirectory() as folder:
        save_file(tensors, f"{folder}/model.safetensors", metadata={"format": "pt"})
        with open(f"{folder}/config.json", "w") as stream:
            json.dump(fields, stream)
        try:
            model = AutoModelForCausalLM.from_pretrained(
                folder, quantization_config=FineGrainedFP8Config(dequantize=True), dtype=torch.float32)
        except RuntimeError as error:
            return type(error).__name__
    loaded = model.get_parameter(EXPERTS + "gate_up_proj")[0, :width]
    return (loaded != meant[EXPERTS + "0.gate_proj.weight"]).any(1).nonzero().flatten().tolist()


found = {}
for width in (128, 256, 192, 320, 576):
    found[width] = wrong_rows(width)
    seen = found[width]
    text = seen if isinstance(seen, str) else f"{len(seen)} wrong rows" + (f", {seen[0]} to {seen[-1]}" if seen else "")
    print(f"transformers {transformers.__version__}: width {width}: {text}")
expected = {128: [], 256: [], 192: list(range(96, 128)), 320: "RuntimeError", 576: "RuntimeError"}
sys.exit(0 if found == expected else "changed")
END
