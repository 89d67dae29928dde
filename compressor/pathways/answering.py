"""C3PO (arXiv:2504.07964): each question is answered once more on an optimised pathway, found by its neighbours.

The average optimised pathway is the literal reading of C3PO for a stock checkpoint. L late MoE layers, E experts (and
any rows beyond them).
"""

import random
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from compressor.answers.items import Item, is_greedy, likelihoods, positions, rows_of
from compressor.checkpoint.source import locate
from compressor.devices import as_float64
from compressor.divergence.teacher_outputs import Distributions
from compressor.errors import CompressionError
from compressor.model.opened import OpenModel, open_model
from compressor.model.router_logits import logits_of, weights_of
from compressor.model.tokenizer import load_tokenizer
from compressor.pathways.engine import PathwayModel, PlainForward
from compressor.pathways.optimisers import Neighbour, kernel_weights, optimised
from compressor.pathways.options import OWN, Optimizer, PathwayOptions
from compressor.pathways.reference import Embedder, ReferenceSet, build_reference, embedder, read_reference
from compressor.progress import Progress

OWN_ANSWER = "own"  # items of known answers, each moved down the gradient of its own loss, need no neighbours
MOST = 64  # items that are averaged over
PROMPT = 64  # tokens of a prompt that is taken from text


@dataclass(slots=True)
class PathwayAnswerer:
    """A loaded model that answers by its reference set; `plain_work` is the cost of plain forwards alone."""

    model: PathwayModel
    tokenizer: Any
    reference: ReferenceSet
    options: PathwayOptions
    embed: Embedder
    plain_work: int = 0

    @property
    def cost(self) -> float:
        """Computed decoder layers times tokens, as a multiple of plain forwards of the questions."""
        return self.model.work / self.plain_work if self.plain_work else 1.0

    def run(self, item: Item) -> PlainForward:
        """Run a plain forward of an item's prompt with each of its continuations."""
        opened = self.model.opened
        return self.model.run(rows_of(item, self.tokenizer, opened.vocabulary, positions(opened.config)))

    def answer(self, prompt: str, continuations: Sequence[str]) -> list[tuple[float, bool]]:
        """Return the log likelihood in nats of each continuation on the optimised pathway, and True if it is greedy.

        An item so long that its rows are cut differently has no one prompt; its answers are those of the plain model.
        """
        item = Item(prompt, continuations[0], tuple(continuations))
        plain = self.run(item)
        self.plain_work += plain.work
        logits = plain.logits
        if len({row.start for row in plain.rows}) == 1:
            with torch.no_grad():
                logits = self.model.again(plain, self.shift(item, plain))
        greedy = [is_greedy(logits[index : index + 1], row) for index, row in enumerate(plain.rows)]
        return list(zip(likelihoods(logits, plain.rows).tolist(), greedy, strict=True))

    def shift(self, item: Item, plain: PlainForward) -> Tensor:
        """Return the shift of the late router logits [L, E] of an item that has passed the plain model."""
        late = self.model.late
        options = self.options
        reference = self.reference
        embedding = self.embed(item, plain.rows[0])
        nearest, query, points = reference.neighbours(embedding, options.neighbours, options.radius, but=item.prompt)
        pathway = plain.pathway[-late:]
        if not nearest:
            return torch.zeros_like(pathway)
        has_line_search = options.optimizer == "kernel" and options.share is None
        needs_loss = options.optimizer == "ngd" or has_line_search
        neighbours = [
            Neighbour(reference.pathways[index, -late:], self.run(reference.items[index].alone) if needs_loss else None)
            for index in nearest
        ]
        weights = kernel_weights(options.kernel, query, points, options.bandwidth)
        return optimised(self.model, pathway, neighbours, weights, options)


def open_answering(
    model: str,
    reference: str | Path,
    options: PathwayOptions,
    *,
    embedding: str = OWN,
    device: str = "auto",
    dtype: str = "auto",
    revision: str | None = None,
) -> PathwayAnswerer:
    """Load a model and its reference set.

    Raises `CompressionError` for the set of another model or tokenizer, and for one whose prompts are embedded by
    another model than `embedding`.
    """
    reference_set = read_reference(Path(reference), embedding)
    return load_answering(open_model(locate(model, revision), dtype, device), reference_set, options)


def load_answering(opened: OpenModel, reference: ReferenceSet, options: PathwayOptions) -> PathwayAnswerer:
    """Read the weights of a model; refused unless `reference` is of it and its tokenizer."""
    tokenizer = load_tokenizer(opened.source.folder)
    reference.check(opened, tokenizer)
    late = min(options.layers, len(opened.architecture.layers))
    model = PathwayModel(opened, late, options.tokens, reference.facts.scores)
    model.load()
    return PathwayAnswerer(model, tokenizer, reference, options, embedder(reference.facts.embedding, model))


@dataclass(frozen=True, slots=True)
class Average:
    """Mean change of the late layers' router logits and of their scores by optimising, over all items (both [L, E]).

    `agreement` is the root mean square of the mean change of a logit over that of the changes of single items.
    """

    logits: Tensor
    scores: Tensor
    items: int
    agreement: float


def checked_reference(folder: str | Path, model: OpenModel) -> ReferenceSet:
    """Read the reference set of a model; raises `CompressionError` for that of another one."""
    reference = read_reference(Path(folder))
    reference.check(model, load_tokenizer(model.source.folder))
    return reference


def average_pathway(model: OpenModel, reference: ReferenceSet, optimizer: str, progress: Progress) -> Average:
    """Optimise the pathway of up to 64 items of the set: by neighbours, never itself, or `own`: by its known answer.

    Raises `CompressionError` for an architecture whose late layers cannot be run again by themselves.
    """
    own_answer = optimizer == OWN_ANSWER
    options = PathwayOptions() if own_answer else PathwayOptions(cast(Optimizer, optimizer))
    answering = load_answering(model, reference, options)
    engine = answering.model
    items = reference.items
    if len(items) > MOST:
        items = tuple(random.Random(0).sample(items, MOST))
    progress.start("optimise pathways", len(items))
    logit_changes = list[Tensor]()
    score_changes = list[Tensor]()
    for item in items:
        plain = answering.run(item.alone)
        pathway = plain.pathway[-engine.late :]
        if own_answer:
            itself = Neighbour(pathway, plain)
            shift = optimised(engine, pathway, [itself], torch.ones(1), options)
        else:
            shift = answering.shift(item, plain)
        logit_changes.append(shift)
        late = zip(pathway, shift, engine.scores[-engine.late :], strict=True)
        rescored = [weights_of(logits_of(weights, score) + added, score) for weights, added, score in late]
        score_changes.append(torch.stack(rescored) - pathway)
        progress.advance("")
    changes = as_float64(torch.stack(logit_changes))
    mean = changes.mean(0)
    size = float(changes.square().mean().sqrt())
    agreement = float(mean.square().mean().sqrt()) / size if size > 0 else 0.0
    return Average(mean, as_float64(torch.stack(score_changes)).mean(0), len(items), agreement)


def text_reference(model: OpenModel, text: Sequence[tuple[Tensor, Distributions]], progress: Progress) -> ReferenceSet:
    """Return a reference set with one position of each sequence of a text, and the base's distribution there.

    The answer there is the base's greedy token; positions where the text goes on with it are preferred. Raises
    `CompressionError` where nothing can be written as text.
    """
    tokenizer = load_tokenizer(model.source.folder)
    draw = random.Random(0)
    items = list[Item]()
    for batch, base in text:
        for sequence, greedy in zip(batch.tolist(), base.tokens[..., 0].tolist(), strict=True):
            later = range(max(1, len(sequence) // 2), len(sequence))
            position = draw.choice([at for at in later if greedy[at - 1] == sequence[at]] or later)
            before = sequence[max(0, position - PROMPT) : position]
            prompt = tokenizer.decode(before)
            whole = tokenizer.decode([*before, greedy[position - 1]])
            answer = whole[len(prompt) :]
            if not prompt.strip() or not answer.strip() or not whole.startswith(prompt):
                continue
            with suppress(CompressionError):  # read as text, prompt and answer must have tokens of their own
                item = Item(prompt, answer)
                rows_of(item, tokenizer, model.vocabulary, positions(model.config))
                items.append(item)
    if not items:
        raise CompressionError("nothing that the base expects can be written as text; give --reference items")
    return build_reference(model, items, OWN, progress, lambda item, plain: True)[0]
