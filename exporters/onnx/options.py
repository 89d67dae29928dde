"""Options of an ONNX export; importing this loads no torch."""

from dataclasses import dataclass

from compressor.entry_points import option

DTYPES = {"fp32": "float32", "fp16": "float16"}
FORMATS = ("none", "int8", "int4")  # of the experts' weights
OPSETS = range(18, 24)
# above this the weights lie in a file of their own; a graph file ends at 2 GB
EXTERNAL_BYTES = 64 * 2**20
TOKENS = 64
PACKAGES = (  # whose versions decide the graph
    "onnx",
    "onnxscript",
    "onnxruntime",
    "onnx-ir",
    "torch",
    "transformers",
    "moe-compressor",
)


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """Options of the graph and its verification."""

    opset: int = option(20, "Version of the ONNX operators.", OPSETS)
    dtype: str = option("fp32", "Data type of the weights: fp32 or fp16.", DTYPES)
    quantize: str = option(
        "none", "Experts' weights: none, int8 (by row) or int4 (by blocks of 32).", FORMATS
    )
    past: bool = option(True, "Have the KV cache as inputs and outputs.")
    external_bytes: int = option(
        EXTERNAL_BYTES, "Bytes of weights above which they go to a file of their own."
    )
    tokens: int = option(TOKENS, "Greedy tokens to compare with the checkpoint's.")
    stream: bool | None = option(
        None,
        "Map the weights from their file to verify (default: where the model does not fit into "
        "memory).",
    )
