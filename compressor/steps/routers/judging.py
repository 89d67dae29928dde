"""Several sets of router tensors on the same held-out text, in one streamed pass, and what a choice gains."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from compressor.distributed.present import here
from compressor.evaluation.teacher import Distributions, divergence
from compressor.model.loading import parent_and_name, set_tensor
from compressor.model.opened import OpenModel
from compressor.model.streaming import Forward, LayerStream, LayerVisitor

Weights = Mapping[str, Tensor]  # routers' tensors, such as weights [E, H], as they are stored, by state-dict key


@dataclass(frozen=True, slots=True)
class Text:
    """Batches of token ids [B, L], and what the original expects after each token; None for those of other ranks."""

    batches: tuple[Tensor, ...]
    original: tuple[Distributions | None, ...]

    @property
    def own(self) -> tuple[int, ...]:
        """The numbers of this rank's batches."""
        return tuple(number for number, expected in enumerate(self.original) if expected is not None)

    def divergence(self, number: int, logits: Tensor) -> Tensor:
        """KL(original || other) in nats at every position of one of these batches, [B, L], from logits [B, L, V]."""
        expected = self.original[number]
        assert expected is not None
        return divergence(expected, logits)


@dataclass(frozen=True, slots=True)
class Step:
    """What a round took: of the choices that were tried, that which left the least divergence on held-out text.

    `gain` is how much less that is than before the round, with its standard error over sequences, in nats per token.
    Nothing was taken if all are zero.
    """

    ridge: float = 0.0
    step: float = 0.0
    gain: float = 0.0
    error: float = 0.0


@dataclass(frozen=True, slots=True)
class Baked:
    """New router tensors, and the divergence from the original on held-out text, in nats per token."""

    weights: Weights
    before: float
    after: float
    steps: tuple[Step, ...]


def put(model: OpenModel, unit: str, weights: Weights) -> None:
    """Put router weights in the place of a loaded layer's own, in its dtype."""
    whole = model.partial.model
    for key, weight in weights.items():
        if key.startswith(f"{unit}."):
            module, name = parent_and_name(whole, key)
            own = getattr(module, name)
            set_tensor(whole, key, weight.to(own.device, own.dtype))


class _Trials(LayerVisitor):
    """Judges several sets of weights on the same batches in one pass: batch n of trial t has the number t * N + n."""

    def __init__(self, model: OpenModel, text: Text, trials: Sequence[Weights]) -> None:
        self.model, self.text, self.trials, self.count = model, text, trials, len(text.batches)
        self.batch = 0
        self.found: dict[int, list[float]] = {}  # by batch: divergence of each sequence, per token

    def entering(self, batch: int) -> None:
        self.batch = batch

    def replaced(self, unit: str, own: Forward) -> Forward:
        put(self.model, unit, self.trials[self.batch // self.count])
        return own

    @torch.no_grad()
    def finished(self, batch: int, output: Any) -> None:
        self.found[batch] = self.text.divergence(batch % self.count, output.logits).mean(1).double().tolist()


def judged(model: OpenModel, text: Text, trials: Sequence[Weights]) -> list[Tensor]:
    """For each set of weights the divergence from the original of every sequence, in nats per token.

    Several ranks share the batches, and each gets all divergences.
    """
    units, seen, count = model.architecture.units, _Trials(model, text, trials), len(text.batches)
    batches = list(text.batches) * len(trials)
    own = [trial * count + number for trial in range(len(trials)) for number in text.own]
    LayerStream(model.partial, batches, units, units, range(len(batches)), own=own).run(seen)
    told = {batch: values for each in here().listed([*seen.found.items()]) for batch, values in each}
    places = [[trial * count + number for number in range(count)] for trial in range(len(trials))]
    return [torch.tensor([value for batch in row for value in told[batch]], dtype=torch.float64) for row in places]


def gained(before: Tensor, after: Tensor, ridge: float, step: float) -> Step:
    """The step, if it gained more on the held-out sequences [n] than the search's own luck; else one of zero."""
    gain = before - after
    error = float(gain.std()) / math.sqrt(len(gain)) if len(gain) > 1 else math.inf
    return Step(ridge, step, float(gain.mean()), error) if float(gain.mean()) > error else Step()
