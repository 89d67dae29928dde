"""moe-compressor: smaller Mixture-of-Experts checkpoints that every stock loader still loads."""

from compressor.api import Summary, apply, compress, plan, plan_per_source
from compressor.errors import CompressionError
from compressor.measuring import attribute, compare, gate, inspect
from compressor.request import Request

__all__ = [
    "CompressionError",
    "Request",
    "Summary",
    "apply",
    "attribute",
    "compare",
    "compress",
    "gate",
    "inspect",
    "plan",
    "plan_per_source",
]
