"""moe-compressor: smaller Mixture-of-Experts checkpoints that every stock loader still loads."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from compressor.api.compressing import apply, change, compress, plan, plan_per_source
    from compressor.api.measuring import ReferenceSummary, attribute, compare, gate, reference
    from compressor.api.tuning import evaluate_comoe, train_comoe
    from compressor.errors import CompressionError
    from compressor.gguf_files.blocks import GgufInspection, inspect_gguf
    from compressor.gguf_files.writing import GgufSummary, apply_gguf, compress_gguf, plan_gguf
    from compressor.model.inspection import inspect
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

_HOMES = {  # public names by their modules, which are loaded, and torch with them, when a name is first used
    "api.compressing": ("apply", "change", "compress", "plan", "plan_per_source"),
    "api.measuring": ("ReferenceSummary", "attribute", "compare", "gate", "reference"),
    "api.tuning": ("evaluate_comoe", "train_comoe"),
    "errors": ("CompressionError",),
    "gguf_files.blocks": ("GgufInspection", "inspect_gguf"),
    "gguf_files.writing": ("GgufSummary", "apply_gguf", "compress_gguf", "plan_gguf"),
    "model.inspection": ("inspect",),
    "pipeline.outcome": ("Outcome",),
    "recipe.recipe": ("Recipe",),
    "recipe.step": ("Step",),
    "recipe.steps_plan": ("Plan",),
    **{
        f"steps.{step.lower()}.step": (step,)
        for step in ("Constants", "Correct", "Distill", "Prune", "Routers", "Split")
    },
}
__all__ = sorted(name for names in _HOMES.values() for name in names)


def __getattr__(name: str) -> Any:
    """The public name, loaded on first use (PEP 562)."""
    for module, names in _HOMES.items():
        if name in names:
            globals()[name] = value = getattr(import_module(f"{__name__}.{module}"), name)
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
