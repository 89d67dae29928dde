"""C3PO at test time: each question is answered once more on an optimised pathway, found by its neighbours.

And a gate's compressed model that answers so: what can be refused before a weight is read, and who answers.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compressor.checkpoint.source import ModelSource, locate
from compressor.errors import CompressionError
from compressor.evaluation.evaluate import Answerer
from compressor.evaluation.items import Item, is_greedy, likelihoods, positions, rows_of
from compressor.evaluation.tasks import EvaluationOptions, EvaluationTask
from compressor.model.opened import OpenModel, open_model
from compressor.model.tokenizer import load_tokenizer
from compressor.pathways.engine import PathwayModel, Plain
from compressor.pathways.optimisers import Neighbour, optimised
from compressor.pathways.options import METHOD, OWN, PathwayOptions, Routing
from compressor.pathways.reference import Embedder, ReferenceSet, embedder, reference_digest, trusted_reference
from compressor.progress import Progress
from compressor.records import plain_json

OTHER_ANSWERS = {"generate_until": "writes its answers", "loglikelihood_rolling": "rates whole texts"}


@dataclass(frozen=True, slots=True)
class Answer:
    """What a model thinks of one continuation of a prompt."""

    likelihood: float  # in nats, of the whole continuation
    greedy: bool  # whether each of its tokens is the argmax
    plain: float  # the likelihood on the model's own pathway


@dataclass(slots=True)
class Answering:
    """A loaded model with a reference set of its own.

    `plain_work` is what plain forwards alone would have cost, `left_plain` counts items that had no other.
    """

    model: PathwayModel
    tokenizer: Any
    reference: ReferenceSet
    options: PathwayOptions
    embed: Embedder
    plain_work: int = 0
    left_plain: int = 0

    @property
    def cost(self) -> float:
        """Decoder layers times tokens that were computed, as a multiple of plain forwards of the questions."""
        return self.model.work / self.plain_work if self.plain_work else 1.0

    def run(self, item: Item) -> Plain:
        """Run a plain forward of an item's prompt with each of its continuations."""
        opened = self.model.opened
        return self.model.run(rows_of(item, self.tokenizer, opened.vocabulary, positions(opened.config)))

    def answer(self, prompt: str, continuations: Sequence[str]) -> list[Answer]:
        """What the model thinks of each continuation on the optimised pathway of the prompt.

        An item so long that its rows are cut differently has no one prompt; its answers are those of the plain model.
        """
        item = Item(prompt, continuations[0], tuple(continuations))
        plain = self.run(item)
        rows, logits = plain.rows, plain.logits
        self.plain_work += plain.work
        if len({row.start for row in rows}) > 1:
            self.left_plain += 1
        else:
            with torch.no_grad():
                logits = self.model.again(plain, self.shift(item, plain))
        optimal, before = (likelihoods(each, rows).tolist() for each in (logits, plain.logits))
        greedy = [is_greedy(logits[place : place + 1], row) for place, row in enumerate(rows)]
        return [Answer(*each) for each in zip(optimal, greedy, before, strict=True)]

    def shift(self, item: Item, plain: Plain) -> Tensor:
        """What to add to the late router logits [L, E] of an item that has passed the plain model."""
        late, options, items = self.model.late, self.options, self.reference.items
        places, query, points = self.reference.neighbours(
            self.embed(item, plain.rows[0]), options.neighbours, options.radius, but=item.prompt
        )
        runs = options.optimizer == "ngd" or (options.optimizer == "kernel" and options.share is None)
        near = [
            Neighbour(self.reference.pathways[at, -late:], self.run(items[at].alone) if runs else None) for at in places
        ]
        with torch.enable_grad():
            return optimised(self.model, plain.pathway[-late:], near, query, points, options)


def open_answering(
    model: str,
    reference: str | Path,
    options: PathwayOptions,
    *,
    embedding: str = OWN,
    device: str = "auto",
    dtype: str = "auto",
    revision: str | None = None,
    progress: Progress | None = None,
) -> Answering:
    """Load a model and its reference set.

    Raises `CompressionError` for the set of another model or tokenizer, and for one whose prompts are embedded by
    another model than `embedding`: a file shall not choose what is downloaded.
    """
    trusted = trusted_reference(Routing(reference, options, embedding))
    return load_answering(open_model(locate(model, revision, progress), dtype, device), trusted, options)


def load_answering(opened: OpenModel, reference: ReferenceSet, options: PathwayOptions) -> Answering:
    """Read the weights of a model; refused unless `reference` is of it and its tokenizer."""
    tokenizer = load_tokenizer(opened.source.folder)
    reference.check(opened, tokenizer)
    late = min(options.layers, len(opened.architecture.layers))
    model = PathwayModel(opened, late, options.tokens, reference.facts.scores)
    model.load()
    return Answering(model, tokenizer, reference, options, embedder(reference.facts.embedding, model))


def refuse_other_tasks(tasks: Sequence[EvaluationTask]) -> None:
    """Refuse tasks that give no answers to choose from after a prompt."""
    for name, part in (entry for task in tasks for entry in task.parts.items()):
        if (what := OTHER_ANSWERS.get(str(getattr(part, "OUTPUT_TYPE", None)))) is not None:
            raise CompressionError(
                f"task {name!r} {what}, so it has no prompt to optimise a pathway for; name tasks of multiple choice, "
                "or leave --routing out"
            )


def routed_answerer(
    routing: Routing, reference: ReferenceSet, source: ModelSource, options: EvaluationOptions
) -> Answerer:
    """Who answers for a model that is routed by its reference set.

    Raises `CompressionError` for the set of another model or tokenizer.
    """
    # the base answers first, and that may take hours
    reference.check(open_model(source, options.dtype, options.device), load_tokenizer(source.folder))
    facts = {
        "method": METHOD,
        "reference": reference_digest(Path(routing.reference)),
        "options": plain_json(routing.options),
    }

    @contextmanager
    def load(source: ModelSource, options: EvaluationOptions) -> Iterator[Any]:
        from compressor.evaluation.model import free
        from compressor.pathways.lm_eval_model import RoutedModel

        opened = open_model(source, options.dtype, options.device)
        try:
            yield RoutedModel(load_answering(opened, reference, routing.options))
        finally:
            opened.partial.release("")
            free(opened.partial.device)

    return Answerer(facts, load)
