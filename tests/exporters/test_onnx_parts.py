"""A graph cut at its layers: inner graphs that read what other layers made, against the graph in one session."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from compressor.errors import CompressionError
from compressor.progress import Silent
from exporters.onnx.reference import Case
from exporters.onnx.verify import Graph

pytestmark = pytest.mark.full

WIDTH, TOKENS = 4, 11
UNITS = ("layers.0", "layers.1")
OWNERS = {"embed": "embed", "w0": "layers.0.w", "w1": "layers.1.w", "head": "head"}
FLOAT, INT, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL
CACHES = ("0.key", "1.key")
node = helper.make_node


def value(name: str, kind: int, *shape: Any) -> Any:
    """A typed name."""
    return helper.make_tensor_value_info(name, kind, list(shape))


def decoder() -> onnx.ModelProto:
    """Two layers with a cache each; the second one's loop reads the first's output, the embedding and its own weight.

    So does a branch within the loop, one graph further in.
    """
    state = ("batch", "sequence", WIDTH)
    then = helper.make_graph([node("Add", ["h0", "h1"], ["taken"])], "then", [], [value("taken", FLOAT, *state)])
    other = helper.make_graph([node("MatMul", ["h1", "w1"], ["left"])], "else", [], [value("left", FLOAT, *state)])
    body = helper.make_graph(
        [
            node("Equal", ["turn", "one"], ["second"]),
            node("If", ["second"], ["picked"], then_branch=then, else_branch=other),
            node("MatMul", ["picked", "w1"], ["mixed"]),
            node("Add", ["state", "mixed"], ["next"]),
            node("Identity", ["goes"], ["on"]),
        ],
        "body",
        [value("turn", INT), value("goes", BOOL), value("state", FLOAT, *state)],
        [value("on", BOOL), value("next", FLOAT, *state)],
    )
    nodes = [
        node("Gather", ["embed", "input_ids"], ["h0"]),
        node("MatMul", ["h0", "w0"], ["m0"]),
        node("Concat", ["past_key_values.0.key", "m0"], ["present.0.key"], axis=1),
        node("ReduceSum", ["present.0.key", "axis"], ["s0"], keepdims=1),
        node("Add", ["m0", "s0"], ["h1"]),
        node("Loop", ["turns", "true", "h1"], ["looped"], body=body),
        node("Concat", ["past_key_values.1.key", "looped"], ["present.1.key"], axis=1),
        node("ReduceSum", ["present.1.key", "axis"], ["s1"], keepdims=1),
        node("Add", ["looped", "s1"], ["h2"]),
        node("MatMul", ["h2", "head"], ["logits"]),
    ]
    generator = np.random.default_rng(0)
    shapes = {"embed": (TOKENS, WIDTH), "w0": (WIDTH, WIDTH), "w1": (WIDTH, WIDTH), "head": (WIDTH, TOKENS)}
    tensors: dict[str, Any] = {key: generator.normal(size=size).astype(np.float32) for key, size in shapes.items()}
    tensors |= {"axis": np.array([1]), "turns": np.array(3), "true": np.array(True), "one": np.array(1)}
    graph = helper.make_graph(
        nodes, "decoder",
        [value("input_ids", INT, "batch", "sequence"),
         *(value(f"past_key_values.{name}", FLOAT, "batch", "past", WIDTH) for name in CACHES)],
        [value("logits", FLOAT, "batch", "sequence", TOKENS),
         *(value(f"present.{name}", FLOAT, "batch", "total", WIDTH) for name in CACHES)],
        [numpy_helper.from_array(array, name) for name, array in tensors.items()],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    return onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True)


def test_inner_graphs_get_what_other_layers_made(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(decoder(), path)
    parts = Graph(path, OWNERS, UNITS)
    held = [{entry.name for entry in part.model.graph.initializer} & OWNERS.keys() for part in parts.parts]
    assert held == [{"embed"}, {"w0"}, {"w1"}, {"head"}]
    assert {"h0", "h1"} <= {*parts.parts[2].inputs} and "picked" not in parts.parts[2].inputs
    tokens = torch.randint(TOKENS, (2, 9), generator=torch.Generator().manual_seed(0))
    cases = tuple(
        Case(str(chunks), tokens, torch.ones_like(tokens), chunks, torch.zeros(2, 9, TOKENS))
        for chunks in ((9,), (4, 1, 3, 1))
    )
    layered, whole = (list(graph.answers(cases, Silent())) for graph in (parts, Graph(path)))
    for one, two in zip(layered, whole, strict=True):
        assert torch.allclose(one, two, rtol=1e-5) and float(two.std()) > 1
    assert list(tmp_path.iterdir()) == [path]


def test_a_value_of_unknown_type_between_layers_is_told(tmp_path: Path) -> None:
    model, path = decoder(), tmp_path / "model.onnx"
    del model.graph.value_info[:]
    onnx.save(model, path)
    with pytest.raises(CompressionError, match=r"does not say of what type 'h\d' is; export with --no-stream"):
        Graph(path, OWNERS, UNITS)
