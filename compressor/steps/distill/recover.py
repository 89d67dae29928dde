"""A recovery from a checkpoint, its original and some text: new stored tensors, layer by layer, and a record."""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from compressor.data.batches import Calibration
from compressor.errors import CompressionError
from compressor.evaluation.teacher import check_teacher
from compressor.model.opened import OpenModel
from compressor.progress import Progress, Silent
from compressor.steps.distill.engine import Engine
from compressor.steps.distill.expert_outputs import refuse_too_few
from compressor.steps.distill.memory import InMemory
from compressor.steps.distill.options import Recovery
from compressor.steps.distill.ranks import ALONE, Ranks
from compressor.steps.distill.running import folder_of, result, train
from compressor.steps.distill.stored import stored_dtypes, stored_tensors
from compressor.steps.distill.streamed import Streamed, tell_cost
from compressor.steps.distill.text import read_original
from compressor.steps.distill.trained import trained_layers
from compressor.surgery.kept import keep_tensors, kept_tensors, told_of

MADE = "made"  # the folder of new stored tensors, a file for each layer
ASKED = "asked"  # the folder of what the original says of the text
TOLD = "told.safetensors"  # there once all of them are


@dataclass(frozen=True, slots=True)
class Recovered:
    """New stored tensors, kept in a folder, and what a plan says of them."""

    folder: Path
    result: dict[str, Any]

    def tensors(self) -> Iterator[dict[str, Tensor]]:
        """The tensors by stored name, one decoder layer after another."""
        for path in sorted(self.folder.glob("layer-*.safetensors")):
            yield kept_tensors(path)


def check_recovery(smaller: OpenModel, original: OpenModel, options: Recovery, ranks: Ranks = ALONE) -> None:
    """Refuse an original that cannot teach the smaller model, and tensors that cannot be trained as they are stored."""
    check_teacher(smaller, original)
    if options.stream and ranks.count > 1:
        raise CompressionError(f"--stream trains in one process, and {ranks.count} were started; start one alone")
    if options.contrastive:
        refuse_too_few(smaller)
    stored_dtypes(smaller, trained_layers(smaller, options))


def recovered(place: Path) -> Recovered | None:
    """What an earlier run has made in `place`, if it came so far."""
    told = told_of(place / MADE / TOLD)
    return None if told is None else Recovered(place / MADE, told)


def recover_tensors(
    smaller: OpenModel,
    original: OpenModel,
    options: Recovery,
    text: Calibration,
    seed: int,
    place: Path,
    progress: Progress,
    ranks: Ranks = ALONE,
) -> Recovered:
    """Train `smaller` toward `original` on the text; all that a killed run needs to go on is kept in `place`.

    No tensors come of a training that does not bring held-out text nearer to the original, by more than its standard
    error. Raises `CompressionError` where `check_recovery` does, and for an architecture through which no gradients go
    layer by layer if they are to.
    """
    layers = trained_layers(smaller, options)
    stored = stored_dtypes(smaller, layers)
    if options.stream:
        tell_cost(smaller, options.steps)
    alone = ranks.count == 1  # with others, who ask at the same time, none would wait for them
    asked = read_original(text, original, options, progress, place / ASKED if alone else None)
    engine: Engine
    if options.stream:
        engine = Streamed(smaller, layers, stored, options, seed, place / "now")
    else:
        engine = InMemory(smaller, layers, stored, options, seed, ranks)
    steps = place / "steps"
    try:
        ranks.call(str(place))
        state = train(engine, asked, options, seed, steps, progress)
        shutil.rmtree(place / MADE, ignore_errors=True)
        for number, layer in enumerate(layers if state.better else ()):
            values = engine.values(folder_of(steps, state.best), layer.unit)
            made = stored_tensors(smaller, values, stored)
            keep_tensors(place / MADE / f"layer-{number:05d}.safetensors", made, {"unit": layer.unit})
    finally:
        engine.close()
    told = result(state, state.better)
    keep_tensors(place / MADE / TOLD, {}, told)
    for folder in (place / "now", place / ASKED, steps):
        shutil.rmtree(folder, ignore_errors=True)
    return Recovered(place / MADE, told)


def help_recover(
    smaller: OpenModel, original: OpenModel, options: Recovery, text: Calibration, seed: int, ranks: Ranks
) -> dict[str, Any] | None:
    """Train along with the first process, which keeps and writes; the result, or None if there was nothing to do."""
    asked = read_original(text, original, options, Silent())
    if (place := ranks.told(None)) is None:
        return None
    layers = trained_layers(smaller, options)
    engine = InMemory(smaller, layers, stored_dtypes(smaller, layers), options, seed, ranks)
    try:
        state = train(engine, asked, options, seed, Path(place) / "steps", Silent())
    finally:
        engine.close()
    return result(state, state.better)
