"""Carrying out a plan with constants: measure them, refit them if so asked, and say what is to be written."""

from dataclasses import replace
from pathlib import Path

from torch import Tensor

from compressor.data.batches import Calibration, load_tokenizer, recalibrate
from compressor.errors import CompressionError
from compressor.model.architecture import MoeLayer
from compressor.model.opened import pick_dtype
from compressor.model.streaming import LayerVisitor
from compressor.planning.constants import measured_constants, refuse_model
from compressor.planning.request import MONE
from compressor.planning.run import Run
from compressor.progress import Progress, Silent
from compressor.recipe.plan import CompressionPlan
from compressor.recipe.registry import load_exporter
from compressor.steps.constants.forward import check_forward
from compressor.steps.constants.measure import substitutes_of
from compressor.steps.constants.variants import Substituting, Variant
from compressor.steps.correct.constants import VALUES, InOrder, correct_constants, kept_at
from compressor.steps.correct.refit import CONSTANTS, Correction
from compressor.surgery.kept import kept_tensors
from compressor.surgery.tensors import OutputJob


def constants_job(
    run: Run, plan: CompressionPlan, max_shard_bytes: int | None, calibration: Calibration | None
) -> tuple[CompressionPlan, OutputJob, list[str]]:
    """The plan with the figures of its correction, the job of writing it, and config fields set to zero.

    The calibration that the plan names is repeated unless it is given. What is measured and refitted waits in the
    run's folder.
    """
    model = run.model
    assert run.folder is not None
    refuse_model(model)
    if calibration is None:
        calibration = recalibrate(plan.calibration or {}, load_tokenizer(model.source.folder), model.vocabulary)
    with run.clock.phase("measure constants"):
        measured = measured_constants(run, calibration, plan.seed)
    stored = pick_dtype("auto", model.config, model.checkpoint)
    planned = substitutes_of({layer.module: layer.constants for layer in plan.layers}, measured)
    correction, seed = Correction.from_plan(plan.correction), plan.seed
    if not correction.wanted:
        rounded: Variant = {name: replace(own, values=own.values.to(stored)) for name, own in planned.items()}
        return plan, *_job(run, plan, {n: own.values for n, own in rounded.items()}, None, rounded, max_shard_bytes)
    folder = run.folder / f"constants-cut-{plan.digest()[:16]}"

    def in_order(progress: Progress) -> InOrder:
        return InOrder(model, planned, calibration, correction, folder, progress, seed)

    with run.clock.phase("correct"):
        figures = correct_constants(in_order(run.progress))
    layers = tuple(
        replace(layer, figures={**layer.figures, "correction": figures[layer.module]}) if layer.constants else layer
        for layer in plan.layers
    )
    by_name = {layer.name: layer for layer in model.architecture.layers}
    values = {name: kept_tensors(kept_at(folder, by_name[name]))[VALUES] for name in planned}
    made, zeroed = _job(
        run,
        plan := replace(plan, layers=layers),
        values,
        None if correction.method == CONSTANTS else folder,
        in_order(Silent()),
        max_shard_bytes,
    )
    return plan, made, zeroed


def _job(
    run: Run,
    plan: CompressionPlan,
    values: dict[str, Tensor],
    refitted: Path | None,
    expected: Variant | LayerVisitor,
    max_shard_bytes: int | None,
) -> tuple[OutputJob, list[str]]:
    """The job of writing these constants; refitted layers lie in a folder. `expected` is what to verify it by."""

    def of_layer(layer: MoeLayer) -> dict[str, Tensor]:
        assert refitted is not None
        tensors = kept_tensors(kept_at(refitted, layer))
        if not tensors:
            raise CompressionError(f"{layer.name}: its refitted tensors are gone; run the command again")
        return {key: value for key, value in tensors.items() if key != VALUES}

    def check(folder: Path) -> None:
        visitor = expected if isinstance(expected, LayerVisitor) else Substituting(run.model, [expected], 1)
        check_forward(folder, run.model, visitor)

    exporter = load_exporter(MONE)
    found: tuple[OutputJob, list[str]] = exporter.make_job(
        run.model, plan, values, None if refitted is None else of_layer, check, max_shard_bytes
    )
    return found
