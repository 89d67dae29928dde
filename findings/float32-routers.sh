#!/usr/bin/env bash
# Which dtype a router has in a model of transformers depends on how the model was made, and on
# the release.
#
# Versions: transformers 5.23.0 and 5.24.0, torch 2.13.0.
# Guess:    from_pretrained(dtype=bfloat16) gives a bfloat16 model, the same as
#           from_pretrained().to(bfloat16).
# Seen:     5.24 keeps gate.weight of GLM-4-MoE, DeepSeek-V2 and V3 and some twenty other families
#           in float32 on loading and in from_config; .to(bfloat16) afterwards rounds it. 5.23 does
#           so for five, ERNIE 4.5 among them. Qwen3-MoE's is bfloat16 everywhere.
# Where:    _keep_in_fp32_modules_strict in each modeling file; no page was found that lists the
#           families.
# Hurts:    whoever compares logits or choices of experts between two ways of loading, counts a
#           file's bytes from its parameters, or patches weights of a loaded model in the dtype of
#           the others.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv

cat > program.py <<'END'
import sys
import tempfile
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

SIZES = dict(
    vocab_size=64, hidden_size=32, intermediate_size=32, moe_intermediate_size=32, num_hidden_layers=2,
    num_attention_heads=2, num_key_value_heads=2, num_experts_per_tok=2, max_position_embeddings=64,
)
MODELS = {
    "glm4_moe": dict(n_routed_experts=8, n_group=1, topk_group=1, first_k_dense_replace=0),
    "ernie4_5_moe": dict(moe_num_experts=8, moe_k=2, moe_layer_start_index=0),
    "qwen3_moe": dict(num_experts=8, head_dim=16),
}


def router_dtype(model):
    return str(model.model.layers[1].mlp.gate.weight.dtype).removeprefix("torch.")


found = {}
for name, own in MODELS.items():
    config = AutoConfig.for_model(name, **SIZES, **own)
    built = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with tempfile.TemporaryDirectory() as folder:
        AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(folder)
        loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        cast = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(torch.bfloat16)
    others = {str(p.dtype) for n, p in loaded.named_parameters() if ".mlp.gate." not in n}
    found[name] = [router_dtype(model) for model in (built, loaded, cast)]
    print(f"transformers {transformers.__version__} {name}: the router is {found[name][0]} by from_config, "
          f"{found[name][1]} by from_pretrained, {found[name][2]} after .to(bfloat16); the rest {others}")
wide, narrow = ["float32", "float32", "bfloat16"], ["bfloat16"] * 3
kept = wide if sys.argv[1] == "5.24.0" else narrow
expected = {"glm4_moe": kept, "ernie4_5_moe": wide, "qwen3_moe": narrow}
sys.exit(0 if found == expected else f"changed: expected {expected}")
END

for release in 5.23.0 5.24.0; do
    venv/bin/python -m pip install --quiet torch==2.13.0 transformers==$release
    venv/bin/python program.py $release
done
