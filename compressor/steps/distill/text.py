"""The text of a distillation, the base's answers on it, and which sequences a step takes.

B sequences of L tokens, H hidden.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from compressor.errors import CompressionError
from compressor.evaluation.base_answers import Distributions
from compressor.evaluation.evaluator import rows_at_once
from compressor.model.opened import OpenModel
from compressor.steps.distill.step import Distill

BATCH = 8


@dataclass(frozen=True, slots=True)
class Batch:
    """Token ids [B, L], and the base's answers on them."""

    tokens: Tensor
    base: Distributions

    def share(self, rank: int, ranks: int) -> "Batch":
        """Return the sequences of one of so many ranks, maybe none."""
        own = slice(rank, None, ranks)
        return Batch(self.tokens[own], self.base.rows(own))


@dataclass(frozen=True, slots=True)
class Text:
    """Sequences to train on, each where it lies (batch, row)."""

    batches: tuple[Batch, ...]
    fit: tuple[tuple[int, int], ...]
    most: int  # sequences that are computed at once

    def of_step(self, step: int, sequences: int, seed: int) -> list[Batch]:
        """The batches of a step: passes over shuffled sequences, without a remainder's short step."""
        epoch, place = divmod(step, len(self.fit) // sequences)
        generator = torch.Generator().manual_seed((seed + 1000003 * epoch) % 2**63)
        order = torch.randperm(len(self.fit), generator=generator).tolist()
        chosen = [self.fit[number] for number in order[place * sequences : (place + 1) * sequences]]
        return [self._joined(chosen[begin : begin + self.most]) for begin in range(0, sequences, self.most)]

    def _joined(self, places: Sequence[tuple[int, int]]) -> Batch:
        rows = [(self.batches[batch], row) for batch, row in places]

        def stacked(name: str) -> Tensor:
            return torch.stack([getattr(batch.base, name)[row] for batch, row in rows])

        states = None if rows[0][0].base.hidden is None else stacked("hidden")
        base = Distributions(stacked("tokens"), stacked("logs"), stacked("others"), states)
        return Batch(torch.stack([batch.tokens[row] for batch, row in rows]), base)


def places(batches: Sequence[Tensor]) -> Iterator[tuple[int, int]]:
    """(batch, row) of every sequence to train on; those that were cut shorter than others are left out."""
    longest = max((batch.shape[1] for batch in batches), default=0)
    for number, batch in enumerate(batches):
        if batch.shape[1] == longest:
            yield from ((number, row) for row in range(len(batch)))


def training_text(
    batches: Sequence[Tensor], answers: Sequence[Distributions], options: Distill, model: OpenModel
) -> Text:
    """The sequences of batches of token ids [B, L], with the base's answers on them.

    Raises `CompressionError` for fewer sequences than a step takes.
    """
    fit = tuple(places(batches))
    if len(fit) < options.sequences:
        raise CompressionError(
            f"the text gives {len(fit)} sequences of {options.sequence_length} tokens to train on, and a step takes "
            f"{options.sequences}; give more text, or lower tokens_per_step"
        )
    rows = min(BATCH, options.sequences, rows_at_once(options.sequence_length, model.vocabulary))
    return Text(tuple(Batch(*pair) for pair in zip(batches, answers, strict=True)), fit, rows)
