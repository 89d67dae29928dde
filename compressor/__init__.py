"""moe-compressor: smaller Mixture-of-Experts checkpoints that every stock loader still loads."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from compressor.api.compressing import apply, change, compress, plan, plan_per_source
    from compressor.api.gguf_files import apply_gguf, compress_gguf, plan_gguf
    from compressor.api.measuring import ReferenceSummary, attribute, compare, gate, inspect, reference
    from compressor.api.tuning import evaluate_comoe, train_comoe
    from compressor.errors import CompressionError
    from compressor.gguf_files.blocks import GgufInspection, inspect_gguf
    from compressor.gguf_files.writing import GgufSummary
    from compressor.pipeline.outcome import Outcome
    from compressor.recipe.recipe import Recipe
    from compressor.recipe.step import Step
    from compressor.recipe.steps_plan import Plan
    from compressor.steps.constants.step import Constants
    from compressor.steps.correct.step import Correct
    from compressor.steps.distill.step import Distill
    from compressor.steps.prune.step import Prune
    from compressor.steps.routers.step import Routers
    from compressor.steps.split.step import Split

_HOMES = {  # where a public name lives; its module, and torch with it, is loaded when the name is first used
    "CompressionError": "errors",
    **dict.fromkeys(("apply", "change", "compress", "plan", "plan_per_source"), "api.compressing"),
    **dict.fromkeys(("apply_gguf", "compress_gguf", "plan_gguf"), "api.gguf_files"),
    **dict.fromkeys(("GgufInspection", "inspect_gguf"), "gguf_files.blocks"),
    "GgufSummary": "gguf_files.writing",
    **dict.fromkeys(("ReferenceSummary", "attribute", "compare", "gate", "inspect", "reference"), "api.measuring"),
    **dict.fromkeys(("evaluate_comoe", "train_comoe"), "api.tuning"),
    "Outcome": "pipeline.outcome",
    "Recipe": "recipe.recipe",
    "Step": "recipe.step",
    "Plan": "recipe.steps_plan",
    "Constants": "steps.constants.step",
    "Correct": "steps.correct.step",
    "Distill": "steps.distill.step",
    "Prune": "steps.prune.step",
    "Routers": "steps.routers.step",
    "Split": "steps.split.step",
}
__all__ = [
    "CompressionError",
    "Constants",
    "Correct",
    "Distill",
    "GgufInspection",
    "GgufSummary",
    "Outcome",
    "Plan",
    "Prune",
    "Recipe",
    "ReferenceSummary",
    "Routers",
    "Split",
    "Step",
    "apply",
    "apply_gguf",
    "attribute",
    "change",
    "compare",
    "compress",
    "compress_gguf",
    "evaluate_comoe",
    "gate",
    "inspect",
    "inspect_gguf",
    "plan",
    "plan_gguf",
    "plan_per_source",
    "reference",
    "train_comoe",
]


def __getattr__(name: str) -> Any:
    """The public name, loaded on first use (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    return value
