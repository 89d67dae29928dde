"""A distillation from a checkpoint, its base and text: new stored tensors layer by layer, a record, their place."""

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from compressor.distributed.ranks import here
from compressor.errors import CompressionError
from compressor.evaluation.base_answers import Distributions
from compressor.evaluation.evaluator import Evaluator, require_enough
from compressor.kept import keep_tensors, kept_tensors, told_of
from compressor.model.opened import OpenModel
from compressor.progress import Progress
from compressor.steps.distill.expert_outputs import refuse_too_few
from compressor.steps.distill.memory import InMemory
from compressor.steps.distill.step import Distill
from compressor.steps.distill.stored import stored_dtypes, stored_tensors
from compressor.steps.distill.streamed import Streamed, log_cost
from compressor.steps.distill.text import training_text
from compressor.steps.distill.trained import trained_layers
from compressor.steps.distill.training import Engine, folder_of, result, train

MADE = "made"  # the folder of new stored tensors, a file for each layer
FIGURES = "figures.safetensors"  # there once all of them are


@dataclass(frozen=True, slots=True)
class Distilled:
    """New stored tensors, kept in a folder, and what a plan says of them."""

    folder: Path
    result: dict[str, Any]

    def tensors(self) -> Iterator[dict[str, Tensor]]:
        """The tensors by stored name, one decoder layer after another."""
        for path in sorted(self.folder.glob("layer-*.safetensors")):
            yield kept_tensors(path)


def check_model(smaller: OpenModel, options: Distill) -> None:
    """Refuse tensors that cannot be trained as they are stored, and what a way of training cannot do."""
    if options.stream and not here().is_alone:
        raise CompressionError(f"distill: stream trains in one process, and {here().size} were started; start one")
    if options.contrastive:
        refuse_too_few(smaller)
    stored_dtypes(smaller, trained_layers(smaller, options))


def distilled(place: Path) -> Distilled | None:
    """What an earlier run has made in `place`, if it came so far."""
    figures = told_of(place / MADE / FIGURES)
    return None if figures is None else Distilled(place / MADE, figures)


def distill_tensors(
    smaller: OpenModel,
    base: OpenModel,
    options: Distill,
    batches: Sequence[Tensor],
    answers: Sequence[Distributions],
    evaluator: Evaluator,
    seed: int,
    place: Path,
    progress: Progress,
) -> Distilled:
    """Train `smaller` toward its `base`, whose `answers` on the batches [B, L] of text are known.

    Each process takes its share of every step's sequences. All that a killed run needs to go on is kept in `place`. No
    tensors come of a training that is not accepted. Raises `CompressionError` where `check_model` does, for fewer than
    eight held-out sequences, and for an architecture through which no gradients go layer by layer if they are to.
    """
    layers = trained_layers(smaller, options)
    stored = stored_dtypes(smaller, layers)
    if options.stream:
        log_cost(smaller, options.steps)
    require_enough(evaluator.sequences, "distill")
    text = training_text(batches, answers, options, base)
    engine: Engine
    if options.stream:
        engine = Streamed(smaller, layers, stored, options, seed, place / "now")
    else:
        engine = InMemory(smaller, layers, stored, options, seed)
    steps = place / "steps"
    try:
        state = train(engine, text, evaluator, options, seed, steps, progress)
        figures = result(state)
        if not here().is_first:
            return Distilled(place / MADE, figures)
        shutil.rmtree(place / MADE, ignore_errors=True)
        for number, layer in enumerate(layers if state.gained.accepted else ()):
            values = engine.values(folder_of(steps, state.best), layer.unit)
            made = stored_tensors(smaller, values, stored)
            keep_tensors(place / MADE / f"layer-{number:05d}.safetensors", made, {"unit": layer.unit})
    finally:
        engine.close()
    keep_tensors(place / MADE / FIGURES, {}, figures)
    for folder in (place / "now", steps):
        shutil.rmtree(folder, ignore_errors=True)
    return Distilled(place / MADE, figures)
