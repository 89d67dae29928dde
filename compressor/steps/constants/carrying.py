"""Carry out a plan with constants: measure them, refit them if so asked, and say what is to be written."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from compressor.errors import CompressionError
from compressor.kept import kept_tensors
from compressor.model.architecture import MoeLayer
from compressor.model.opened import pick_dtype
from compressor.model.streaming import LayerVisitor
from compressor.progress import Progress, Silent
from compressor.recipe.steps_plan import layer_to_dict
from compressor.steps.constants.forward import check_forward
from compressor.steps.constants.measure import substitutes_of
from compressor.steps.constants.planning import measured_constants, refuse_model
from compressor.steps.constants.variants import Substituting, Variant
from compressor.steps.constants.writing import make_job
from compressor.steps.correct.constants import VALUES, InOrder, correct_constants, kept_at
from compressor.steps.correct.step import CONSTANTS
from compressor.steps.state import State
from compressor.surgery.tensors import OutputJob


def refit_constants(state: State) -> Mapping[int, Mapping[str, Any]]:
    """Refit constants, and with `ridge` experts that stay, into the work folder; returns the plan with figures."""
    number, correct = state.stage[0], state.step_of("correct")
    if correct is None:
        return {}
    figures = correct_constants(_in_order(state, state.progress))
    layers = [
        replace(layer, figures={**layer.figures, "correction": figures[layer.module]}) if layer.constants else layer
        for layer in state.stage_plan().layers
    ]
    return {number: {**(state.plan.steps[number].plan or {}), "layers": [layer_to_dict(layer) for layer in layers]}}


def constants_job(state: State) -> OutputJob:
    """The job of writing the stage. What is measured and refitted waits in the work folder."""
    model, correct = state.model, state.step_of("correct")
    refuse_model(model)
    planned = _planned(state)
    if correct is None:
        stored = pick_dtype("auto", model.config, model.checkpoint)
        rounded: Variant = {name: replace(own, values=own.values.to(stored)) for name, own in planned.items()}
        return _job(state, {name: own.values for name, own in rounded.items()}, None, rounded)
    folder = _refitted(state)
    by_name = {layer.name: layer for layer in model.architecture.layers}
    values = {name: kept_tensors(kept_at(folder, by_name[name]))[VALUES] for name in planned}
    return _job(state, values, None if correct.method == CONSTANTS else folder, _in_order(state, Silent()))


def _planned(state: State) -> Variant:
    planned = {layer.module: layer.constants for layer in state.stage_plan().layers}
    return substitutes_of(planned, measured_constants(state))


def _refitted(state: State) -> Path:
    assert state.work is not None
    return state.work.kept(state.stage[0], "layers")


def _in_order(state: State, progress: Progress) -> InOrder:
    assert state.text is not None
    correct, planned = state.step_of("correct"), _planned(state)
    return InOrder(state.model, planned, state.text.fit, correct, _refitted(state), progress, state.seed)


def _job(state: State, values: dict[str, Tensor], refitted: Path | None, expected: Variant | LayerVisitor) -> OutputJob:
    """The job of writing these constants; refitted layers lie in a folder. `expected` is what to verify it by."""

    def of_layer(layer: MoeLayer) -> dict[str, Tensor]:
        assert refitted is not None
        tensors = kept_tensors(kept_at(refitted, layer))
        if not tensors:
            raise CompressionError(f"{layer.name}: its refitted tensors are gone; run the command again")
        return {key: value for key, value in tensors.items() if key != VALUES}

    def check(folder: Path) -> None:
        visitor = expected if isinstance(expected, LayerVisitor) else Substituting(state.model, [expected])
        check_forward(folder, state.model, visitor)

    return make_job(state.model, state.stage_plan(), values, None if refitted is None else of_layer, check)
