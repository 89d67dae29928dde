"""Options of an ONNX export; importing this loads no torch."""

from typing import Literal

from compressor.options import NamedOptions

DTYPES = {"fp32": "float32", "fp16": "float16"}
# above this the weights lie in a file of their own; a graph file ends at 2 GB
EXTERNAL_BYTES = 64 * 2**20
TOKENS = 64
RECORD = "onnx_export.json"
PACKAGES = (  # whose versions decide the graph
    "onnx",
    "onnxscript",
    "onnxruntime",
    "onnx-ir",
    "torch",
    "transformers",
    "moe-compressor",
)


class ExportOptions(NamedOptions):
    """Options of the graph and its verification."""

    opset: Literal[18, 19, 20, 21, 22, 23] = 20
    """Version of the ONNX operators."""
    dtype: Literal["fp32", "fp16"] = "fp32"
    """Data type of the weights."""
    quantize: Literal["none", "int8", "int4"] = "none"
    """Experts' weights: none, int8 (by row) or int4 (by blocks of 32)."""
    past: bool = True
    """Have the KV cache as inputs and outputs."""
    external_bytes: int = EXTERNAL_BYTES
    """Bytes of weights above which they go to a file of their own."""
    tokens: int = TOKENS
    """Greedy tokens to compare with the checkpoint's."""
    stream: bool | None = None
    """Map the weights from their file to verify (default: where the model does not fit into
    memory)."""
