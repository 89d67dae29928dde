"""Carry out the correction of a stage's plan: every layer refitted in order, undone where it harms the whole model."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from compressor.data.batches import Calibration
from compressor.distributed.ranks import here
from compressor.model.architecture import MoeLayer
from compressor.model.opened import OpenModel, shared_experts
from compressor.mtp.head import kept_heads
from compressor.progress import Progress
from compressor.recipe.plan import CompressionPlan
from compressor.recipe.registry import load_strategy
from compressor.recipe.step import Step
from compressor.recipe.steps_plan import decisions
from compressor.steps.correct.heads import compress_with_heads
from compressor.steps.correct.in_order import LayerWork, Visited
from compressor.steps.correct.step import NONE, Correct
from compressor.steps.correct.whole_model import keep_the_better
from compressor.steps.state import State
from compressor.surgery.cutting import CutFiles

logger = logging.getLogger(__name__)


def resolved_method(asked: Correct, model: OpenModel, steps: Sequence[Step]) -> str:
    """The method of a correction, that of the stage's strategy for `auto`."""
    if asked.method != "auto":
        return asked.method
    prune: Any = next((step for step in steps if step.name == "prune"), None)
    method = NONE if prune is None else load_strategy(prune.strategy, prune.options).correction
    if method != NONE and (shared := shared_experts(model)):
        logger.warning("%s shares its experts with another layer, so nothing is corrected", shared)
        return NONE
    return method


def refit_stage(asked: Correct, state: State) -> Mapping[int, Mapping[str, Any]]:
    """Correct the stage's layers, which wait in the work folder to be written; returns its decisions with figures."""
    stage, number = state.stage_plan(), state.number_of("prune")
    assert state.text is not None and number is not None and state.work is not None
    made = correct(state.model, stage, state.progress, state.cut(), state.text.fit, asked, state.visited)
    return {number: decisions(made)}


def correct(
    model: OpenModel,
    plan: CompressionPlan,
    progress: Progress,
    files: CutFiles,
    calibration: Calibration,
    asked: Correct,
    visited: Visited | None = None,
) -> CompressionPlan:
    """Carry out the correction of a plan, layer by layer into `files`; returns the plan with its figures.

    Layers that are in `files` already are not made again. Corrections that take the whole model further from the base
    on held-out text are undone, except beside heads, which were corrected on what the corrected layers output.
    """
    heads = kept_heads(model, [layer.module for layer in plan.layers])
    visits: list[tuple[MoeLayer, Tensor, int]] = []  # told only of what stays
    done = [files.plan(layer) for layer in model.architecture.layers]
    done += [files.of_head(number).plan(head.layer) for number, head in enumerate(heads)]
    layers = tuple(layer for layer in done if layer is not None)
    here().assert_same_on_all(len(layers), "number of corrected layers in its hidden folder")
    if len(layers) < len(done):
        by_name = {layer.module: layer for layer in plan.layers}
        work = LayerWork(
            plan.experts,
            lambda stats: by_name[stats.layer.name],
            correction=asked,
            seed=plan.seed,
            visited=None if visited is None else lambda *seen: visits.append(seen),
        )
        layers = compress_with_heads(model, heads, work, calibration, progress, files, "correct")
    if not heads:
        corrected, layers = layers, keep_the_better(model, layers, files, calibration.heldout_batches, progress)
        visits = visits if layers == corrected else []
    if visited is not None:
        for seen in visits:
            visited(*seen)
    return replace(plan, layers=layers)
