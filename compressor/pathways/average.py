"""The average optimised pathway: what C3PO does to the items of a reference set, in the mean over them.

L late MoE layers, E experts.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from compressor.errors import CompressionError
from compressor.model.opened import OpenModel
from compressor.model.tokenizer import load_tokenizer
from compressor.pathways.answering import Answering
from compressor.pathways.building import build_reference, positions
from compressor.pathways.embedding import OWN, embedder
from compressor.pathways.engine import PathwayModel
from compressor.pathways.items import Item, rows_of
from compressor.pathways.optimisers import PathwayOptions
from compressor.pathways.reference import ReferenceSet
from compressor.pathways.scores import logits_of, weights_of
from compressor.progress import Progress

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


def average_pathway(model: OpenModel, found: ReferenceSet, options: PathwayOptions, progress: Progress) -> Average:
    """Optimise the pathway of up to 64 items of the set, each by its neighbours but not by itself.

    Raises `CompressionError` for an architecture whose late layers cannot be run again by themselves.
    """
    loaded = PathwayModel(
        model, min(options.layers, len(model.architecture.layers)), options.tokens, found.facts.scores
    )
    loaded.load()
    embed = embedder(found.facts.embedding, loaded)
    answering = Answering(loaded, load_tokenizer(model.source.folder), found, options, embed)
    items = found.items if len(found.items) <= MOST else random.Random(0).sample(found.items, MOST)
    progress.start("optimise pathways", len(items))
    changes, scores = list[Tensor](), list[Tensor]()
    for item in items:
        alone = Item(item.prompt, item.answer)
        rows = rows_of(alone, answering.tokenizer, model.vocabulary, positions(model.config))
        plain = loaded.run(rows)
        own = plain.pathway[-loaded.late :]
        change = answering.shift(item, plain)
        changes.append(change)
        scores.append(_rescored(loaded, own, change) - own)
        progress.advance("")
    every = torch.stack(changes).double()
    mean = every.mean(0)
    size = float(every.square().mean().sqrt())
    agreement = float(mean.square().mean().sqrt()) / size if size > 0 else 0.0
    return Average(mean, torch.stack(scores).double().mean(0), len(items), agreement)


def _rescored(model: PathwayModel, own: Tensor, change: Tensor) -> Tensor:
    layers = zip(own, change, model.late_scores, strict=True)
    return torch.stack([weights_of(logits_of(weights, score) + added, score) for weights, added, score in layers])


def text_reference(model: OpenModel, batches: Sequence[Tensor], progress: Progress) -> ReferenceSet:
    """A reference set of text (token ids [B, L]): places whose next token the model finds likeliest, one a sequence.

    Raises `CompressionError` where there is none.
    """
    tokenizer, draw = load_tokenizer(model.source.folder), random.Random(0)
    found = [_text_item(sequence.tolist(), tokenizer, draw) for batch in batches for sequence in batch]
    items = [item for item in found if item is not None]
    if not items:
        raise CompressionError("the text has no place where a next token can be asked for; give longer text")
    return build_reference(model, items, OWN, progress)[0]


def _text_item(tokens: list[int], tokenizer: Any, draw: random.Random) -> Item | None:
    """What follows a place that is drawn from the later half of a sequence; None where that is no text."""
    place = draw.randrange(max(1, len(tokens) // 2), len(tokens))
    before = tokens[max(0, place - PROMPT) : place]
    prompt, whole = (tokenizer.decode(part) for part in (before, [*before, tokens[place]]))
    answer = whole[len(prompt) :]
    if not prompt.strip() or not answer.strip() or not whole.startswith(prompt):
        return None
    return Item(prompt, answer)
