"""Carry out `distill` on the checkpoint that earlier steps have made: new stored tensors layer by layer, a record."""

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
from compressor.recipe.step import Result, Step
from compressor.steps.distill.contrastive import refuse_too_few
from compressor.steps.distill.engines import InMemory, Streamed
from compressor.steps.distill.objective import training_text
from compressor.steps.distill.step import Distill
from compressor.steps.distill.trained import stored_dtypes, stored_tensors, trained_layers
from compressor.steps.distill.training import Training, folder_of, result
from compressor.steps.state import State

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
    require_enough(evaluator.sequences, "distill")
    text = training_text(batches, answers, options, base)
    now, steps = place / "now", place / "steps"
    engine = Streamed(smaller, options, seed, now) if options.stream else InMemory(smaller, options, seed)
    try:
        state = Training(engine, text, evaluator, options, seed, steps, progress).run()
        figures = result(state)
        if not here().is_first:
            return Distilled(place / MADE, figures)
        shutil.rmtree(place / MADE, ignore_errors=True)
        for number, unit in enumerate(engine.layers if state.gained.accepted else ()):
            values = engine.values(folder_of(steps, state.best), unit)
            made = stored_tensors(smaller, values, engine.stored)
            keep_tensors(place / MADE / f"layer-{number:05d}.safetensors", made, {"unit": unit})
    finally:
        engine.close()
    keep_tensors(place / MADE / FIGURES, {}, figures)
    for folder in (now, steps):
        shutil.rmtree(folder, ignore_errors=True)
    return Distilled(place / MADE, figures)


def refuse_model(asked: Distill, model: OpenModel, steps: Sequence[Step]) -> None:
    """Refuse what the model is not fit for, as far as its own storage tells."""
    layers = trained_layers(model, asked)
    if not model.layout.quantized or not steps:  # merging and correcting dequantise first
        stored_dtypes(model, layers)


def distill(asked: Distill, state: State) -> Result:
    """Train, and give the tensors of the best state if held-out text is nearer to the base."""
    place = state.kept("distill")
    assert place is not None
    if (figures := told_of(place / MADE / FIGURES)) is not None:  # of an earlier run
        made = Distilled(place / MADE, figures)
    else:
        check_model(state.model, asked)
        batches, answers, evaluator = state.base_answers()
        made = distill_tensors(
            state.model, state.base, asked, batches, answers, evaluator, state.seed, place, state.progress
        )
    return Result(made.result, made.tensors())
