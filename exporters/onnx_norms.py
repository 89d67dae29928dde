"""RMS norms in the form that ONNX Runtime fuses into one operator when it loads a graph.

Traced, x * rsqrt(v) is Sqrt, Reciprocal, Mul; ONNX Runtime 1.31 looks for x / Sqrt(v). Both forms are plain ONNX.
"""

from typing import Any

FORMER, ROOT, PRODUCT, QUOTIENT = "Reciprocal", "Sqrt", "Mul", "Div"


def divide_by_roots(program: Any) -> int:
    """Turn every x * (1 / sqrt(v)) of an onnx_ir model into x / sqrt(v), in place; returns how many there were."""
    import onnx_ir
    from onnx_ir.passes.common import RemoveUnusedNodesPass

    found = 0
    for node in program.graph.all_nodes():
        factor = _inverse_root(node) if _is(node, PRODUCT) else None
        if factor is None:
            continue
        other, root = node.inputs[1 - factor], node.inputs[factor].producer().inputs[0]
        node.op_type = QUOTIENT
        node.replace_input_with(0, other)
        node.replace_input_with(1, root)
        found += 1
    onnx_ir.passes.Sequential(RemoveUnusedNodesPass())(program)
    return found


def _is(node: Any, kind: str) -> bool:
    return node is not None and node.domain == "" and node.op_type == kind


def _inverse_root(node: Any) -> int | None:
    """Which of a product's two inputs is 1 / sqrt(v), if one is."""
    for number, value in enumerate(node.inputs):
        inverse = value.producer()
        if _is(inverse, FORMER) and _is(inverse.inputs[0].producer(), ROOT):
            return number
    return None
