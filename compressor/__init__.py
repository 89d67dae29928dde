"""moe-compressor: smaller Mixture-of-Experts checkpoints that every stock loader still loads."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from compressor.api.baking import calibrate_router
    from compressor.api.compressing import Summary, apply, compress
    from compressor.api.forecasting import forecast
    from compressor.api.gguf_files import apply_gguf, compress_gguf, plan_gguf
    from compressor.api.measuring import attribute, compare, gate, inspect
    from compressor.api.planning import plan, plan_per_source
    from compressor.api.recovering import RecoverySummary, recover
    from compressor.api.referencing import ReferenceSummary, reference
    from compressor.api.tuning import evaluate_comoe, train_comoe
    from compressor.errors import CompressionError
    from compressor.gguf_files.inspection import GgufInspection, inspect_gguf
    from compressor.gguf_files.job import GgufSummary
    from compressor.planning.request import Request

__all__ = [
    "CompressionError",
    "GgufInspection",
    "GgufSummary",
    "RecoverySummary",
    "ReferenceSummary",
    "Request",
    "Summary",
    "apply",
    "apply_gguf",
    "attribute",
    "calibrate_router",
    "compare",
    "compress",
    "compress_gguf",
    "evaluate_comoe",
    "forecast",
    "gate",
    "inspect",
    "inspect_gguf",
    "plan",
    "plan_gguf",
    "plan_per_source",
    "recover",
    "reference",
    "train_comoe",
]

_HOMES = {  # where a public name lives; its module, and torch with it, is loaded when the name is first used
    "CompressionError": "errors",
    "Request": "planning.request",
    **dict.fromkeys(("Summary", "apply", "compress"), "api.compressing"),
    **dict.fromkeys(("plan", "plan_per_source"), "api.planning"),
    "calibrate_router": "api.baking",
    "forecast": "api.forecasting",
    **dict.fromkeys(("apply_gguf", "compress_gguf", "plan_gguf"), "api.gguf_files"),
    **dict.fromkeys(("GgufInspection", "inspect_gguf"), "gguf_files.inspection"),
    "GgufSummary": "gguf_files.job",
    **dict.fromkeys(("attribute", "compare", "gate", "inspect"), "api.measuring"),
    **dict.fromkeys(("RecoverySummary", "recover"), "api.recovering"),
    **dict.fromkeys(("ReferenceSummary", "reference"), "api.referencing"),
    **dict.fromkeys(("evaluate_comoe", "train_comoe"), "api.tuning"),
}


def __getattr__(name: str) -> Any:
    """The public name, loaded on first use (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    return value
