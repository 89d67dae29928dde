#!/usr/bin/env bash
# nncf's INT4_SYM puts the router of an MoE in 4 bits and the experts in 8, with one scale for a
# whole expert.
#
# Versions: nncf 3.4.0, openvino 2026.4.1, transformers 5.24.0, torch 2.13.0.
# Guess:    4-bit weights in groups for the bulk of the model, that is the experts, and care for
#           small, sensitive parts.
# Seen:     experts, which are the second operand of a batched product, count as embeddings do:
#           unsigned 8 bits, with one scale and zero point for each whole expert. Attention and
#           routers, which are nn.Linear, get 4 bits in groups of 64. Of a small Mixtral three
#           quarters of whose weights are experts, 25% get 4 bits. ratio=1.0 does not change it.
# Where:    the table that it prints has the shares; which layers are which is not said.
# Hurts:    who exports an MoE by openvino in "INT4": it is nearly twice as large as its name says,
#           a row of small weights shares its scale with the whole expert, and the choice of experts
#           is what lost most bits.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install --quiet torch==2.13.0 transformers==5.24.0 nncf==3.4.0 openvino==2026.4.1

venv/bin/python - <<'END' 2> log || { cat log; exit 1; }
import sys
import nncf
import openvino
import torch
from transformers import AutoConfig, AutoModelForCausalLM


class Logits(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, tokens):
        return self.model(input_ids=tokens, use_cache=False).logits


torch.manual_seed(0)
config = AutoConfig.for_model(
    "mixtral", vocab_size=64, hidden_size=256, intermediate_size=256, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2,
)
model = AutoModelForCausalLM.from_config(config).eval()
model.set_experts_implementation("batched_mm")
tokens = torch.arange(2, 22).reshape(2, 10)
exported = torch.export.export(Logits(model).eval(), (tokens,), strict=False)
graph = openvino.convert_model(exported, example_input=(tokens,))
compressed = nncf.compress_weights(graph, mode=nncf.CompressWeightsMode.INT4_SYM, group_size=64, ratio=1.0)
found = {}
for node in compressed.get_ops():
    name = node.get_friendly_name()
    kind = node.get_element_type().get_type_name() if node.get_type_name() == "Constant" else ""
    if kind in ("i4", "u4", "i8", "u8") and not name.endswith("zero_point"):
        found[name] = [kind, tuple(node.get_output_shape(0)), None]
for node in compressed.get_ops():
    name = node.get_friendly_name().removesuffix("/scale")
    if name in found and node.get_friendly_name() != name:
        found[name][2] = tuple(node.get_output_shape(0))
seen = sorted(set(map(tuple, found.values())))
for kind, shape, scales in seen:
    print(f"{kind} codes {shape} with scales {scales}")
routers = ("i4", (4, 4, 64), (4, 4, 1))  # 4 rows of 4 groups
experts = {("u8", (4, 512, 256), (4, 1, 1)), ("u8", (4, 256, 256), (4, 1, 1))}
sys.exit(0 if routers in seen and experts <= set(seen) else "changed")
END
