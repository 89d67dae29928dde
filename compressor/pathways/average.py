"""The average optimised pathway: the literal reading of C3PO for a stock checkpoint, whose routers
take it as a bias.

L MoE layers whose routers are moved, E experts (and any rows beyond them).
"""

import random
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from compressor.answers.items import Item, positions, rows_of
from compressor.devices import as_float64
from compressor.divergence.teacher_outputs import Distributions
from compressor.errors import CompressionError
from compressor.model.opened import OpenModel
from compressor.model.router_logits import weights_of
from compressor.model.tokenizer import load_tokenizer
from compressor.pathways.answering import load_answering
from compressor.pathways.optimisers import pathway_logits
from compressor.pathways.options import OWN, Optimizer, PathwayOptions
from compressor.pathways.reference import ReferenceSet, build_reference, read_reference
from compressor.progress import Progress
from compressor.steps.routers.weights import RouterShift

# items of known answers, each moved down the gradient of its own loss, need no neighbours
OWN_ANSWER = "own"
MOST = 64  # items that are averaged over
PROMPT = 64  # tokens of a prompt that is taken from text


class AveragePathway:
    """The step `routers` takes it from here: `reference` is the folder of a set, by default one is
    made of text.

    Raises `CompressionError` for the set of another model.
    """

    def __init__(self, model: OpenModel, reference: str | None, optimizer: str) -> None:
        self.model = model
        self.optimizer = optimizer
        self.reference: ReferenceSet | None = None
        if reference is not None:
            self.reference = read_reference(Path(reference))
            self.reference.check(model, load_tokenizer(model.source.folder))

    def measure(
        self, text: Sequence[tuple[Tensor, Distributions]], progress: Progress
    ) -> RouterShift:
        """Optimise the pathways of up to 64 items: by neighbours, never by itself, or `own`: by its
        known answer.

        The model is loaded whole, and released. Raises `CompressionError` for an architecture whose
        late layers cannot be run again by themselves."""
        try:
            reference = self.reference or text_reference(self.model, text, progress)
            optimizer = "oracle" if self.optimizer == OWN_ANSWER else self.optimizer
            options = PathwayOptions(cast(Optimizer, optimizer))
            answering = load_answering(self.model, reference, options)
            engine = answering.model
            items = reference.items
            if len(items) > MOST:
                items = tuple(random.Random(0).sample(items, MOST))
            progress.start("optimise pathways", len(items))
            logit_changes = list[Tensor]()
            score_changes = list[Tensor]()
            for item in items:
                plain = answering.run(item.alone)
                pathway = plain.pathway[[*engine.layer_numbers]]
                shift = answering.shift(item.alone, plain)
                moved = pathway_logits(engine, pathway) + shift
                pairs = zip(moved, engine.layer_numbers, strict=True)
                rescored = [weights_of(logits, engine.scores[number]) for logits, number in pairs]
                logit_changes.append(shift)
                score_changes.append(torch.stack(rescored) - pathway)
                progress.advance("")
            changes = as_float64(torch.stack(logit_changes))
            mean = changes.mean(0)
            size = float(changes.square().mean().sqrt())
            agreement = float(mean.square().mean().sqrt()) / size if size > 0 else 0.0
            mean_scores = as_float64(torch.stack(score_changes)).mean(0)
            return RouterShift(mean, mean_scores, len(items), agreement)
        finally:
            self.model.partial.release("")


def text_reference(
    model: OpenModel, text: Sequence[tuple[Tensor, Distributions]], progress: Progress
) -> ReferenceSet:
    """Return a reference set with one position of each sequence of a text, and the base's
    distribution there.

    The answer there is the base's greedy token; positions where the text goes on with it are
    preferred. Raises `CompressionError` where nothing can be written as text."""
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
            # read as text, prompt and answer must have tokens of their own
            with suppress(CompressionError):
                item = Item(prompt, answer)
                rows_of(item, tokenizer, model.vocabulary, positions(model.config))
                items.append(item)
    if not items:
        raise CompressionError(
            "nothing that the base expects can be written as text; give --reference items"
        )
    return build_reference(model, items, OWN, progress, keep_all=True)[0]
