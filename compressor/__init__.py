"""moe-compressor: smaller Mixture-of-Experts checkpoints that every stock loader still loads."""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from compressor.answers.options import AnswerOptions, ServerOptions
    from compressor.api import (
        apply,
        calibrate_router,
        compare,
        compress,
        distill,
        evaluate,
        export,
        gate,
        plan,
        save_baseline,
        split,
        traces,
        write_report,
    )
    from compressor.errors import CompressionError
    from compressor.golden.checking import check
    from compressor.hub.push import push
    from compressor.model.inspection import inspect
    from compressor.model.loaded import LoadedModel
    from compressor.pipeline.dry_run import DryRun, dry_run
    from compressor.pipeline.outcome import GateFailedError, Outcome
    from compressor.quality_gate.options import BehaviourOptions, GateOptions
    from compressor.quality_gate.recorded import gate_results
    from compressor.recipe.recipe import Recipe
    from compressor.recipe.step import StepOptions, TextOptions
    from compressor.recipe.steps_plan import Plan
    from compressor.steps.constants.options import Constants
    from compressor.steps.correct.options import Correct
    from compressor.steps.distill.options import Distill
    from compressor.steps.prune.options import Prune
    from compressor.steps.quantize.options import Quantize
    from compressor.steps.routers.options import Routers

_STEPS = ("Constants", "Correct", "Distill", "Prune", "Quantize", "Routers")
# public names by their modules, which are loaded, and torch with them, when a name is first used
_HOMES = {
    "answers.options": "AnswerOptions ServerOptions",
    "api": "apply calibrate_router compare compress distill evaluate export gate plan "
    "save_baseline split traces "
    "write_report",
    "errors": "CompressionError",
    "golden.checking": "check",
    "hub.push": "push",
    "model.loaded": "LoadedModel",
    "model.inspection": "inspect",
    "pipeline.dry_run": "DryRun dry_run",
    "pipeline.outcome": "GateFailedError Outcome",
    "quality_gate.options": "BehaviourOptions GateOptions",
    "quality_gate.recorded": "gate_results",
    "recipe.recipe": "Recipe",
    "recipe.step": "StepOptions TextOptions",
    "recipe.steps_plan": "Plan",
    **{f"steps.{step.lower()}.options": step for step in _STEPS},
}
_MODULES = {name: module for module, names in _HOMES.items() for name in names.split()}
__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    """Return a public name, loaded on first use (PEP 562): one of ours, or a function that a
    package announces."""
    if name == "__version__":
        value = version("moe-compressor")
    elif name in _MODULES:
        value = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    else:
        entry_points = import_module(f"{__name__}.entry_points")
        if name not in entry_points.names(entry_points.FUNCTIONS):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = entry_points.load(entry_points.FUNCTIONS, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Return all public names, whether they are loaded or not."""
    entry_points = import_module(f"{__name__}.entry_points")
    return sorted([*__all__, *entry_points.names(entry_points.FUNCTIONS), "__version__"])
