"""C3PO (arXiv:2504.07964): each question is answered once more on an optimised pathway, found by its neighbours.

A gate's compressed model can answer so. The average optimised pathway is the literal reading of C3PO for a stock
checkpoint. L late MoE layers, E experts (and any rows beyond them).
"""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from compressor.checkpoint.source import ModelSource, locate
from compressor.devices import as_float64
from compressor.errors import CompressionError
from compressor.evaluation.base_answers import Distributions
from compressor.evaluation.evaluate import Answerer
from compressor.evaluation.items import Item, is_greedy, likelihoods, positions, rows_of
from compressor.evaluation.tasks import EvaluationOptions, EvaluationTask
from compressor.model.opened import OpenModel, open_model
from compressor.model.router_logits import logits_of, weights_of
from compressor.model.tokenizer import load_tokenizer
from compressor.pathways.engine import PathwayModel, Plain
from compressor.pathways.optimisers import Neighbour, kernel_weights, optimised
from compressor.pathways.options import METHOD, OWN, Optimizer, PathwayOptions, Routing
from compressor.pathways.reference import (
    Embedder,
    ReferenceSet,
    build_reference,
    embedder,
    reference_digest,
    trusted_reference,
)
from compressor.progress import Progress
from compressor.records import plain_json

OTHER_ANSWERS = {"generate_until": "writes its answers", "loglikelihood_rolling": "rates whole texts"}
OWN_ANSWER = "own"  # items of known answers, each moved down the gradient of its own loss, need no neighbours
MOST = 64  # items that are averaged over
PROMPT = 64  # tokens of a prompt that is taken from text


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

    def answer(self, prompt: str, continuations: Sequence[str]) -> list[tuple[float, bool]]:
        """Log likelihood in nats of each continuation on the prompt's optimised pathway, and whether it is greedy.

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
        greedy = [is_greedy(logits[place : place + 1], row) for place, row in enumerate(rows)]
        return list(zip(likelihoods(logits, rows).tolist(), greedy, strict=True))

    def shift(self, item: Item, plain: Plain) -> Tensor:
        """What to add to the late router logits [L, E] of an item that has passed the plain model."""
        late, options, items = self.model.late, self.options, self.reference.items
        places, query, points = self.reference.neighbours(
            self.embed(item, plain.rows[0]), options.neighbours, options.radius, but=item.prompt
        )
        own = plain.pathway[-late:]
        if not places:
            return torch.zeros_like(own)
        runs = options.optimizer == "ngd" or (options.optimizer == "kernel" and options.share is None)
        near = [
            Neighbour(self.reference.pathways[at, -late:], self.run(items[at].alone) if runs else None) for at in places
        ]
        weights = kernel_weights(options.kernel, query, points, options.bandwidth)
        return optimised(self.model, own, near, weights, options)


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
        near = [Neighbour(own, plain)]  # which knows the answer
        change = optimised(loaded, own, near, torch.ones(1), options) if own_answer else answering.shift(item, plain)
        changes.append(change)
        late = zip(own, changes[-1], loaded.scores[-loaded.late :], strict=True)
        rescored = [weights_of(logits_of(weights, score) + added, score) for weights, added, score in late]
        scores.append(torch.stack(rescored) - own)
        progress.advance("")
    every = as_float64(torch.stack(changes))
    mean = every.mean(0)
    size = float(every.square().mean().sqrt())
    agreement = float(mean.square().mean().sqrt()) / size if size > 0 else 0.0
    return Average(mean, as_float64(torch.stack(scores)).mean(0), len(items), agreement)


def text_reference(model: OpenModel, text: Sequence[tuple[Tensor, Distributions]], progress: Progress) -> ReferenceSet:
    """A reference set of text, batches [B, L] and the base's distributions: a place of each sequence, its greedy token.

    Places where the text goes on like that come first. Raises `CompressionError` where nothing can be written as text.
    """
    tokenizer, draw = load_tokenizer(model.source.folder), random.Random(0)
    items = list[Item]()
    for sequence, greedy in ((s, g) for batch, base in text for s, g in zip(batch, base.tokens[..., 0], strict=True)):
        tokens, expected = sequence.tolist(), greedy.tolist()
        later = range(max(1, len(tokens) // 2), len(tokens))
        place = draw.choice([at for at in later if expected[at - 1] == tokens[at]] or later)
        before = tokens[max(0, place - PROMPT) : place]
        prompt, whole = (tokenizer.decode(part) for part in (before, [*before, expected[place - 1]]))
        answer = whole[len(prompt) :]
        if not prompt.strip() or not answer.strip() or not whole.startswith(prompt):
            continue
        with suppress(CompressionError):  # prompt and answer must have tokens of their own when they are read as text
            rows_of(item := Item(prompt, answer), tokenizer, model.vocabulary, positions(model.config))
            items.append(item)
    if not items:
        raise CompressionError("nothing that the base expects can be written as text; give --reference items")
    return build_reference(model, items, OWN, progress, lambda item, plain: True)[0]
