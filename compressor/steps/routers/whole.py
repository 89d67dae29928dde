"""Carry out `routers` on the checkpoint that earlier steps have made."""

from compressor.distributed.ranks import here, refuse_several
from compressor.errors import CompressionError
from compressor.model.opened import OpenModel
from compressor.model.tokenizer import load_tokenizer
from compressor.pathways.answering import trusted_reference
from compressor.pathways.options import Routing
from compressor.pathways.reference import ReferenceSet
from compressor.recipe.step import Result
from compressor.steps.routers.calibrating import calibrate_tensors, keep, kept, stored_routers
from compressor.steps.routers.step import Routers
from compressor.steps.state import State


def refuse_model(asked: Routers, model: OpenModel) -> None:
    """Refuse routers whose logits cannot be moved as they are stored, and what one process does."""
    if asked.method != "router":
        refuse_several(f"routers: method {asked.method}", "choose the method router, or start one process")
    if asked.reference is not None and asked.method == "router":
        raise CompressionError("routers: reference is for the methods bias and auto; name one of them, or leave it out")
    stored_routers(model)


def calibrate_routers(asked: Routers, state: State) -> Result:
    """Move the routers as far as held-out text is nearer to the base; the new ones are kept until they are in place."""
    place = state.kept("routers.safetensors")
    assert place is not None and state.text is not None
    made = kept(place) if here().is_first else None
    if not here().broadcast(lambda: made is not None):
        stored_routers(state.model)
        found = _reference(asked, state.model)
        batches, answers, evaluator = state.base_answers()
        made = calibrate_tensors(state.model, asked, batches, answers, evaluator, state.progress, found)
        if here().is_first:
            keep(place, made)
    figures = dict(here().broadcast(lambda: made and dict(made.result)))
    return Result(figures, iter([made.tensors] if made is not None else ()))


def _reference(asked: Routers, model: OpenModel) -> ReferenceSet | None:
    """The reference set whose pathways are averaged, if one is named."""
    if asked.reference is None:
        return None
    found = trusted_reference(Routing(asked.reference))
    found.check(model, load_tokenizer(model.source.folder))
    return found
