"""Carry out `distill` on the checkpoint that earlier steps have made."""

from collections.abc import Sequence

from compressor.model.opened import OpenModel
from compressor.recipe.step import Result, Step
from compressor.steps.distill.distilling import check_model, distill_tensors, distilled
from compressor.steps.distill.step import Distill
from compressor.steps.distill.stored import stored_dtypes
from compressor.steps.distill.trained import trained_layers
from compressor.steps.state import State


def refuse_model(asked: Distill, model: OpenModel, steps: Sequence[Step]) -> None:
    """Refuse what the model is not fit for, as far as its own storage tells."""
    layers = trained_layers(model, asked)
    if not model.layout.quantized or not steps:  # merging and correcting dequantise first
        stored_dtypes(model, layers)


def distill(asked: Distill, state: State) -> Result:
    """Train, and give the tensors of the best state if held-out text is nearer to the base."""
    place = state.kept("distill")
    assert place is not None
    if (made := distilled(place)) is None:
        check_model(state.model, asked)
        batches, answers, evaluator = state.base_answers()
        made = distill_tensors(
            state.model, state.base, asked, batches, answers, evaluator, state.seed, place, state.progress
        )
    return Result(made.result, made.tensors())
