#!/usr/bin/env bash
# A Qwen3-MoE saved by transformers 5 has its number of experts under a name that 4.57 does not
# read.
#
# Versions: transformers 5.24.0 and 4.57.6, torch 2.13.0.
# Guess:    the config of a long-published family keeps its keys when it is loaded and saved by a
#           newer release.
# Seen:     5.24 reads num_experts and writes num_local_experts. 4.57 takes its own default of 128
#           instead, builds 128 experts and fails at the router's shape; only models of 128 experts
#           don't notice. OLMoE keeps num_experts, but its rope_theta moves into rope_parameters:
#           4.57 reads its default of 10000 without a message, and computes other positions.
# Where:    no page was found on which releases read a config that a newer one has written.
# Hurts:    whoever saves by 5 and runs by what was written for 4: converters, exporters, pinned
#           servers.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv

cat > program.py <<'END'
import json
import sys
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

SIZES = dict(
    vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=2, num_experts=8, num_experts_per_tok=2, eos_token_id=1, pad_token_id=0,
    max_position_embeddings=256,
)
OWN = {"qwen3_moe": dict(moe_intermediate_size=32, head_dim=16), "olmoe": {}}
TOKENS = torch.arange(2, 66)[None] % 64


def saved_fields(family):
    with open(f"{family}/config.json") as stream:
        fields = json.load(stream)
    return {name: fields[name] for name in ("num_experts", "num_local_experts", "rope_theta") if name in fields}


if sys.argv[1] == "old":
    found = {}
    for family in OWN:
        config = AutoConfig.from_pretrained(family)
        try:
            model = AutoModelForCausalLM.from_pretrained(family).eval()
            with torch.no_grad():
                difference = (model(TOKENS).logits - torch.load(f"{family}/logits.pt")).abs().max().item()
            outcome = f"loads; logits differ by {difference:.3f}"
            found[family] = config.num_experts, config.rope_theta, difference > 0.01
        except RuntimeError as error:
            outcome = f"{type(error).__name__}, {str(error).splitlines()[0][:100]}"
            found[family] = config.num_experts, "does not load"
        print(f"transformers {transformers.__version__} reads {family} with {config.num_experts} experts and a rope base "
              f"of {config.rope_theta}: {outcome}")
    expected = {"qwen3_moe": (128, "does not load"), "olmoe": (8, 10000.0, True)}
    sys.exit(0 if found == expected else f"changed: {found}")

torch.manual_seed(0)
for family, own in OWN.items():
    parameters = {"rope_type": "default", "rope_theta": 1000.0}
    config = AutoConfig.for_model(family, **SIZES, **own, rope_parameters=parameters, initializer_range=0.3)
    model = AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(family)
    with torch.no_grad():
        torch.save(model(TOKENS).logits, f"{family}/logits.pt")
    print(f"transformers {transformers.__version__}: {family} saved with {saved_fields(family)}")
expected = [{"num_local_experts": 8}, {"num_experts": 8}]
sys.exit(0 if [saved_fields(family) for family in OWN] == expected else "changed")
END

venv/bin/python -m pip install --quiet torch==2.13.0 transformers==5.24.0
venv/bin/python program.py new
venv/bin/python -m pip install --quiet transformers==4.57.6
venv/bin/python program.py old
