#!/usr/bin/env bash
# compressed-tensors' expert pruner rounds its share half to even, and moves experts between
# routing groups.
#
# Versions: compressed-tensors 0.20.1, transformers 5.24.0, torch 2.13.0.
# Guess:    halves round one way; a model with n_group is pruned group by group, or refused.
# Seen:     of 10 experts 0.25 drops 2, 0.35 drops 4 and 0.45 drops 4, since round() goes to the
#           even number. With n_group in the config (DeepSeek-V3's families) the best routers' rows
#           of all groups are kept and counted anew; the model cuts the remaining experts into equal
#           groups, so that some change group. It loads, and computes something else than the model
#           with the dropped experts left out; with one group it is the same.
# Where:    the formula stands in a docstring; groups are not mentioned.
# Hurts:    comparisons of pruners at one ratio; whoever prunes DeepSeek-V3, GLM-4 or Kimi by it.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install --quiet torch==2.13.0 transformers==5.24.0 compressed-tensors==0.20.1

venv/bin/python - <<'END'
import sys
import tempfile
import torch
from compressed_tensors.entrypoints.convert import MagnitudeExpertPruner, convert_checkpoint
from loguru import logger
from transformers import AutoConfig, AutoModelForCausalLM

logger.remove()
TOKENS = torch.arange(2, 62)[None]


def model_of(experts, groups):
    torch.manual_seed(2)
    config = AutoConfig.for_model(
        "deepseek_v3", vocab_size=64, hidden_size=32, intermediate_size=32, moe_intermediate_size=32,
        num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, n_routed_experts=experts,
        num_experts_per_tok=2, n_group=groups, topk_group=1, first_k_dense_replace=0, q_lora_rank=None,
        kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=16, initializer_range=0.3,
    )
    return AutoModelForCausalLM.from_config(config).eval()


def pruned(model, share):
    """The model that the pruner makes of this one, and the experts that it keeps in each layer."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as output:
        model.save_pretrained(folder)
        pruner = MagnitudeExpertPruner.from_pretrained(folder, r"mlp\.gate\.weight$", r"mlp\.experts\.", share)
        convert_checkpoint(folder, output, pruner, max_workers=1)
        smaller = AutoModelForCausalLM.from_pretrained(output).eval()
    return smaller, [pruner.retained_experts[name] for name in sorted(pruner.retained_experts)]


dropped = {}
for share in (0.25, 0.35, 0.45, 0.55):
    _, kept = pruned(model_of(10, 1), share)
    dropped[share] = 10 - len(kept[0])
print(f"dropped of 10 experts by share: {dropped}")

differences = {}
for groups in (1, 2):
    model = model_of(8, groups)
    smaller, kept = pruned(model, 0.25)
    with torch.no_grad():
        for layer, experts in zip(model.model.layers, kept):  # the same experts left out of the choice, not of the file
            left_out = [expert for expert in range(8) if expert not in experts]
            layer.mlp.gate.e_score_correction_bias[left_out] = -1e4
        differences[groups] = (model(TOKENS).logits - smaller(TOKENS).logits).abs().max().item()
    print(f"n_group {groups}: layers keep {kept}; logits differ from the masked model's by {differences[groups]:.2g}")
rounded = dropped == {0.25: 2, 0.35: 4, 0.45: 4, 0.55: 6}
sys.exit(0 if rounded and differences[1] < 1e-4 and differences[2] > 0.1 else "changed")
END
