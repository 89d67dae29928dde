#!/usr/bin/env bash
# onnxruntime's QMoE renormalises the gates although normalize_routing_weights is 0; its MoE does
# not.
#
# Versions: onnxruntime 1.32.0 (1.31.1 alike), onnx 1.23.2, CPU.
# Guess:    QMoE is MoE with quantised weights, so that the shared attribute means the same.
# Seen:     MoE weighs the top-k experts by their probabilities at 0 and by those divided by their
#           sum at 1, as said. QMoE divides in both cases; only with the optional input
#           router_weights does it obey the attribute.
# Where:    the operators' schemas describe the attribute in the same words.
# Hurts:    exporters of families with norm_topk_prob false (OLMoE, Qwen2-MoE, DeepSeek-V2):
#           quantising the graph's nodes changes the scale of every MoE layer, which looks like
#           damage by rounding.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install --quiet onnxruntime==1.32.0 onnx==1.23.2 numpy==2.4.6

venv/bin/python - <<'END'
import sys
import numpy as np
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

EXPERTS, WIDTH, TOP_K, TOKENS = 8, 32, 2, 6
ROUTER_WEIGHTS = 14  # the position of the optional input
rng = np.random.default_rng(0)
x = rng.standard_normal((TOKENS, WIDTH)).astype(np.float32)
logits = rng.standard_normal((TOKENS, EXPERTS)).astype(np.float32)
probabilities = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)


def by_row():
    """Random weights in int8 with a scale a row (stored with 128 added), and what they stand for."""
    codes = rng.integers(-127, 128, (EXPERTS, WIDTH, WIDTH))
    scales = rng.uniform(0.001, 0.004, (EXPERTS, WIDTH)).astype(np.float32)
    return (codes + 128).astype(np.uint8), scales, (codes * scales[..., None]).astype(np.float32)


first_codes, first_scales, first = by_row()
second_codes, second_scales, second = by_row()


def node_output(operator, normalize, given=False):
    names = ["x", "logits"]
    attributes = dict(k=TOP_K, activation_type="relu", normalize_routing_weights=normalize)
    feeds = {"x": x, "logits": logits}
    if operator == "MoE":
        stored = {"first": first, "second": second}
        names += ["first", "", "second"]
    else:
        stored = {"first": first_codes, "s1": first_scales, "second": second_codes, "s2": second_scales}
        names += ["first", "s1", "", "second", "s2"]
        attributes["expert_weight_bits"] = 8
    if given:
        names += [""] * (ROUTER_WEIGHTS - len(names)) + ["gates"]
        feeds["gates"] = probabilities.astype(np.float32)
    node = helper.make_node(operator, names, ["y"], domain="com.microsoft", **attributes)
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, value.shape) for name, value in feeds.items()]
    output = helper.make_tensor_value_info("y", TensorProto.FLOAT, x.shape)
    weights = [numpy_helper.from_array(value, name) for name, value in stored.items()]
    graph = helper.make_graph([node], "layer", inputs, [output], weights)
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, feeds)[0]


def computed(normalize):
    result = np.zeros_like(x)
    for token in range(TOKENS):
        chosen = np.argsort(-logits[token])[:TOP_K]
        gates = probabilities[token, chosen]
        if normalize:
            gates = gates / gates.sum()
        for expert, gate in zip(chosen, gates):
            result[token] += gate * (np.maximum(x[token] @ first[expert].T, 0) @ second[expert].T)
    return result


found = {}
for operator, given in (("MoE", False), ("QMoE", False), ("QMoE", True)):
    for normalize in (0, 1):
        output = node_output(operator, normalize, given)
        errors = [np.abs(output - computed(way)).max() / np.abs(output).max() for way in (0, 1)]
        found[operator, given, normalize] = int(np.argmin(errors))
        kind = operator + (" with router_weights" if given else "")
        meaning = ("probabilities", "renormalised gates")[int(np.argmin(errors))]
        print(f"onnxruntime {onnxruntime.__version__}: {kind}, normalize_routing_weights={normalize}: {meaning} "
              f"(errors {errors[0]:.1g} and {errors[1]:.1g})")
        if min(errors) > 1e-4:
            sys.exit("changed: neither")
expected = {("MoE", False): (0, 1), ("QMoE", False): (1, 1), ("QMoE", True): (0, 1)}
sys.exit(0 if all(found[(*key, n)] == value[n] for key, value in expected.items() for n in (0, 1)) else "changed")
END
