#!/usr/bin/env bash
# An override of the number of experts in per_layer_config works under neither of the field's two
# names, nor does one in mtp_per_layer_config.
#
# Versions: transformers 5.24.0, torch 2.13.0.
# Guess:    per_layer_config, made for models whose layers differ, takes num_experts or
#           num_local_experts (each config maps one to the other) and builds layers with that many;
#           a wrong name would be refused.
# Seen:     under the mapped name (Qwen3-MoE's and Mixtral's num_experts, OLMoE's num_local_experts)
#           it is accepted, saved into config.json and ignored: all layers have the global number.
#           Under the stored name building raises, and from then on even hasattr and getattr with a
#           default raise, since the error is no AttributeError. The layers of a head for further
#           tokens (MtpModel), whose fields mtp_per_layer_config should override, do the same.
# Where:    the field's docstring says that overrides are by name; not what becomes of mapped names.
# Hurts:    pruners that keep unlike numbers a layer, or a whole head over fewer experts, and tools that probe configs by
#           getattr(config, "num_experts", None).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install --quiet torch==2.13.0 transformers==5.24.0

venv/bin/python - <<'END'
import json
import sys
import tempfile
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_layers import MtpModel

SIZES = dict(
    vocab_size=64, hidden_size=32, intermediate_size=32, moe_intermediate_size=32, num_hidden_layers=3,
    num_attention_heads=2, num_key_value_heads=2, head_dim=16, num_experts_per_tok=2, eos_token_id=1, pad_token_id=0,
)


def outcome(action):
    try:
        return action()
    except Exception as error:
        return type(error).__name__


def layers_built(config):
    model = AutoModelForCausalLM.from_config(config)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        with open(f"{folder}/config.json") as stream:
            saved = json.load(stream)["per_layer_config"]["1"]
    return [layer.mlp.experts.gate_up_proj.shape[0] for layer in model.model.layers], saved


def head_built(config, name):
    config.num_mtp_layers = 1
    config.mtp_per_layer_config = {0: {name: 4}}
    (layer,) = MtpModel(AutoModelForCausalLM.from_config(config), 1).layers
    return [layer.mtp_block.mlp.experts.gate_up_proj.shape[0]]


found = {}
for family, stored, mapped in (
    ("qwen3_moe", "num_local_experts", "num_experts"),
    ("mixtral", "num_local_experts", "num_experts"),
    ("olmoe", "num_experts", "num_local_experts"),
):
    for name in (mapped, stored):
        config = AutoConfig.for_model(family, **SIZES, **{stored: 8}, per_layer_config={1: {name: 4}})
        built = outcome(lambda: layers_built(config))
        asked = outcome(lambda: getattr(config, stored, None)), outcome(lambda: hasattr(config, stored))
        print(f"{family}, 8 experts, {name} 4 in layer 1: built {built}; getattr and hasattr give {asked}")
        ignored = built == ([8, 8, 8], {name: 4}) and asked == (8, True)
        refused = {built, *asked} == {"AmbiguousGlobalPerLayerAttributeError"} if isinstance(built, str) else False
        head = outcome(lambda: head_built(AutoConfig.for_model(family, **SIZES, **{stored: 8}), name))
        print(f"{family}, 8 experts, {name} 4 in a head: built {head}")
        same = head == [8] if name == mapped else head == "AmbiguousGlobalPerLayerAttributeError"
        found[family, name] = same and (ignored if name == mapped else refused)
sys.exit(0 if all(found.values()) else f"changed: {found}")
END
