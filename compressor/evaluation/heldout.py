"""How far a model is from the original on held-out text: loss, and KL between next-token distributions, streamed.

The original's last hidden states are kept (small), not its logits (large): each judged model's head is given both,
so that one call computes both sets of logits with whatever the model does after its head.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.functional import log_softmax

from compressor.data.batches import EvaluationSet
from compressor.distributed.present import here
from compressor.errors import CompressionError
from compressor.model.architecture import head_of
from compressor.model.streaming import LayerVisitor

LOGITS = 2**25  # logits computed at once: 128 MiB in float32


@dataclass(frozen=True, slots=True)
class Judgement:
    """Sums over the predicted tokens of one evaluation set, in nats."""

    tokens: int = 0
    loss: float = 0.0
    kl: float = 0.0


def rows_at_once(tokens: int, vocabulary: int) -> int:
    """Rows of so many tokens whose logits are few enough to be computed at once."""
    return max(1, LOGITS // (tokens * vocabulary))


def divergence(original: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """KL of distributions with these log probabilities [B, L, V], summed over each sequence: [B] float64, in nats."""
    return (original.exp() * (original - other)).sum((1, 2), dtype=torch.float64)


def evaluation_batches(sets: Sequence[EvaluationSet], vocabulary: int) -> list[tuple[int, torch.Tensor]]:
    """(number of the set, token ids [B, L]) in batches so small that their logits are, too."""
    found = []
    for number, entry in enumerate(sets):
        for batch in entry.batches:
            found += [(number, part) for part in batch.split(rows_at_once(batch.shape[1], vocabulary))]
    return found


@dataclass(slots=True)
class Judge(LayerVisitor):
    """Judges models on the same batches, the finishing ones of a streamed pass; the first one judged is the original.

    In the pass, these batches have the numbers from `first` on.
    """

    batches: list[tuple[int, torch.Tensor]]
    sets: int
    first: int = 0
    hidden: dict[int, torch.Tensor] = field(default_factory=dict)  # the original's, by batch
    found: list[Judgement] = field(default_factory=list)
    kl_of: list[list[float]] = field(default_factory=list)  # of each set: nats per token, by sequence
    _batch: int = 0
    _seen: dict[int, tuple[float, list[float]]] = field(default_factory=dict)  # by batch: loss, and each sequence's KL

    @property
    def tokens(self) -> list[torch.Tensor]:
        """The batches' token ids."""
        return [tokens for _, tokens in self.batches]

    @contextmanager
    def watch(self, model: Any) -> Iterator[None]:
        """Judge anew while the block runs, the head given the original's states too; refuses a model without one.

        What was found, of several ranks together, is told when the block has ended.
        """
        if (head := head_of(model)) is None:
            raise CompressionError(
                f"{type(model).__name__} has no language-model head, so next-token losses cannot be compared"
            )
        self._seen = {}
        handle = head.register_forward_pre_hook(self._before_head)
        try:
            yield
        finally:
            handle.remove()
        self._add_up()

    def _add_up(self) -> None:
        """Add up what every rank's batches have shown, in the order of the batches."""
        self.found, self.kl_of = [Judgement() for _ in range(self.sets)], [[] for _ in range(self.sets)]
        seen = sorted((batch, *found) for each in here().listed([*self._seen.items()]) for batch, found in each)
        for batch, loss, kl in seen:
            number, tokens = self.batches[batch]
            predicted, old = tokens[:, 1:], self.found[number]
            self.kl_of[number] += [value / predicted.shape[1] for value in kl]
            self.found[number] = Judgement(old.tokens + predicted.numel(), old.loss + loss, old.kl + sum(kl))

    def entering(self, batch: int) -> None:
        self._batch = batch - self.first

    def _before_head(self, module: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden = args[0]
        if self._batch not in self.hidden:
            self.hidden[self._batch] = hidden.detach().clone()
        return (torch.cat([hidden, self.hidden[self._batch].to(hidden.device)]), *args[1:])

    @torch.no_grad()
    def finished(self, batch: int, output: Any) -> None:
        """Add a batch's output, whose second half of rows is the original's."""
        number = batch - self.first
        logits = output.logits[:, :-1].float()
        ours, original = (log_softmax(part, dim=-1) for part in logits.chunk(2))
        targets = self.batches[number][1][:, 1:, None].to(logits.device)
        loss = -ours.gather(-1, targets).double().sum()
        self._seen[number] = float(loss), divergence(original, ours).tolist()
