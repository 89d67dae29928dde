#!/usr/bin/env bash
# onnxruntime's QMoE on a CPU reads the same 4-bit SwiGLU experts in two ways, by an attribute
# that was ignored before.
#
# Versions: onnxruntime 1.31.1 and 1.32.0, onnx 1.23.2, CPU.
# Guess:    weights_prepacked, added for CUDA's layout, means nothing on a CPU; where raw weights
#           work by default (-1) they work at 1, for the schema says that both select the prepacked
#           layout.
# Seen:     raw 4-bit weights in blocks of 32 are right at -1 and 0 in both releases, and at 1 in
#           1.31.1. In 1.32.0 the node computes something else at 1, without a message; the same
#           experts in 8 bits stay right.
# Where:    the schema's text: -1 and 1 select layouts of the execution provider, 0 raw ones.
# Hurts:    graphs written for GPUs that are tested on a CPU, and graphs that wrote 1 while it had
#           no effect there. Write 0 where the weights are raw.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv

cat > program.py <<'END'
import sys
import numpy as np
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

EXPERTS, WIDTH, TOP_K, TOKENS, BLOCK = 8, 64, 2, 6, 32
rng = np.random.default_rng(0)
x = rng.standard_normal((TOKENS, WIDTH)).astype(np.float32)
logits = rng.standard_normal((TOKENS, EXPERTS)).astype(np.float32)


def by_block(rows, bits):
    """Random weights with a scale for 32 columns: codes as stored, scales, and what they stand for."""
    half = 2 ** (bits - 1)
    codes = rng.integers(-half + 1, half, (EXPERTS, rows, WIDTH))
    scales = (rng.uniform(0.5, 1, (EXPERTS, rows, WIDTH // BLOCK)) * 0.3 / half).astype(np.float32)
    values = (codes * scales.repeat(BLOCK, -1)).astype(np.float32)
    stored = (codes + half).astype(np.uint8)
    if bits == 4:
        stored = stored[..., 0::2] | (stored[..., 1::2] << 4)
    return stored, scales, values


def relative_error(bits, prepacked):
    first, first_scales, first_values = by_block(2 * WIDTH, bits)
    second, second_scales, second_values = by_block(WIDTH, bits)
    attributes = dict(
        k=TOP_K, activation_type="swiglu", swiglu_fusion=1, activation_alpha=1.0, activation_beta=0.0,
        normalize_routing_weights=1, expert_weight_bits=bits, block_size=BLOCK)
    if prepacked is not None:
        attributes["weights_prepacked"] = prepacked
    names = ["x", "logits", "first", "s1", "", "second", "s2"]
    node = helper.make_node("QMoE", names, ["y"], domain="com.microsoft", **attributes)
    feeds = {"x": x, "logits": logits}
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, value.shape) for name, value in feeds.items()]
    stored = {"first": first, "s1": first_scales, "second": second, "s2": second_scales}
    weights = [numpy_helper.from_array(value, name) for name, value in stored.items()]
    output = helper.make_tensor_value_info("y", TensorProto.FLOAT, x.shape)
    graph = helper.make_graph([node], "layer", inputs, [output], weights)
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    computed = session.run(None, feeds)[0]
    expected = np.zeros_like(x)
    for token in range(TOKENS):
        chosen = np.argsort(-logits[token])[:TOP_K]
        gates = np.exp(logits[token, chosen])
        for expert, gate in zip(chosen, gates / gates.sum()):
            hidden = first_values[expert] @ x[token]
            inner, linear = hidden[0::2], hidden[1::2]
            expected[token] += gate * (second_values[expert] @ (inner / (1 + np.exp(-inner)) * linear))
    return float(np.abs(computed - expected).max() / np.abs(expected).max())


found = {}
for bits in (4, 8):
    for prepacked in (None, -1, 0, 1):
        error = relative_error(bits, prepacked)
        found[bits, prepacked] = error < 0.05  # 8 bits round activations, too
        named = "not given" if prepacked is None else prepacked
        print(f"onnxruntime {onnxruntime.__version__}, {bits} bits, weights_prepacked {named}: relative error {error:.2g}")
wrong = [key for key, right in found.items() if not right]
sys.exit(0 if wrong == ([(4, 1)] if sys.argv[1] == "1.32.0" else []) else f"changed: {wrong}")
END

for release in 1.31.1 1.32.0; do
    venv/bin/python -m pip install --quiet onnxruntime==$release onnx==1.23.2 numpy==2.4.6
    venv/bin/python program.py $release
done
