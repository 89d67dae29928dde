#!/usr/bin/env bash
# torch.onnx exports a stock MoE with one of transformers' three experts implementations, and not
# with the default.
#
# Versions: torch 2.13.0, transformers 5.24.0, onnx 1.23.2, onnxscript 0.7.2, onnxruntime 1.32.0.
# Guess:    the plain loop over experts ("eager") exports best, a fused product such as the default
#           grouped_mm perhaps not; what gathers weights by token may fix the length of the text.
# Seen:     eager fails, for its loop runs over the experts that were hit, which depends on data.
#           grouped_mm, the default, fails, for its operator has no ONNX function. batched_mm
#           exports, and is right for other batches and lengths.
# Where:    no page was found that names the implementation to choose.
# Hurts:    exporters of MoE models, which need model.set_experts_implementation("batched_mm")
#           first.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install --quiet torch==2.13.0 transformers==5.24.0 \
    onnx==1.23.2 onnxscript==0.7.2 onnxruntime==1.32.0

venv/bin/python - <<'END' 2> log || { cat log; exit 1; }
import sys
import numpy as np
import onnxruntime
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
    "mixtral", vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, initializer_range=0.3,
)
model = AutoModelForCausalLM.from_config(config).eval()
default = model.config._experts_implementation
found = {}
for name in ("eager", "grouped_mm", "batched_mm"):
    model.set_experts_implementation(name)
    axes = {"tokens": {0: "batch", 1: "length"}}
    try:
        program = torch.onnx.export(
            Logits(model).eval(), (torch.arange(2, 22).reshape(2, 10),), dynamo=True, dynamic_shapes=axes, verbose=False)
    except torch.onnx.OnnxExporterError as error:
        found[name] = type(error).__name__
        continue
    program.save("model.onnx")
    session = onnxruntime.InferenceSession("model.onnx", providers=["CPUExecutionProvider"])
    differences = []
    for shape in ((2, 10), (1, 3), (4, 16)):
        tokens = torch.randint(0, 64, shape)
        with torch.no_grad():
            expected = model(tokens).logits.numpy()
        output = session.run(None, {session.get_inputs()[0].name: tokens.numpy()})[0]
        differences.append(float(np.abs(output - expected).max()))
    found[name] = max(differences)
print(f"the default is {default}; torch.onnx.export gives {found}")
same = found["eager"] == "TorchExportError" and found["grouped_mm"] == "ConversionError" and default == "grouped_mm"
sys.exit(0 if same and isinstance(found["batched_mm"], float) and found["batched_mm"] < 1e-4 else "changed")
END
