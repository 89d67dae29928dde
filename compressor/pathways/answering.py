"""C3PO at test time: each question is answered once more on an optimised pathway, found by its neighbours.

And a gate's compressed model that answers so: what can be refused before a weight is read, and who answers.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
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
from compressor.pathways.optimisers import Neighbour, needs_runs, optimised
from compressor.pathways.options import METHOD, OWN, PathwayOptions, Routing
from compressor.pathways.reference import Embedder, ReferenceSet, embedder, read_reference, reference_digest
from compressor.progress import Progress
from compressor.records import plain_json

OTHER_ANSWERS = {"generate_until": "writes its answers", "loglikelihood_rolling": "rates whole texts"}


@dataclass(frozen=True, slots=True)
class Answer:
    """What a model thinks of one continuation of a prompt."""

    likelihood: float  # in nats, of the whole continuation
    greedy: bool  # whether each of its tokens is the likeliest
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
    _most: int | None = field(init=False)

    def __post_init__(self) -> None:
        self._most = positions(self.model.opened.config)

    @property
    def cost(self) -> float:
        """Decoder layers times tokens that were computed, as a multiple of plain forwards of the questions."""
        return self.model.work / self.plain_work if self.plain_work else 1.0

    def answer(self, prompt: str, continuations: Sequence[str]) -> list[Answer]:
        """What the model thinks of each continuation on the optimised pathway of the prompt.

        An item so long that its rows are cut differently has no one prompt; its answers are those of the plain model.
        """
        item = Item(prompt, continuations[0], tuple(continuations))
        rows = rows_of(item, self.tokenizer, self.model.opened.vocabulary, self._most)
        plain = self.model.run(rows)
        self.plain_work += self.model.plain_work(plain)
        if len({row.start for row in rows}) > 1:
            self.left_plain += 1
            logits = plain.logits
        else:
            with torch.no_grad():
                logits = self.model.again(plain, self.shift(item, plain))
        found, before = (likelihoods(each, rows).tolist() for each in (logits, plain.logits))
        greedy = [is_greedy(logits[place : place + 1], row) for place, row in enumerate(rows)]
        return [Answer(*each) for each in zip(found, greedy, before, strict=True)]

    def shift(self, item: Item, plain: Plain) -> Tensor:
        """What to add to the late router logits [L, E] of an item that has passed the plain model."""
        late, options = self.model.late, self.options
        embedding = self.embed(item, plain.rows[0])
        places, query, points = self.reference.neighbours(
            embedding, options.neighbours, options.radius, but=item.prompt
        )
        runs, items = needs_runs(options), self.reference.items
        near = [
            Neighbour(self.reference.pathways[at, -late:], self.answered(items[at]) if runs else None) for at in places
        ]
        with torch.enable_grad():
            return optimised(self.model, plain.pathway[-late:], near, query, points, options)

    def answered(self, item: Item) -> Plain:
        """A plain forward of an item's prompt with its right answer alone."""
        alone = Item(item.prompt, item.answer)
        return self.model.run(rows_of(alone, self.tokenizer, self.model.opened.vocabulary, self._most))


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
    found = trusted_reference(Routing(reference, options, embedding))
    return load_answering(*opened_with(found, locate(model, revision, progress), dtype, device), found, options)


def trusted_reference(routing: Routing) -> ReferenceSet:
    """The reference set of a routing, refused if its prompts are embedded by another model than the routing names."""
    found = read_reference(Path(routing.reference))
    if found.facts.embedding != routing.embedding:
        raise CompressionError(
            f"the prompts of the reference set are embedded by {found.facts.embedding!r}, not {routing.embedding!r}; "
            f"pass {found.facts.embedding} as the embedding if you trust that model, or make the reference set again"
        )
    return found


def opened_with(reference: ReferenceSet, source: ModelSource, dtype: str, device: str) -> tuple[OpenModel, Any]:
    """The model, of which no weight but its routers is read, and its tokenizer; refused unless the set is of both."""
    opened = open_model(source, dtype, device)
    tokenizer = load_tokenizer(source.folder)
    reference.check(opened, tokenizer)
    return opened, tokenizer


def load_answering(opened: OpenModel, tokenizer: Any, reference: ReferenceSet, options: PathwayOptions) -> Answering:
    """Read the weights of a model that `reference` is of."""
    late = min(options.layers, len(opened.architecture.layers))
    loaded = PathwayModel(opened, late, options.tokens, reference.facts.scores)
    loaded.load()
    return Answering(loaded, tokenizer, reference, options, embedder(reference.facts.embedding, loaded))


def refuse_other_tasks(tasks: Sequence[EvaluationTask]) -> None:
    """Refuse tasks that give no answers to choose from after a prompt."""
    for task in tasks:
        for name, part in task.parts.items():
            if (what := OTHER_ANSWERS.get(str(getattr(part, "OUTPUT_TYPE", None)))) is not None:
                raise CompressionError(
                    f"task {name!r} {what}, so it has no prompt to optimise a pathway for; name tasks of multiple "
                    "choice, or leave --routing out"
                )


def routed_answerer(
    routing: Routing, reference: ReferenceSet, source: ModelSource, options: EvaluationOptions
) -> Answerer:
    """Who answers for a model that is routed by its reference set.

    Raises `CompressionError` for the set of another model or tokenizer.
    """
    opened_with(reference, source, options.dtype, options.device)  # the base answers first, and that may take hours
    facts = {
        "method": METHOD,
        "reference": reference_digest(Path(routing.reference)),
        "options": plain_json(routing.options),
    }

    @contextmanager
    def load(source: ModelSource, options: EvaluationOptions) -> Iterator[Any]:
        from compressor.evaluation.model import free
        from compressor.pathways.lm_eval_model import RoutedModel

        opened, tokenizer = opened_with(reference, source, options.dtype, options.device)
        try:
            yield RoutedModel(load_answering(opened, tokenizer, reference, routing.options))
        finally:
            opened.partial.release("")
            free(opened.partial.device)

    return Answerer(facts, load)
