"""What the two ways to train have in common: the place of trained tensors in the model, and how held-out text judges.

B sequences, L tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from compressor.evaluation.teacher import divergence
from compressor.model.loading import set_tensor
from compressor.model.opened import OpenModel
from compressor.model.streaming import LayerVisitor
from compressor.steps.distill.objective import Objective, next_token_losses
from compressor.steps.distill.ranks import Ranks
from compressor.steps.distill.text import Batch
from compressor.steps.distill.trained import TrainedLayer

Values = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class Judgement:
    """Of each held-out sequence [n], per token in nats: divergence from the original, and the next token's loss."""

    kl: Tensor
    loss: Tensor


class Engine(Protocol):
    """A model in training, in memory or layer by layer."""

    model: OpenModel
    ranks: Ranks
    layers: Mapping[str, TrainedLayer]  # by decoder layer

    def step(self, objective: Objective, rate: float) -> None:
        """Take one step on the objective's batches. Raises `NotFiniteError` where a loss or a gradient is no number."""

    def judged(self, batches: Sequence[Batch]) -> Judgement:
        """How the model does as it would be stored now."""

    def save(self, folder: Path) -> None:
        """Keep the state of all layers in a new folder."""

    def load(self, folder: Path) -> None:
        """Go back to a state that was kept."""

    def values(self, folder: Path, unit: str) -> Values:
        """A layer's trained tensors in float32 in a kept state, by state-dict key."""

    def close(self) -> None:
        """Nothing stays loaded."""


def put_values(model: OpenModel, values: Values, trainable: bool = False) -> None:
    """Put values in the place of loaded tensors, in the dtype in which the model computes; maybe asking for gradients.

    What is loaded may be the checkpoint's own file, mapped: it is replaced, never written.
    """
    whole = model.partial.model
    for key, value in values.items():
        own = model.partial.empty[key]
        made = nn.Parameter(value.detach().to(model.partial.device, own.dtype), requires_grad=trainable)
        set_tensor(whole, key, made)


def rounded(values: Values, stored: Mapping[str, torch.dtype]) -> dict[str, Tensor]:
    """Values as they are when they have been written and read again."""
    return {key: value.to(stored[key]).float() for key, value in values.items()}


class Judging(LayerVisitor):
    """Judges batches that reach the model's output."""

    def __init__(self, batches: Sequence[Batch]) -> None:
        self.batches = batches
        self.found: list[tuple[Tensor, Tensor]] = []

    @torch.no_grad()
    def finished(self, batch: int, output: Any) -> None:
        own = self.batches[batch]
        apart = divergence(own.original, output.logits).mean(1).double().cpu()
        self.found.append((apart, next_token_losses(own.tokens, output.logits).mean(1).double().cpu()))

    @property
    def judgement(self) -> Judgement:
        """Of all batches, once they have come."""
        apart, losses = zip(*self.found, strict=True)
        return Judgement(torch.cat(apart), torch.cat(losses))
