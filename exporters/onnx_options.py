"""What can be asked of an ONNX export."""

from dataclasses import dataclass

from compressor.errors import CompressionError
from exporters.onnx_experts import FALLBACKS
from exporters.onnx_quantized_experts import FORMATS
from exporters.onnx_reference import TOKENS

DTYPES = {"fp32": "float32", "fp16": "float16"}
OPSETS = range(18, 24)
EXTERNAL_BYTES = 64 * 2**20  # above this the weights lie in a file of their own; a graph file ends at 2 GB


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """What to make of a checkpoint."""

    opset: int = 20
    dtype: str = "fp32"
    quantize: str = "none"
    past: bool = True  # the cache as inputs and outputs
    overwrite: bool = False
    fallback: str = FALLBACKS[0]  # for layers that the MoE node cannot express
    external_bytes: int = EXTERNAL_BYTES
    tokens: int = TOKENS  # greedy tokens that are compared
    stream: bool | None = None  # whether to verify layer by layer; None: where the model does not fit into memory

    def __post_init__(self) -> None:
        for name, value, known in (
            ("--dtype", self.dtype, DTYPES),
            ("--quantize", self.quantize, FORMATS),
            ("the fallback", self.fallback, FALLBACKS),
        ):
            if value not in known:
                raise CompressionError(f"{name} {value!r} is not known; it is one of {', '.join(known)}")
        if self.opset not in OPSETS:
            raise CompressionError(f"--opset {self.opset} is not supported; give one from {OPSETS[0]} to {OPSETS[-1]}")
