#!/usr/bin/env bash
# nncf's INT4_SYM puts the router of an MoE in 4 bits and the experts in 8, with one scale for a whole expert.
#
# Versions: nncf 3.4.0, openvino 2026.4.1, transformers 5.24.0, torch 2.13.0.
# Guess:    4-bit weights in groups for the bulk of the model, that is the experts, and care for small, sensitive parts.
# Seen:
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
for node in compressed.get_ops():
    if node.get_type_name() == "Constant" and node.get_element_type().get_type_name() in ("i4", "u4", "i8", "u8"):
        users = [user.get_node().get_friendly_name() for out in node.outputs() for user in out.get_target_inputs()]
        print(node.get_element_type().get_type_name(), list(node.get_output_shape(0)), node.get_friendly_name(), users)
for node in compressed.get_ops():
    if node.get_type_name() == "Constant" and "scale" in node.get_friendly_name():
        print("scale", list(node.get_output_shape(0)), node.get_friendly_name())
END
