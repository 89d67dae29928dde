"""The bake into the router weights: rounds of one gradient, ridge regression and a line search on held-out text.

C3PO (arXiv:2504.07964) optimises which experts a test sample visits. Here all routers of the smaller model are moved
once, for all text: down the gradient of KL(original || smaller) with respect to the router logits of all layers and
tokens, which ridge regression carries into the router weights. What held-out text likes best is taken, and nothing
is changed where it likes that best.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from compressor.calibration.teacher import Distributions, divergence
from compressor.model.loading import set_tensor
from compressor.model.opened import OpenModel
from compressor.model.reverse import ReversePass, ReverseVisitor
from compressor.model.streaming import Forward, LayerStream, LayerVisitor
from compressor.pathways.router_moments import Moments, RouterGradients
from compressor.progress import Progress

RIDGES = (0.01, 1.0)  # of the mean square of a router's inputs, and of its logits' gradients
STEPS = (0.0125, 0.025, 0.05, 0.1, 0.2)  # root mean square of the change of a logit, over that of the logits
NEAR = (0.5, 1.0, 2.0)  # of the step taken before, those tried in later rounds
LARGEST = 2.0  # a step that is the best and the longest of those tried is doubled up to here

Weights = Mapping[str, Tensor]  # routers' weights [E, H] in the dtype that they are stored in, by state-dict key


@dataclass(frozen=True, slots=True)
class Text:
    """Batches of token ids [B, L], and what the original expects after each token."""

    batches: tuple[Tensor, ...]
    original: tuple[Distributions, ...]


@dataclass(frozen=True, slots=True)
class Step:
    """What a round took: of the choices that were tried, that which left the least divergence on held-out text.

    `gain` is how much less that is than before the round, with its standard error over sequences, in nats per token.
    """

    ridge: float = 0.0
    step: float = 0.0
    gain: float = 0.0
    error: float = 0.0


@dataclass(frozen=True, slots=True)
class Baked:
    """New router weights, and the divergence from the original on held-out text, in nats per token."""

    weights: Weights
    before: float
    after: float
    steps: tuple[Step, ...]


class _Using(ReverseVisitor):
    """Has every router use these weights on both ways of a pass."""

    def __init__(self, model: OpenModel, weights: Weights) -> None:
        self.model, self.weights = model, weights

    def loaded(self, unit: str) -> None:
        put(self.model, unit, self.weights)


def put(model: OpenModel, unit: str, weights: Weights) -> None:
    """Put router weights in the place of a loaded layer's own, in its dtype."""
    whole = model.partial.model
    for key, weight in weights.items():
        if key.startswith(f"{unit}."):
            own = whole.get_parameter(key)
            set_tensor(whole, key, weight.to(own.device, own.dtype))


class _Trials(LayerVisitor):
    """Judges several sets of weights on the same batches in one pass: batch n of trial t has the number t * N + n."""

    def __init__(self, model: OpenModel, text: Text, trials: Sequence[Weights]) -> None:
        self.model, self.text, self.trials, self.count = model, text, trials, len(text.batches)
        self.batch = 0
        self.found: list[list[Tensor]] = [[] for _ in trials]  # divergence of each sequence, per token

    def entering(self, batch: int) -> None:
        self.batch = batch

    def replaced(self, unit: str, own: Forward) -> Forward:
        put(self.model, unit, self.trials[self.batch // self.count])
        return own

    @torch.no_grad()
    def finished(self, batch: int, output: Any) -> None:
        trial, number = divmod(batch, self.count)
        self.found[trial].append(divergence(self.text.original[number], output.logits).mean(1).double().cpu())


def judged(model: OpenModel, text: Text, trials: Sequence[Weights]) -> list[Tensor]:
    """For each set of weights the divergence from the original of every sequence, in nats per token."""
    units, seen = model.architecture.units, _Trials(model, text, trials)
    batches = list(text.batches) * len(trials)
    LayerStream(model.partial, batches, units, units, range(len(batches))).run(seen)
    return [torch.cat(values) for values in seen.found]


def bake_weights(model: OpenModel, weights: Weights, fit: Sequence[Text], heldout: Text, progress: Progress) -> Baked:
    """Move the router weights of a smaller model, a round for each text of `fit`; what `heldout` likes best is kept.

    Raises `CompressionError` for an architecture through which no gradients go layer by layer.
    """
    progress.start("bake into the routers", len(fit))
    before = now = judged(model, heldout, [weights])[0]
    steps, taken = list[Step](), None
    for text in fit:
        trial = _best(model, weights, _moments(model, weights, text), heldout, taken)
        gain = now - trial.found
        error = float(gain.std()) / math.sqrt(len(gain)) if len(gain) > 1 else math.inf
        if float(gain.mean()) > error:  # more than the search's own luck
            taken, weights, now = trial.step, trial.weights, trial.found
            steps.append(Step(trial.ridge, trial.step, float(gain.mean()), error))
        else:
            taken = trial.step / 2
            steps.append(Step())
        progress.advance("round")
    return Baked(weights, float(before.mean()), float(now.mean()), tuple(steps))


def _moments(model: OpenModel, weights: Weights, text: Text) -> dict[str, Moments]:
    gradients = RouterGradients(model)
    run = ReversePass(model.partial, text.batches, model.architecture.units)
    run.run(
        lambda batch, output: divergence(text.original[batch], output.logits).sum(), _Using(model, weights), gradients
    )
    return gradients.found


@dataclass(frozen=True, slots=True)
class _Trial:
    ridge: float
    step: float
    weights: Weights
    found: Tensor  # the divergence of every held-out sequence


def _best(
    model: OpenModel, weights: Weights, moments: Mapping[str, Moments], heldout: Text, taken: float | None
) -> _Trial:
    """The line search of a round: a wide one at first, then one around the step that was taken before."""
    steps = STEPS if taken is None else tuple(near * taken for near in NEAR)
    best = min(_trials(model, weights, moments, heldout, RIDGES, steps), key=_mean)
    while best.step == max(steps) and 2 * best.step <= LARGEST:
        steps = (2 * best.step,)
        best = min(best, *_trials(model, weights, moments, heldout, (best.ridge,), steps), key=_mean)
    return best


def _mean(trial: _Trial) -> float:
    return float(trial.found.mean())


def _trials(
    model: OpenModel,
    weights: Weights,
    moments: Mapping[str, Moments],
    heldout: Text,
    ridges: Sequence[float],
    steps: Sequence[float],
) -> list[_Trial]:
    tried = [(ridge, step) for ridge in ridges for step in steps]
    moved = [_moved(weights, moments, *each) for each in tried]
    found = judged(model, heldout, moved)
    return [_Trial(*each, after, own) for each, after, own in zip(tried, moved, found, strict=True)]


def _moved(weights: Weights, moments: Mapping[str, Moments], ridge: float, step: float) -> Weights:
    """The weights after a step: how much the logits of all routers change, over what they are (root mean squares)."""
    changes = {key: own.direction(ridge) for key, own in moments.items()}
    square = sum(moments[key].mean_square(change) for key, change in changes.items())
    own_square = sum(own.mean_square(weights[key].double()) for key, own in moments.items())
    scale = step * math.sqrt(own_square / square) if square > 0 else 0.0
    moved = {key: (weights[key].double() + scale * change).to(weights[key].dtype) for key, change in changes.items()}
    return {**weights, **moved}
