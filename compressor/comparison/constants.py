"""Rows of models in which constants stand for experts: `compare --format mone`, even and uneven, beside the drops."""

import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from compressor.checkpoint.headers import Size
from compressor.data.batches import Calibration
from compressor.errors import CompressionError
from compressor.evaluation.heldout import Judge
from compressor.model.opened import OpenModel
from compressor.model.streaming import LayerStream
from compressor.planning.protecting import Protected
from compressor.planning.request import BUDGETS
from compressor.progress import Progress
from compressor.steps.constants.budget import even_numbers
from compressor.steps.constants.measure import measure, replacing
from compressor.steps.constants.uneven import divide, spare
from compressor.steps.constants.variants import Substituting, Variant
from compressor.steps.correct.constants import InOrder, correct_constants
from compressor.steps.correct.refit import Correction

STRATEGY = "constants"


@dataclass(frozen=True, slots=True)
class Substituted:
    """One way to put constants into the model."""

    budget: str
    experts: int  # kept in each layer, on average
    variant: Variant
    size: Size
    seconds: float  # that choosing took

    @property
    def name(self) -> str:
        """As the table calls it."""
        return f"{STRATEGY}, {self.budget}"


def substituted_models(
    model: OpenModel,
    counts: Sequence[int],
    calibration: Calibration,
    progress: Progress,
    seed: int,
    protected: Protected | None,
) -> Iterator[Substituted]:
    """For each count of experts as many in every layer, then as many in all where the model loses least."""
    layers, guarded = model.architecture.layers, protected or {}
    begin = time.perf_counter()
    constants = measure(model, calibration, progress, seed)
    measured = time.perf_counter() - begin
    most = [spare(layer, guarded) for layer in layers]
    for count in counts:
        removed = sum(layer.experts - count for layer in layers)
        if sum(most) < removed:
            raise CompressionError(f"--experts {count}: too many are protected to replace so many; keep more")
        for budget in BUDGETS:
            begin = time.perf_counter()
            if budget == BUDGETS[0]:
                numbers = even_numbers(removed, most)
            else:
                found = divide(model, constants, removed, guarded, calibration.heldout_batches, progress).numbers
                numbers = [found[layer.name] for layer in layers]
            variant = replacing(layers, constants, numbers, guarded)
            seconds = measured + time.perf_counter() - begin
            yield Substituted(budget, count, variant, stored_substituted(model, variant), seconds)


def stored_substituted(model: OpenModel, variant: Variant) -> Size:
    """Parameters and bytes of the stored tensors with these constants, which are stored as the model computes."""
    tensors, parameters, nbytes = model.checkpoint.tensors, 0, 0
    for name, role in model.layout.roles.items():
        found = variant.get(role.layer)
        if role.kind == "expert" and not role.is_router and found is not None and role.expert in found.dropped:
            continue
        parameters, nbytes = parameters + tensors[name].parameters, nbytes + tensors[name].nbytes
    more = sum(found.values.numel() for found in variant.values())
    return Size(parameters + more, nbytes + more * model.partial.dtype.itemsize)


def run_judged(
    model: OpenModel,
    made: Substituted,
    correction: Correction,
    calibration: Calibration,
    judge: Judge,
    progress: Progress,
    seed: int,
) -> float | None:
    """Let the judge's batches pass the model with constants, corrected if so asked; the mean layer error then."""
    if correction.wanted:
        with tempfile.TemporaryDirectory() as folder:
            visitor = InOrder(model, made.variant, calibration, correction, Path(folder), progress, seed)
            figures = correct_constants(visitor, judge)
        errors = [float(entry["heldout_error"]) for entry in figures.values() if "heldout_error" in entry]
        return sum(errors) / len(errors) if errors else None
    judge.first = 0
    batches: list[Tensor] = judge.tokens
    units = model.architecture.units
    progress.start(f"{made.name}, {made.experts}", len(units))
    stream = LayerStream(model.partial, batches, units, units, range(len(batches)))
    for unit in stream.passing(Substituting(model, [made.variant], len(batches)), judge):
        progress.advance(unit)
    return None
