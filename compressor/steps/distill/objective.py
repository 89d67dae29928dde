"""The text of a distillation with the base's answers on it, and the loss of one step.

The loss is the mean over the step's tokens of each part, times the part's weight; tokens that are
emphasised count as more than one. B sequences of L tokens, V tokens in the vocabulary, T = B L."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from compressor.data.emphasis import PLAIN, Emphasis
from compressor.distributed import ranks
from compressor.divergence.evaluator import rows_at_once
from compressor.divergence.teacher_outputs import Distributions, top_divergence
from compressor.errors import CompressionError
from compressor.frozen import frozen
from compressor.model.inputs import Inputs
from compressor.model.opened import OpenModel
from compressor.model.streaming import Forward, ReverseVisitor
from compressor.steps.distill.options import Distill

PARTS = ("kl", "cross_entropy", "hidden_states")  # of the loss, each weighed by its option
BATCH = 8


class NotFiniteError(Exception):
    """A loss or a gradient is no number, so the step must not be taken."""


@frozen
class Batch:
    """Token ids [B, L], the base's answers on them, and how much each token counts [B, L]."""

    tokens: Tensor
    base: Distributions
    weights: Tensor


@frozen
class TrainingText:
    """Sequences to train on, each where it lies (batch, row)."""

    batches: tuple[Batch, ...]
    fit: tuple[tuple[int, int], ...]
    most: int  # sequences that are computed at once
    sources: tuple[str, ...] = ()  # of the batches

    def of_step(
        self, step: int, sequences: int, seed: int, balance: Mapping[str, float] | None = None
    ) -> list[Batch]:
        """Return the batches of a step: passes over shuffled sequences, without a remainder's short
        step.

        `balance` has weights of the sources; without it all tokens count alike.
        """
        epoch, position = divmod(step, len(self.fit) // sequences)
        generator = torch.Generator().manual_seed((seed + 1000003 * epoch) % 2**63)
        order = torch.randperm(len(self.fit), generator=generator).tolist()
        plain = []
        alone = []
        for number in order[position * sequences : (position + 1) * sequences]:
            number, row = self.fit[number]
            batch = self.batches[number]
            if balance:
                batch = replace(
                    batch, weights=batch.weights * balance.get(self.sources[number], 1.0)
                )
            if isinstance(batch.tokens, Inputs):
                alone.append(batch)
            else:
                plain.append((batch, row))
        together = []
        for begin in range(0, len(plain), self.most):
            rows = plain[begin : begin + self.most]
            base = {}
            for name in rows[0][0].base.tensors:
                base[name] = torch.stack([batch.base.tensors[name][row] for batch, row in rows])
            tokens = torch.stack([batch.tokens[row] for batch, row in rows])
            weights = torch.stack([batch.weights[row] for batch, row in rows])
            together.append(Batch(tokens, Distributions(**base), weights))
        return [*together, *alone]


def training_text(
    batches: Sequence[Tensor],
    answers: Sequence[Distributions],
    options: Distill,
    model: OpenModel,
    emphasis: Emphasis = PLAIN,
    sources: tuple[str, ...] = (),
) -> TrainingText:
    """Return the sequences of batches [B, L] with the base's answers on them; refuses fewer than a
    step takes.

    Of sequences with pictures only those tokens count whose next one is text.
    """
    longest = max((batch.shape[1] for batch in batches if not isinstance(batch, Inputs)), default=0)
    fit = []
    for number, batch in enumerate(batches):
        # those that were cut shorter are left out
        if isinstance(batch, Inputs) or batch.shape[1] == longest:
            fit += [(number, row) for row in range(len(batch))]
    if len(fit) < options.sequences:
        raise CompressionError(
            f"the text gives {len(fit)} sequences of {options.sequence_length} tokens to train on, "
            f"and a step takes {options.sequences}; give more text, or lower tokens_per_step"
        )
    rows = min(BATCH, options.sequences, rows_at_once(options.sequence_length, model.vocabulary))
    weighed = [
        Batch(tokens, base, emphasis.loss_weights(tokens))
        for tokens, base in zip(batches, answers, strict=True)
    ]
    return TrainingText(tuple(weighed), tuple(fit), rows, sources)


class Objective(ReverseVisitor):
    """The loss of a step's batches. As a visitor it adds the part of the last decoder layer's
    hidden states.

    `parts` has the mean of each part over what has run, before its weight.
    """

    def __init__(self, options: Distill, batches: Sequence[Batch], model: OpenModel) -> None:
        self.options = options
        rows = slice(ranks().rank, None, ranks().size)  # this rank's sequences, possibly none
        self.batches = [
            Batch(batch.tokens[rows], batch.base.rows(rows), batch.weights[rows])
            for batch in batches
        ]
        # the tokens, weighed
        self.counted = float(sum(batch.weights.sum(dtype=torch.float64) for batch in batches))
        self.predicted = float(
            sum(batch.weights[:, :-1].sum(dtype=torch.float64) for batch in batches)
        )
        self.last = model.architecture.decoder_layers[-1] if options.hidden_states else None
        self.parts = {name: 0.0 for name in PARTS if getattr(options, name)}
        self.batch = 0

    def loss(self, number: int, output: Any) -> Tensor:
        """Return a batch's share of the loss at the model's output. Raises `NotFiniteError` for
        what is no number."""
        batch = self.batches[number]
        logits = output.logits
        weights = batch.weights.to(logits.device)
        loss = logits.new_zeros((), dtype=torch.float32)
        if self.options.kl:
            divergences = top_divergence(batch.base, logits)
            loss = loss + self._part("kl", (divergences * weights).sum() / self.counted)
        if self.options.cross_entropy:
            following = batch.tokens[:, 1:].to(logits.device)
            losses = cross_entropy(
                logits[:, :-1].float().transpose(1, 2), following, reduction="none"
            )
            loss = loss + self._part(
                "cross_entropy", (losses * weights[:, :-1]).sum() / self.predicted
            )
        # carries the gradients of parts that layers add
        nothing: Tensor = 0.0 * logits.float().sum()
        return loss if loss.requires_grad else nothing

    def _part(self, name: str, value: Tensor) -> Tensor:
        """Return a part times its weight; its mean is added up in `parts`."""
        share = float(value.detach())
        if not math.isfinite(share):
            raise NotFiniteError
        self.parts[name] += share
        weight: float = getattr(self.options, name)
        return weight * value

    def on_batch_start(self, batch: int) -> None:
        self.batch = batch

    def before_reverse(self, decoder_layer: str, batch: int) -> None:
        self.batch = batch

    def wrap_forward(self, decoder_layer: str, layer_forward: Forward) -> Forward:
        """Return the layer's forward.

        Where gradients are taken, the distance of the last one's output joins the loss.
        """
        if decoder_layer != self.last:
            return layer_forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            output = layer_forward(*args, **kwargs)
            if not torch.is_grad_enabled():
                return output
            hidden, *others = (output,) if isinstance(output, Tensor) else output
            batch = self.batches[self.batch]
            assert batch.base.hidden is not None
            target = batch.base.hidden.to(hidden.device).float()
            weights = batch.weights.to(hidden.device)
            # by sequence, the square distance from the base's states over their own square
            error = ((hidden.float() - target).square() * weights[..., None]).sum((1, 2))
            size = (target.square() * weights[..., None]).sum((1, 2))
            distance = (error / size.clamp_min(1e-12) * weights.sum(1)).sum() / self.counted
            hidden = Added.apply(hidden, self._part("hidden_states", distance))
            return hidden if isinstance(output, Tensor) else (hidden, *others)

        return forward


class Added(torch.autograd.Function):
    """The value as it is, through which a loss [] in float32 joins whatever loss is taken behind
    it."""

    @staticmethod
    def forward(context: Any, value: Tensor, loss: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        (gradient,) = gradients
        return gradient, torch.ones((), dtype=torch.float32, device=gradient.device)
