"""Router weights moved toward the base: rounds of one gradient, ridge regression and a line search on held-out text.

C3PO (arXiv:2504.07964) optimises which experts a test sample is routed to. Here all routers of the smaller model are
moved once, for all text: down the gradient of KL(base || smaller) with respect to the router logits of all layers and
tokens, which ridge regression carries into the router weights. A round's best step is taken where the evaluator accepts
it, and nothing is changed otherwise.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from compressor.evaluation.base_answers import Distributions, top_divergence
from compressor.evaluation.evaluator import Difference, Evaluator, Figures, Variants
from compressor.model.loading import parent_and_name, set_tensor
from compressor.model.opened import OpenModel
from compressor.model.streaming import Forward, ReversePass, ReverseVisitor
from compressor.progress import Progress
from compressor.steps.routers.router_moments import Moments, RouterGradients

RIDGES = (0.01, 1.0)  # of the mean square of a router's inputs, and of its logits' gradients
STEPS = (0.0125, 0.025, 0.05, 0.1, 0.2)  # root mean square of the change of a logit, over that of the logits
NEAR = (0.5, 1.0, 2.0)  # of the step taken before, those tried in later rounds
LARGEST = 2.0  # a step that is the best and the longest of those tried is doubled up to here

Weights = Mapping[str, Tensor]  # routers' tensors, such as weights [E, H], as they are stored, by state-dict key


@dataclass(frozen=True, slots=True)
class Text:
    """Batches of token ids [B, L] and the base's distributions after each token; None for those of other ranks."""

    batches: tuple[Tensor, ...]
    base: tuple[Distributions | None, ...]

    @property
    def own(self) -> tuple[int, ...]:
        """The numbers of this rank's batches."""
        return tuple(number for number, expected in enumerate(self.base) if expected is not None)

    def divergence(self, number: int, logits: Tensor) -> Tensor:
        """KL(base || other) in nats at every position of one of these batches, [B, L], from logits [B, L, V]."""
        expected = self.base[number]
        assert expected is not None
        return top_divergence(expected, logits)


@dataclass(frozen=True, slots=True)
class Step:
    """What a round took: of the choices that were tried, that which left the least KL on held-out text.

    `gain` is how much less that is than before the round, with its standard error over sequences, in nats per token.
    Nothing was taken if all are zero.
    """

    ridge: float = 0.0
    step: float = 0.0
    gain: float = 0.0
    standard_error: float = 0.0

    @classmethod
    def taken(cls, before: Figures, after: Figures, ridge: float, step: float) -> "Step":
        """The step, if its gain is accepted; else one of zero."""
        found = Difference.of(before.kl, after.kl)
        return cls(ridge, step, found.gain, found.standard_error) if found.accepted else cls()


@dataclass(frozen=True, slots=True)
class Baked:
    """New router tensors, and the figures on held-out text before and after."""

    weights: Weights
    before: Figures
    after: Figures
    steps: tuple[Step, ...]


def put(model: OpenModel, unit: str, weights: Weights) -> None:
    """Put router weights in the place of a loaded layer's own, in its dtype."""
    whole = model.partial.model
    for key, weight in weights.items():
        if key.startswith(f"{unit}."):
            module, name = parent_and_name(whole, key)
            own = getattr(module, name)
            set_tensor(whole, key, weight.to(own.device, own.dtype))


class Routed(Variants):
    """Has each variant of one pass use its own set of router tensors."""

    def __init__(self, model: OpenModel, trials: Sequence[Weights]) -> None:
        self.model, self.trials = model, trials

    def replaced(self, unit: str, own: Forward) -> Forward:
        if self.variant is not None:
            put(self.model, unit, self.trials[self.variant])
        return own


def evaluate_trials(model: OpenModel, evaluator: Evaluator, trials: Sequence[Weights]) -> list[Figures]:
    """Figures of the model with each of several sets of router tensors, from one streamed pass."""
    return evaluator.measure(model, Routed(model, trials), len(trials))


def mean_kl(figures: Figures) -> float:
    """Mean KL from the base, in nats per token."""
    return figures.means["kl"]


class _Using(ReverseVisitor):
    """Has every router use these weights on both ways of a pass."""

    def __init__(self, model: OpenModel, weights: Weights) -> None:
        self.model, self.weights = model, weights

    def loaded(self, unit: str) -> None:
        put(self.model, unit, self.weights)


def bake_weights(
    model: OpenModel, weights: Weights, fit: Sequence[Text], evaluator: Evaluator, progress: Progress
) -> Baked:
    """Move the router weights of a smaller model, a round for each text of `fit`; the best accepted ones are kept.

    Raises `CompressionError` for an architecture through which no gradients go layer by layer.
    """
    progress.start("calibrate the routers", len(fit))
    before = now = evaluate_trials(model, evaluator, [weights])[0]
    steps, taken = list[Step](), None
    for text in fit:
        trial = _best(model, weights, _moments(model, weights, text), evaluator, taken)
        if (step := Step.taken(now, trial.figures, trial.ridge, trial.step)).step:
            taken, weights, now = trial.step, trial.weights, trial.figures
        else:
            taken = trial.step / 2
        steps.append(step)
        progress.advance("round")
    return Baked(weights, before, now, tuple(steps))


def _moments(model: OpenModel, weights: Weights, text: Text) -> dict[str, Moments]:
    gradients = RouterGradients()
    run = ReversePass(model, [text.batches[number] for number in text.own])
    run.run(
        lambda batch, output: text.divergence(text.own[batch], output.logits).sum(), _Using(model, weights), gradients
    )
    return gradients.found


@dataclass(frozen=True, slots=True)
class _Trial:
    ridge: float
    step: float
    weights: Weights
    figures: Figures


def _best(
    model: OpenModel, weights: Weights, moments: Mapping[str, Moments], evaluator: Evaluator, taken: float | None
) -> _Trial:
    """The line search of a round: a wide one at first, then one around the step that was taken before."""
    steps = STEPS if taken is None else tuple(near * taken for near in NEAR)

    def kl(trial: _Trial) -> float:
        return mean_kl(trial.figures)

    best = min(_trials(model, weights, moments, evaluator, RIDGES, steps), key=kl)
    while best.step == max(steps) and 2 * best.step <= LARGEST:
        steps = (2 * best.step,)
        best = min(best, *_trials(model, weights, moments, evaluator, (best.ridge,), steps), key=kl)
    return best


def _trials(
    model: OpenModel,
    weights: Weights,
    moments: Mapping[str, Moments],
    evaluator: Evaluator,
    ridges: Sequence[float],
    steps: Sequence[float],
) -> list[_Trial]:
    tried = [(ridge, step) for ridge in ridges for step in steps]
    moved = [_moved(weights, moments, *each) for each in tried]
    found = evaluate_trials(model, evaluator, moved)
    return [_Trial(*each, after, own) for each, after, own in zip(tried, moved, found, strict=True)]


def _moved(weights: Weights, moments: Mapping[str, Moments], ridge: float, step: float) -> Weights:
    """The weights after a step: how much the logits of all routers change, over what they are (root mean squares)."""
    changes = {key: own.direction(ridge) for key, own in moments.items()}
    square = sum(moments[key].mean_square(change) for key, change in changes.items())
    own_square = sum(own.mean_square(weights[key].double()) for key, own in moments.items())
    scale = step * math.sqrt(own_square / square) if square > 0 else 0.0
    moved = {key: (weights[key].double() + scale * change).to(weights[key].dtype) for key, change in changes.items()}
    return {**weights, **moved}
