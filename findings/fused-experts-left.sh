#!/usr/bin/env bash
# "Quantise the model" leaves the experts of transformers 5 in bfloat16, in torchao, bitsandbytes
# and optimum-quanto.
#
# Versions: torchao 0.18.0, bitsandbytes 0.50.2, optimum-quanto 0.2.7, transformers 5.24.0, torch
#           2.13.0, CPU.
# Guess:    int8 of an MoE halves it and 4 bits quarter it, as with the releases of transformers
#           that had one nn.Linear for each matrix of an expert.
# Seen:     transformers 5 holds all experts of a layer as one parameter outside any nn.Linear. The
#           three quantise nn.Linear (attention and head) and say nothing of the rest: of a small
#           Qwen3-MoE three quarters of whose bytes are experts 91% of the bytes remain.
# Where:    no page was found that says that these experts are no linear layers.
# Hurts:    who plans memory by the number of bits, and comparisons of pruned with "4-bit" models.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install --quiet torch==2.13.0 transformers==5.24.0 accelerate==1.15.0 \
    torchao==0.18.0 bitsandbytes==0.50.2 optimum-quanto==0.2.7

venv/bin/python - <<'END' 2> log || { cat log; exit 1; }
import sys
import torch
from optimum.quanto import freeze, qint8, quantize
from torchao.quantization import Int8WeightOnlyConfig, quantize_
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig

CONFIG = AutoConfig.for_model(
    "qwen3_moe", vocab_size=256, hidden_size=64, moe_intermediate_size=64, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=4, head_dim=16, num_local_experts=8, num_experts_per_tok=2,
)


def plain():
    return AutoModelForCausalLM.from_config(CONFIG, dtype=torch.bfloat16)


def size(model):
    """Bytes of all parameters and buffers, those inside of tensor subclasses included."""
    total = 0
    for tensor in [*model.parameters(), *model.buffers()]:
        if hasattr(tensor, "__tensor_flatten__"):
            inner = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
            total += sum(part.nbytes for part in inner if torch.is_tensor(part))
        else:
            total += tensor.nbytes
    return total


def by_torchao():
    model = plain()
    quantize_(model, Int8WeightOnlyConfig())
    return model


def by_quanto():
    model = plain()
    quantize(model, weights=qint8)
    freeze(model)
    return model


def by_bitsandbytes():
    plain().save_pretrained("model")
    return AutoModelForCausalLM.from_pretrained(
        "model", quantization_config=BitsAndBytesConfig(load_in_4bit=True), device_map="cpu", dtype=torch.bfloat16)


whole = size(plain())
experts = sum(value.nbytes for name, value in plain().named_parameters() if ".experts." in name)
print(f"experts are {experts / whole:.0%} of the bytes")
unchanged = True
for name, make in (("torchao int8", by_torchao), ("quanto int8", by_quanto), ("bitsandbytes 4-bit", by_bitsandbytes)):
    model = make()
    left = model.model.layers[0].mlp.experts.gate_up_proj
    attention = type(model.model.layers[0].self_attn.q_proj.weight).__name__
    print(f"{name}: {size(model) / whole:.0%} of the bytes; experts in {left.dtype}, attention in {attention}")
    unchanged = unchanged and left.dtype == torch.bfloat16 and 0.85 < size(model) / whole < 0.95
sys.exit(0 if unchanged else "changed")
END
