#!/usr/bin/env bash
# What output_router_logits=True returns differs by family: logits, probabilities, no entry for
# some layers, or two.
#
# Versions: transformers 5.24.0, torch 2.13.0.
# Guess:    router_logits has one tensor [tokens, experts] of raw logits for each MoE layer, as the
#           docstring of the MoE outputs says and as Mixtral's has.
# Seen:     Gemma 4's rows are probabilities that sum to 1. DeepSeek-V4 returns nothing for its
#           first layers, which route by the token's id, so entry 0 is not layer 0. JetMoE returns
#           two a layer: its attention has experts, too.
# Where:    the docstring of the outputs says raw logits, one for each sparse layer; what differs is
#           in the modeling files.
# Hurts:    whoever counts visits, weighs experts or computes a balance loss from this output for
#           several families: a softmax of probabilities is nearly uniform, and an index of the
#           tuple is taken for a layer.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install --quiet torch==2.13.0 transformers==5.24.0

venv/bin/python - <<'END'
import sys
import torch
from transformers import AutoConfig, AutoModelForCausalLM

SIZES = dict(
    vocab_size=64, hidden_size=64, intermediate_size=32, moe_intermediate_size=32, num_hidden_layers=4,
    num_attention_heads=4, num_key_value_heads=4, head_dim=16, num_experts_per_tok=2, eos_token_id=1, pad_token_id=0,
)
FAMILIES = {
    "mixtral": dict(num_local_experts=8),
    "gemma4_text": dict(num_experts=8, top_k_experts=2, enable_moe_block=True),
    "deepseek_v4": dict(
        n_routed_experts=8, num_key_value_heads=1, q_lora_rank=32, o_lora_rank=16, o_groups=2, index_n_heads=2,
        index_head_dim=16, index_topk=4, sliding_window=16),
    "jetmoe": dict(num_local_experts=8, kv_channels=16),
}
found = {}
for family, own in FAMILIES.items():
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SIZES | own)).eval()
    with torch.no_grad():
        routers = model(torch.arange(2, 34)[None], output_router_logits=True).router_logits
    sums = torch.stack([entry.float().sum(-1) for entry in routers])
    found[family] = len(routers), bool((sums - 1).abs().max() < 1e-4)
    print(f"{family}, 4 layers: {len(routers)} entries of shape {tuple(routers[0].shape)}; "
          f"their rows sum to {sums.min():.3f} to {sums.max():.3f}")
expected = {"mixtral": (4, False), "gemma4_text": (4, True), "deepseek_v4": (1, False), "jetmoe": (8, False)}
sys.exit(0 if found == expected else f"changed: expected {expected}")
END
