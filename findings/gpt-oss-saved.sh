#!/usr/bin/env bash
# A gpt-oss that transformers 5.23 dequantised on loading is saved under names that nothing loads.
#
# Versions: transformers 5.23.0 and 5.24.0, torch 2.13.0.
# Guess:    from_pretrained(quantization_config=Mxfp4Config(dequantize=True)), then save_pretrained,
#           gives a bfloat16 checkpoint that loads as what was saved; this is how people make one to
#           fine-tune or to merge.
# Seen:     5.23 writes the bfloat16 experts as gate_up_proj_blocks and down_proj_blocks, without
#           scales and without a quantization_config. The reload draws every expert at random; a
#           report of missing names is all it says. 5.24 writes gate_up_proj and down_proj, and the
#           reload is exact.
# Where:    no page was found.
# Hurts:    whoever has such a folder: no release loads it, and its config looks like that of a good
#           one. Renaming the tensors mends it.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv

cat > program.py <<'END'
import json
import sys
import tempfile
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, Mxfp4Config

torch.manual_seed(0)
config = AutoConfig.for_model(
    "gpt_oss", vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=2, head_dim=16, num_local_experts=4, num_experts_per_tok=2,
)
model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
tensors = {}
for name, value in model.state_dict().items():
    if name.endswith("_proj") and "experts" in name:  # random MXFP4: 16 bytes and an exponent for 32 weights
        experts, width, height = value.shape
        shape = (experts, height, width // 32)
        tensors[name + "_blocks"] = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8)
        tensors[name + "_scales"] = torch.randint(118, 122, shape, dtype=torch.uint8)
    else:
        tensors[name] = value.contiguous()

with tempfile.TemporaryDirectory() as source, tempfile.TemporaryDirectory() as saved:
    save_file(tensors, f"{source}/model.safetensors", metadata={"format": "pt"})
    fields = config.to_dict()
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    fields["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": kept}
    with open(f"{source}/config.json", "w") as stream:
        json.dump(fields, stream)
    wide = Mxfp4Config(dequantize=True)
    first = AutoModelForCausalLM.from_pretrained(source, quantization_config=wide, dtype=torch.bfloat16)
    first.save_pretrained(saved)
    with safe_open(f"{saved}/model.safetensors", "pt") as file:
        names = sorted(name for name in file.keys() if "layers.0.mlp.experts" in name and "bias" not in name)
        stored = {name.rpartition(".")[2]: str(file.get_tensor(name).dtype) for name in names}
    second = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.bfloat16)
tokens = torch.arange(32)[None]
with torch.no_grad():
    logits = first(tokens).logits.float()
    difference = (logits - second(tokens).logits.float()).abs().max().item()
print(f"transformers {transformers.__version__}: stored {stored}; logits up to {logits.abs().max():.3f} "
      f"differ by {difference:.3f} after the reload")
wrong = list(stored) == ["down_proj_blocks", "gate_up_proj_blocks"] and difference > 0.05
right = list(stored) == ["down_proj", "gate_up_proj"] and difference == 0
sys.exit(0 if (wrong if sys.argv[1] == "5.23.0" else right) else "changed")
END

for release in 5.23.0 5.24.0; do
    venv/bin/python -m pip install --quiet torch==2.13.0 transformers==$release
    venv/bin/python program.py $release
done
