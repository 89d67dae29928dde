"""moe-compressor: smaller Mixture-of-Experts checkpoints that every stock loader still loads."""

from compressor.api import Summary, apply, compare, compress, inspect, plan, plan_per_source
from compressor.errors import CompressionError
from compressor.request import Request

__all__ = [
    "CompressionError",
    "Request",
    "Summary",
    "apply",
    "compare",
    "compress",
    "inspect",
    "plan",
    "plan_per_source",
]
