"""Making a reference set: ask a model items, and keep those that it answers right."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from compressor.errors import CompressionError
from compressor.evaluation.answers import is_greedy, likelihoods, positions
from compressor.evaluation.items import Item, rows_of
from compressor.model.opened import OpenModel
from compressor.model.tokenizer import load_tokenizer
from compressor.pathways.embedding import embedder
from compressor.pathways.engine import PathwayModel, Plain
from compressor.pathways.reference import ReferenceFacts, ReferenceSet, tokenizer_digest
from compressor.progress import Progress

Keep = Callable[[Item, Plain], bool]


@dataclass(frozen=True, slots=True)
class Asked:
    """How many items of a task a model was asked, and how many it answered right."""

    task: str
    items: int
    right: int


def build_reference(
    opened: OpenModel, items: Sequence[Item], embedding: str, progress: Progress, keep: Keep | None = None
) -> tuple[ReferenceSet, tuple[Asked, ...]]:
    """The items that the model answers right, and a count for each task.

    Of choices the likeliest must be the answer, without choices the greedy continuation; `keep` may say otherwise.
    Raises `CompressionError` where no item is kept.
    """
    tokenizer, most = load_tokenizer(opened.source.folder), positions(opened.config)
    rows = [rows_of(item, tokenizer, opened.vocabulary, most) for item in items]
    model = PathwayModel(opened, late=1)
    progress.start(f"Loading {opened.source.label}", 1)
    model.load()
    embed = embedder(embedding, model)
    progress.advance("")
    progress.start("Asking", len(items))
    kept = list[tuple[Item, Tensor, Tensor]]()
    marks = list[bool]()
    for item, own in zip(items, rows, strict=True):
        plain = model.run(own)
        marks.append((keep or answers_right)(item, plain))
        if marks[-1]:
            kept.append((item, embed(item, own[0]), plain.pathway))
        progress.advance(item.task)
    if not kept:
        raise CompressionError(
            f"{opened.source.label} answers none of {len(items)} items right, so there is nothing to learn from; give "
            "it easier items, or more of them"
        )
    right, embeddings, pathways = zip(*kept, strict=True)
    layers = opened.architecture.layers
    facts = ReferenceFacts(
        opened.source.label,
        opened.fingerprint,
        tokenizer_digest(tokenizer),
        opened.architecture.experts,
        tuple(layer.name for layer in layers),
        model.scores,
        embedding,
        len(items),
    )
    made = ReferenceSet(facts, right, torch.stack(embeddings), torch.stack(pathways))
    return made, _counted(items, marks)


def answers_right(item: Item, plain: Plain) -> bool:
    """Whether the model, run on an item's rows, finds the answer likeliest; without choices, goes on with it."""
    if not item.choices:
        return is_greedy(plain.logits, plain.rows[0])
    return int(likelihoods(plain.logits, plain.rows).argmax()) == item.right


def _counted(items: Sequence[Item], marks: Sequence[bool]) -> tuple[Asked, ...]:
    names = dict.fromkeys(item.task for item in items)
    by_task = {name: [mark for item, mark in zip(items, marks, strict=True) if item.task == name] for name in names}
    return tuple(Asked(name, len(found), sum(found)) for name, found in by_task.items())
