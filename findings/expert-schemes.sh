#!/usr/bin/env bash
# Stock transformers reads the packed experts of all layers in the number format of the first group.
#
# Versions: transformers 5.24.0, compressed-tensors 0.20.0, torch 2.13.0.
# Guess:    config_groups say by layer how many bits experts have, as they do for other matrices;
#           each layer is read by its own group.
# Seen:     experts of two layers in 8 and 4, 4 and 8, or 3 and 2 bits load without a word, the
#           first layer right and the second with other values; 4 and 3 bits end in an error of
#           shapes. Alike in both layers they are right.
# Where:    no page was found; compressed-tensors documents groups by regular expressions of names.
# Hurts:    mixed-precision MoE checkpoints, such as those with the first layers in 8 bits: they
#           answer wrongly in transformers, and in all that evaluates through it.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv

cat > program.py <<'END'
import json
import pathlib
import sys

import torch
from compressed_tensors.compressors.base import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

PACKER = BaseCompressor.get_value_from_registry("pack-quantized")
PARTS = {"gate_proj": (32, 64), "up_proj": (32, 64), "down_proj": (64, 32)}  # rows and columns
EXPERTS = 4


def arguments(bits):
    return QuantizationArgs(num_bits=bits, symmetric=True, strategy="group", group_size=32)


def load(folder, bits):
    """What stock transformers says of a model of two layers whose experts are in so many bits each."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, moe_intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_experts=EXPERTS, num_experts_per_tok=2,
    )
    state = {name: value for name, value in Qwen3MoeForCausalLM(config).state_dict().items() if ".experts." not in name}
    wanted = {}
    for layer, width in enumerate(bits):
        for expert in range(EXPERTS):
            for part, (rows, columns) in PARTS.items():
                codes = torch.randint(-(2 ** (width - 1)), 2 ** (width - 1), (rows, columns)).float()
                scales = torch.full((rows, columns // 32), 0.5)
                name = f"model.layers.{layer}.mlp.experts.{expert}.{part}"
                wanted[layer, expert, part] = codes * 0.5
                scheme = QuantizationScheme(targets=["Linear"], weights=arguments(width))
                packed = PACKER.compress({"weight": codes * 0.5, "weight_scale": scales}, scheme)
                state |= {f"{name}.{key}": value for key, value in packed.items()}
    groups = {
        f"group_{layer}": {
            "targets": [rf"re:.*layers\.{layer}\.mlp\.experts\..*"],
            "weights": json.loads(arguments(width).model_dump_json()),
        }
        for layer, width in enumerate(bits)
    }
    ignored = ["lm_head", "re:.*self_attn.*", "re:.*mlp.gate$"]
    config.quantization_config = {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
        "config_groups": groups, "ignore": ignored,
    }
    config.architectures = ["Qwen3MoeForCausalLM"]
    folder.mkdir()
    config.save_pretrained(folder)
    save_file({name: value.contiguous() for name, value in state.items()}, folder / "model.safetensors", {"format": "pt"})
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    except Exception as error:
        return f"{type(error).__name__}"
    right = []
    for layer in range(2):
        experts = model.model.layers[layer].mlp.experts
        gates = torch.stack([wanted[layer, expert, "gate_proj"] for expert in range(EXPERTS)])
        right.append(bool(torch.equal(experts.gate_up_proj.detach()[:, :32].float(), gates)))
    return right


seen = {}
for number, bits in enumerate([(4, 4), (3, 3), (8, 4), (4, 8), (3, 2), (4, 3)]):
    seen[bits] = load(pathlib.Path(f"model-{number}"), bits)
    print(f"experts in {bits[0]} and {bits[1]} bits, each layer read right: {seen[bits]}", flush=True)
alike, wrong = [True, True], [True, False]
expected = {(4, 4): alike, (3, 3): alike, (8, 4): wrong, (4, 8): wrong, (3, 2): wrong, (4, 3): "RuntimeError"}
sys.exit(0 if seen == expected else "changed")
END

venv/bin/python -m pip install --quiet torch==2.13.0 transformers==5.24.0 compressed-tensors==0.20.0 accelerate==1.15.0
venv/bin/python program.py
