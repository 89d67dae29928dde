"""C3PO (arXiv:2504.07964): each question is answered once more on an optimised pathway, found by
its neighbours.

L MoE layers whose routers are moved, E experts (and any rows beyond them).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compressor.answers.items import Item, is_greedy, likelihoods, positions, rows_of
from compressor.checkpoint.source import locate
from compressor.errors import CompressionError
from compressor.model.opened import OpenModel, open_model
from compressor.model.tokenizer import load_tokenizer
from compressor.pathways.engine import PathwayModel, PlainForward
from compressor.pathways.optimisers import (
    Neighbour,
    core_coverage,
    kernel_weights,
    optimised,
    pathway_logits,
)
from compressor.pathways.options import OWN, PathwayOptions, selected
from compressor.pathways.reference import Embedder, ReferenceSet, embedder, read_reference

ORACLE = "recipes/c3po.py asks it items whose answers are known"


@dataclass
class PathwayAnswerer:
    """A loaded model that answers by its reference set; `plain_work` is the cost of plain forwards
    alone."""

    model: PathwayModel
    tokenizer: Any
    reference: ReferenceSet
    options: PathwayOptions
    embed: Embedder
    plain_work: int = 0
    questions: int = 0  # whose pathway was optimised
    covered: Tensor | float = 0.0  # sums of `core_coverage` over them

    @property
    def cost(self) -> float:
        """Computed decoder layers times tokens, as a multiple of plain forwards of the
        questions."""
        return self.model.work / self.plain_work if self.plain_work else 1.0

    @property
    def coverage(self) -> tuple[float, ...]:
        """Mean of `core_coverage` over the questions whose pathway was optimised; nothing if there
        are none."""
        if not isinstance(self.covered, Tensor):
            return ()
        return tuple((self.covered / self.questions).tolist())

    def run(self, item: Item) -> PlainForward:
        """Run a plain forward of an item's prompt with each of its continuations."""
        opened = self.model.opened
        most = positions(opened.config)
        return self.model.run(rows_of(item, self.tokenizer, opened.vocabulary, most))

    def answer(self, prompt: str, continuations: Sequence[str]) -> list[tuple[float, bool]]:
        """Return the log likelihood in nats of each continuation on the optimised pathway, and True
        if it is greedy.

        Raises `CompressionError` for the oracle, which would have to know the right one.
        """
        if self.options.optimizer == "oracle":
            raise CompressionError(f"the oracle has to know the answers; {ORACLE}")
        return self.answers(Item(prompt, continuations[0], tuple(continuations)))

    def grade(self, item: Item) -> tuple[bool, float]:
        """Return True if the right choice is the most likely one, without choices if it is greedy;
        and its likelihood.

        Contexts of their own have pathways of their own, save for the oracle, which optimises the
        right one's alone."""
        if item.contexts and self.options.optimizer != "oracle":
            pairs = zip(item.contexts, item.continuations, strict=True)
            answers = [self.answer(context, [continuation])[0] for context, continuation in pairs]
        else:
            answers = self.answers(item)
        scores = [likelihood for likelihood, _ in answers]
        is_right = scores.index(max(scores)) == item.right if item.choices else answers[0][1]
        return is_right, scores[item.right]

    def answers(self, item: Item) -> list[tuple[float, bool]]:
        """Return `answer` for an item's continuations.

        An item so long that its rows are cut differently has no one prompt; its answers are those
        of the plain model."""
        plain = self.run(item)
        self.plain_work += plain.work
        logits = plain.logits
        if item.contexts or len({row.start for row in plain.rows}) == 1:
            with torch.no_grad():
                logits = self.model.again(plain, self.shift(item, plain))
        greedy = [is_greedy(logits[index : index + 1], row) for index, row in enumerate(plain.rows)]
        return list(zip(likelihoods(logits, plain.rows).tolist(), greedy, strict=True))

    def shift(self, item: Item, plain: PlainForward) -> Tensor:
        """Return the shift of the moved routers' logits [L, E] of an item that has passed the plain
        model."""
        model = self.model
        options = self.options
        reference = self.reference
        layers = [*model.layer_numbers]
        pathway = plain.pathway[layers]
        neighbours = list[Neighbour]()
        weights = torch.ones(1)
        if options.optimizer == "oracle":
            right = self.run(item.alone) if item.choices else plain
            pathway = right.pathway[layers]
            neighbours = [Neighbour(pathway, right)]
        else:
            nearest, query, points = reference.neighbours(
                self.embed(item, plain.rows[0]), options.neighbours, options.radius, item.prompt
            )
            has_line_search = options.optimizer == "kernel" and options.share is None
            for index in nearest:
                forward = None
                if options.optimizer == "ngd" or has_line_search:
                    forward = self.run(reference.items[index].alone)
                neighbours.append(Neighbour(reference.pathways[index, layers], forward))
            if neighbours:
                weights = kernel_weights(options.kernel, query, points, options.bandwidth)
        shift = torch.zeros_like(pathway)
        if neighbours:
            shift = optimised(model, pathway, neighbours, weights, options)
        counts = [model.layers[number].top_k for number in layers]
        self.covered += core_coverage(pathway, shift, pathway_logits(model, pathway), counts)
        self.questions += 1
        return shift


def open_answering(
    model: str,
    reference: str | Path,
    options: PathwayOptions,
    *,
    embedding: str = OWN,
    trust_remote_code: bool = False,
    device: str = "auto",
    dtype: str = "auto",
    revision: str | None = None,
) -> PathwayAnswerer:
    """Load a model and its reference set; the code of the embedding model's repository is run if
    that is trusted.

    Raises `CompressionError` for the set of another model or tokenizer, and for one whose prompts
    are embedded by another model than `embedding`."""
    reference_set = read_reference(Path(reference), embedding)
    opened = open_model(locate(model, revision), dtype, device)
    return load_answering(opened, reference_set, options, trust_remote_code)


def load_answering(
    opened: OpenModel,
    reference: ReferenceSet,
    options: PathwayOptions,
    trust_remote_code: bool = False,
) -> PathwayAnswerer:
    """Read the weights of a model; refused unless `reference` is of it and its tokenizer."""
    tokenizer = load_tokenizer(opened.source.folder)
    reference.check(opened, tokenizer)
    layer_numbers = selected(options.layers, len(opened.architecture.layers))
    model = PathwayModel(opened, layer_numbers, options.tokens, reference.facts.scores)
    model.load()
    embed = embedder(reference.facts.embedding, model, trust_remote_code)
    return PathwayAnswerer(model, tokenizer, reference, options, embed)
