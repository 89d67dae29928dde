"""What a distillation learns: its text with the base's answers on it, and the loss of one step.

The loss is the mean over the step's tokens of each part, times the part's weight. B sequences of L tokens, V tokens in
the vocabulary, T = B L.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from compressor.distributed.ranks import here
from compressor.errors import CompressionError
from compressor.evaluation.base_answers import Distributions, top_divergence
from compressor.evaluation.evaluator import rows_at_once
from compressor.model.architecture import MoeLayer, layers_by_unit
from compressor.model.opened import OpenModel
from compressor.model.streaming import Forward, ReverseVisitor
from compressor.steps.distill.contrastive import ExpertCall, experts_apart, noted_call, seeded
from compressor.steps.distill.step import Distill

PARTS = ("kl", "cross_entropy", "hidden_states", "contrastive")  # of the loss, each weighed by its option
BATCH = 8


class NotFiniteError(Exception):
    """A loss or a gradient is no number, so the step must not be taken."""


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


class Objective(ReverseVisitor):
    """What a step's batches are to lower. As a visitor it adds what is asked of layers inside the model.

    `parts` has the mean of each part over what has run, before its weight.
    """

    def __init__(self, options: Distill, batches: Sequence[Batch], model: OpenModel, seed: int, step: int) -> None:
        self.options, self.model, self.seed, self.step = options, model, seed, step
        self.batches = [batch.share(here().rank, here().size) for batch in batches]
        self.tokens = sum(batch.tokens.numel() for batch in batches)
        self.predicted = self.tokens - sum(len(batch.tokens) for batch in batches)
        self.layers = layers_by_unit(model.architecture.layers) if options.contrastive else {}
        self.last = model.architecture.units[-1] if options.hidden_states else None
        self.parts = {name: 0.0 for name in PARTS if getattr(options, name)}
        self.batch = 0

    def loss(self, number: int, output: Any) -> Tensor:
        """A batch's share of the loss at the model's output. Raises `NotFiniteError` for what is no number."""
        batch, logits, options = self.batches[number], output.logits, self.options
        found = logits.new_zeros((), dtype=torch.float32)
        if options.kl:
            found = found + self._part("kl", top_divergence(batch.base, logits).sum() / self.tokens)
        if options.cross_entropy:
            found = found + self._part("cross_entropy", next_token_losses(batch.tokens, logits).sum() / self.predicted)
        nothing: Tensor = 0.0 * logits.float().sum()  # through which what layers add still comes back
        return found if found.requires_grad else nothing

    def _part(self, name: str, value: Tensor) -> Tensor:
        """A part times its weight, noted."""
        if not math.isfinite(number := float(value.detach())):
            raise NotFiniteError
        self.parts[name] += number
        weight: float = getattr(self.options, name)
        return weight * value

    def entering(self, batch: int) -> None:
        self.batch = batch

    def replaying(self, unit: str, batch: int) -> None:
        self.batch = batch

    def replaced(self, unit: str, own: Forward) -> Forward:
        """The layer's forward; where gradients are taken, what is asked of its output is added to the loss."""
        layers = self.layers.get(unit, [])
        if not layers and unit != self.last:
            return own

        def forward(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return own(*args, **kwargs)
            with ExitStack() as stack:
                whole = self.model.partial.model
                calls = [stack.enter_context(noted_call(whole, layer)) for layer in layers]
                output = own(*args, **kwargs)
            hidden, *others = (output,) if isinstance(output, Tensor) else output
            if unit == self.last:
                hidden = added(hidden, self._part("hidden_states", self._distance(hidden)))
            for layer, seen in zip(layers, calls, strict=True):
                hidden = added(hidden, self._part("contrastive", self._contrast(layer, seen)))
            return hidden if isinstance(output, Tensor) else (hidden, *others)

        return forward

    def _contrast(self, layer: MoeLayer, calls: Sequence[ExpertCall]) -> Tensor:
        """The contrastive loss of a layer's experts on the batch; its share of the mean over tokens and layers."""
        (call,), generator = calls, seeded(self.seed, self.step, self.batch, layer)
        found = experts_apart(self.model.partial.model.get_submodule(layer.name), call, self.options, generator)
        share = self.batches[self.batch].tokens.numel() / self.tokens
        return found * share / len(self.model.architecture.layers)

    def _distance(self, hidden: Tensor) -> Tensor:
        """The square distance from the base's states over their own square, by sequence; its share of the mean."""
        batch = self.batches[self.batch]
        assert batch.base.hidden is not None
        wanted = batch.base.hidden.to(hidden.device).float()
        off = (hidden.float() - wanted).square().sum((1, 2)) / wanted.square().sum((1, 2)).clamp_min(1e-12)
        return off.sum() * batch.tokens.shape[1] / self.tokens


class _Added(torch.autograd.Function):
    """The value as it is; on the way back the loss beside it gets its gradient of 1."""

    @staticmethod
    def forward(context: Any, value: Tensor, loss: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        (gradient,) = gradients
        return gradient, torch.ones((), dtype=torch.float32, device=gradient.device)


def added(value: Tensor, loss: Tensor) -> Tensor:
    """The value, through which a loss [] in float32 joins whatever loss is taken behind it."""
    result: Tensor = _Added.apply(value, loss)
    return result


def next_token_losses(tokens: Tensor, logits: Tensor) -> Tensor:
    """-log p of each token after those before it, in nats: [B, L], [B, L, V] -> [B, L - 1]."""
    scores = logits[:, :-1].float().transpose(1, 2)
    return cross_entropy(scores, tokens[:, 1:].to(logits.device), reduction="none")
