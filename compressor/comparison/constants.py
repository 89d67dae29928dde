"""Rows of models in which constants stand for experts: `compare --format mone`, even and uneven, beside the drops."""

import logging
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from compressor.checkpoint.reader import Size
from compressor.data.batches import Calibration
from compressor.errors import CompressionError
from compressor.evaluation.evaluator import FEWEST, Evaluator, Figures
from compressor.model.constant_experts import is_replaced
from compressor.model.opened import OpenModel
from compressor.progress import Progress
from compressor.steps.constants.budget import EVEN, UNEVEN, divide, even_numbers, spare
from compressor.steps.constants.measure import Substituting, Variant, measure, replacing
from compressor.steps.correct.constants import InOrder, correct_constants
from compressor.steps.correct.step import Correct
from compressor.steps.prune.protecting import Protected

logger = logging.getLogger(__name__)
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
    budgets = [EVEN, UNEVEN]
    if (held := sum(map(len, calibration.heldout_batches))) < FEWEST:
        logger.warning("%d held-out sequences are too few to divide experts unevenly; raise --samples", held)
        budgets = [EVEN]
    for count in counts:
        removed = sum(layer.experts - count for layer in layers)
        if sum(most) < removed:
            raise CompressionError(f"--experts {count}: too many are protected to replace so many; keep more")
        for budget in budgets:
            begin = time.perf_counter()
            numbers = even_numbers(removed, most)
            if budget == UNEVEN:
                numbers, _ = divide(model, constants, removed, guarded, calibration.heldout_batches, progress)
            variant = replacing(layers, constants, numbers, guarded)
            seconds = measured + time.perf_counter() - begin
            yield Substituted(budget, count, variant, stored_substituted(model, variant), seconds)


def stored_substituted(model: OpenModel, variant: Variant) -> Size:
    """Parameters and bytes of the stored tensors with these constants, which are stored as the model computes."""
    tensors, parameters, nbytes = model.checkpoint.tensors, 0, 0
    for name, role in model.layout.roles.items():
        if not is_replaced(role, variant):
            parameters, nbytes = parameters + tensors[name].parameters, nbytes + tensors[name].nbytes
    more = sum(found.values.numel() for found in variant.values())
    return Size(parameters + more, nbytes + more * model.partial.dtype.itemsize)


def evaluate_substituted(
    model: OpenModel,
    made: Substituted,
    correction: Correct,
    calibration: Calibration,
    evaluator: Evaluator,
    progress: Progress,
    seed: int,
) -> tuple[Figures, float | None]:
    """Figures of the model with constants, corrected if so asked, and the mean layer error then."""
    if not correction.wanted:
        visitor = Substituting(model, [made.variant])
        return evaluator.measure(model, visitor, 1, progress, f"{made.name}, {made.experts}")[0], None
    with tempfile.TemporaryDirectory() as folder, evaluator.measuring(model.partial.model) as riding:
        in_order = InOrder(model, made.variant, calibration, correction, Path(folder), progress, seed)
        layers = correct_constants(in_order, riding)
    errors = [float(entry["heldout_error"]) for entry in layers.values() if "heldout_error" in entry]
    return riding.figures[0], sum(errors) / len(errors) if errors else None
