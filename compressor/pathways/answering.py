"""C3PO (arXiv:2504.07964): each question is answered once more on an optimised pathway, found by its neighbours.

L late MoE layers, E experts (and any rows beyond them).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compressor.answers.items import Item, is_greedy, likelihoods, positions, rows_of
from compressor.checkpoint.source import locate
from compressor.model.opened import OpenModel, open_model
from compressor.model.tokenizer import load_tokenizer
from compressor.pathways.engine import PathwayModel, PlainForward
from compressor.pathways.optimisers import Neighbour, kernel_weights, optimised
from compressor.pathways.options import OWN, PathwayOptions
from compressor.pathways.reference import Embedder, ReferenceSet, embedder, read_reference


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
