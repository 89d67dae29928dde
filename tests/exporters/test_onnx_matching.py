"""A pattern with several outputs is tried where it may begin, and no longer at nodes of another kind."""

import onnx_ir as ir
import pytest
from onnx import TensorProto, helper
from onnxscript.optimizer import optimize
from onnxscript.rewriter import _matcher

from exporters.onnx.trace import quick_matching


def halves() -> ir.Model:
    """Two slices of one value, which a pattern of the optimiser asks for, and a sum that it folds, among others."""
    bounds = {"zero": [0], "two": [2], "four": [4], "last": [1]}
    constants = [helper.make_tensor(name, TensorProto.INT64, [1], value) for name, value in bounds.items()]
    nodes = [
        helper.make_node("Slice", ["x", "zero", "two", "last"], ["a"]),
        helper.make_node("Slice", ["x", "two", "four", "last"], ["b"]),
        helper.make_node("Add", ["four", "two"], ["six"]),
        helper.make_node("Mul", ["a", "b"], ["r0"]),
    ]
    nodes += [helper.make_node("Sigmoid", [f"r{number}"], [f"r{number + 1}"]) for number in range(20)]
    nodes += [helper.make_node("Cast", ["six"], ["c"], to=1), helper.make_node("Mul", ["r20", "c"], ["y"])]
    given, made = (helper.make_tensor_value_info(n, TensorProto.FLOAT, [3, w]) for n, w in (("x", 4), ("y", 2)))
    graph = helper.make_graph(nodes, "halves", [given], [made], constants)
    return ir.from_proto(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)]))


def test_the_same_graph_comes_out_with_less_looking(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = list[str]()
    own = _matcher.SimplePatternMatcher._multi_match

    def watching(self: object, combination: tuple[ir.Node, ...], **more: object) -> object:
        tried.append(combination[0].op_type)
        return own(self, combination, **more)

    monkeypatch.setattr(_matcher.SimplePatternMatcher, "_multi_match", watching)
    plain = [node.op_type for node in optimize(halves()).graph]
    most = len(tried)
    with quick_matching():
        quick = [node.op_type for node in optimize(halves()).graph]
    assert plain == quick and "Cast" not in quick and "Sigmoid" in quick
    assert set(tried[most:]) == {"Slice"} < set(tried[:most])
