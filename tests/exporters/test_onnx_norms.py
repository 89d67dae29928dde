"""x * (1 / sqrt(v)) becomes x / sqrt(v): the same numbers, and one operator in ONNX Runtime."""

from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import onnx_ir
import onnxruntime
import pytest
from onnx import helper

from exporters.onnx_norms import divide_by_roots

WIDTH = 8


def norm(factor_first: bool) -> onnx.ModelProto:
    """x * rsqrt(mean(x^2) + 1e-6) * weight as torch.onnx writes it; the factor is either input of the product."""
    product = ["factor", "x"] if factor_first else ["x", "factor"]
    nodes = [
        helper.make_node("Pow", ["x", "two"], ["squares"]),
        helper.make_node("ReduceMean", ["squares", "last"], ["mean"], keepdims=1),
        helper.make_node("Add", ["mean", "epsilon"], ["variance"]),
        helper.make_node("Sqrt", ["variance"], ["root"]),
        helper.make_node("Reciprocal", ["root"], ["factor"]),
        helper.make_node("Mul", product, ["scaled"]),
        helper.make_node("Mul", ["weight", "scaled"], ["y"]),
    ]
    constants = {
        "two": np.float32(2), "last": np.array([-1]), "epsilon": np.float32(1e-6),
        "weight": np.linspace(0.5, 1.5, WIDTH, dtype=np.float32),
    }  # fmt: skip
    tensors = [onnx.numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()]
    value = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["rows", WIDTH]) for name in ("x", "y")]
    graph = helper.make_graph(nodes, "norm", value[:1], value[1:], tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def rewritten(model: onnx.ModelProto) -> tuple[onnx.ModelProto, int]:
    """The model after the rewrite, and how many products changed."""
    program = onnx_ir.from_proto(model)
    found = divide_by_roots(program)
    return onnx_ir.to_proto(program), found


def run(model: onnx.ModelProto, given: np.ndarray, optimised: Path | None = None) -> np.ndarray:
    """What ONNX Runtime computes; with a path, the graph that it made of the model is left there."""
    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = 3
    if optimised is not None:
        settings.optimized_model_filepath = str(optimised)
    session = onnxruntime.InferenceSession(model.SerializeToString(), settings, ["CPUExecutionProvider"])
    return session.run(None, {"x": given})[0]


@pytest.mark.parametrize("factor_first", [False, True])
def test_a_norm_is_fused_by_onnx_runtime_and_stays_right(factor_first: bool, tmp_path: Path) -> None:
    model, found = rewritten(norm(factor_first))
    given = np.random.default_rng(0).standard_normal((5, WIDTH)).astype(np.float32)
    exact = given / np.sqrt((given.astype(np.float64) ** 2).mean(-1, keepdims=True) + 1e-6)
    onnx.checker.check_model(model, full_check=True)
    assert found == 1 and "Reciprocal" not in {node.op_type for node in model.graph.node}
    np.testing.assert_allclose(
        run(model, given, tmp_path / "fused.onnx"), exact * np.linspace(0.5, 1.5, WIDTH), rtol=1e-6
    )
    kinds = Counter(node.op_type for node in onnx.load(str(tmp_path / "fused.onnx")).graph.node)
    assert kinds == {"SimplifiedLayerNormalization": 1}


def test_a_factor_with_another_reader_keeps_its_node() -> None:
    model = norm(False)
    model.graph.node.append(helper.make_node("Identity", ["factor"], ["kept"]))
    model.graph.output.append(helper.make_tensor_value_info("kept", onnx.TensorProto.FLOAT, ["rows", 1]))
    kinds = Counter(node.op_type for node in rewritten(model)[0].graph.node)
    assert kinds["Reciprocal"] == 1 and kinds["Div"] == 1


def test_other_products_and_reciprocals_stay() -> None:
    model = norm(False)
    model.graph.node[3].op_type = "Exp"
    changed, found = rewritten(model)
    assert found == 0 and Counter(node.op_type for node in changed.graph.node)["Mul"] == 2
