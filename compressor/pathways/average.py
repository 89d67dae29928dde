"""The average optimised pathway of a model's items: what C3PO adds to the router logits, whatever the item.

The literal reading of C3PO (arXiv:2504.07964) for a stock checkpoint. L late MoE layers, E experts (and any rows beyond
them).
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from compressor.errors import CompressionError
from compressor.evaluation.base_answers import Distributions
from compressor.evaluation.items import Item, positions, rows_of
from compressor.model.opened import OpenModel
from compressor.model.router_logits import logits_of, weights_of
from compressor.model.tokenizer import load_tokenizer
from compressor.pathways.answering import load_answering
from compressor.pathways.optimisers import oracle
from compressor.pathways.options import OWN, Optimizer, PathwayOptions, Routing
from compressor.pathways.reference import ReferenceSet, build_reference, trusted_reference
from compressor.progress import Progress

OWN_ANSWER = "own"  # items of known answers, each moved down the gradient of its own loss, need no neighbours
MOST = 64  # items that are averaged over
PROMPT = 64  # tokens of a prompt that is taken from text


@dataclass(frozen=True, slots=True)
class Average:
    """What optimising adds to the router logits of the late layers and to their scores, over all items (both [L, E]).

    `agreement` is the root mean square of the mean change of a logit over that of the changes of single items.
    """

    logits: Tensor
    scores: Tensor
    items: int
    agreement: float


def checked_reference(folder: str | Path, model: OpenModel) -> ReferenceSet:
    """Read the reference set of a model; raises `CompressionError` for that of another one."""
    reference = trusted_reference(Routing(folder))
    reference.check(model, load_tokenizer(model.source.folder))
    return reference


def average_pathway(model: OpenModel, reference: ReferenceSet, optimizer: str, progress: Progress) -> Average:
    """Optimise the pathway of up to 64 items of the set: by neighbours, never itself, or `own`: by its known answer.

    Raises `CompressionError` for an architecture whose late layers cannot be run again by themselves.
    """
    own_answer = optimizer == OWN_ANSWER
    options = PathwayOptions() if own_answer else PathwayOptions(cast(Optimizer, optimizer))
    answering = load_answering(model, reference, options)
    loaded, items = answering.model, reference.items
    items = items if len(items) <= MOST else tuple(random.Random(0).sample(items, MOST))
    progress.start("optimise pathways", len(items))
    changes, scores = list[Tensor](), list[Tensor]()
    for item in items:
        plain = answering.run(item.alone)
        own = plain.pathway[-loaded.late :]
        change = oracle(loaded, plain, 0, own, options) if own_answer else answering.shift(item, plain)
        changes.append(change.detach())
        late = zip(own, changes[-1], loaded.scores[-loaded.late :], strict=True)
        rescored = [weights_of(logits_of(weights, score) + added, score) for weights, added, score in late]
        scores.append(torch.stack(rescored) - own)
        progress.advance("")
    every = torch.stack(changes).double()
    mean = every.mean(0)
    size = float(every.square().mean().sqrt())
    agreement = float(mean.square().mean().sqrt()) / size if size > 0 else 0.0
    return Average(mean, torch.stack(scores).double().mean(0), len(items), agreement)


def text_reference(model: OpenModel, text: Sequence[tuple[Tensor, Distributions]], progress: Progress) -> ReferenceSet:
    """A reference set of text, batches [B, L] and the base's distributions: a place of each sequence, its greedy token.

    Places where the text goes on like that come first. Raises `CompressionError` where nothing can be written as text.
    """
    tokenizer, draw = load_tokenizer(model.source.folder), random.Random(0)
    drawn = [
        _text_item(sequence.tolist(), greedy.tolist(), tokenizer, draw, model)
        for batch, base in text
        for sequence, greedy in zip(batch, base.tokens[..., 0], strict=True)
    ]
    items = [item for item in drawn if item is not None]
    if not items:
        raise CompressionError("nothing that the base expects can be written as text; give --reference items")
    return build_reference(model, items, OWN, progress, lambda item, plain: True)[0]


def _text_item(
    tokens: list[int], greedy: list[int], tokenizer: Any, draw: random.Random, model: OpenModel
) -> Item | None:
    """What is expected at a place drawn from a sequence's later half; None where it cannot be written as text."""
    later = range(max(1, len(tokens) // 2), len(tokens))
    place = draw.choice([at for at in later if greedy[at - 1] == tokens[at]] or later)
    before = tokens[max(0, place - PROMPT) : place]
    prompt, whole = (tokenizer.decode(part) for part in (before, [*before, greedy[place - 1]]))
    answer = whole[len(prompt) :]
    if not prompt.strip() or not answer.strip() or not whole.startswith(prompt):
        return None
    item = Item(prompt, answer)
    try:  # prompt and answer must still have tokens of their own when they are read as text
        rows_of(item, tokenizer, model.vocabulary, positions(model.config))
    except CompressionError:
        return None
    return item
