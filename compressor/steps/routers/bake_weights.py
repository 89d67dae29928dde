"""The bake into the router weights: rounds of one gradient, ridge regression and a line search on held-out text.

C3PO (arXiv:2504.07964) optimises which experts a test sample visits. Here all routers of the smaller model are moved
once, for all text: down the gradient of KL(original || smaller) with respect to the router logits of all layers and
tokens, which ridge regression carries into the router weights. What held-out text likes best is taken, and nothing
is changed where it likes that best.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from compressor.distributed.present import here
from compressor.model.opened import OpenModel
from compressor.model.reverse import ReversePass, ReverseVisitor
from compressor.progress import Progress
from compressor.steps.routers.judging import Baked, Step, Text, Weights, gained, judged, put
from compressor.steps.routers.router_moments import Moments, RouterGradients

RIDGES = (0.01, 1.0)  # of the mean square of a router's inputs, and of its logits' gradients
STEPS = (0.0125, 0.025, 0.05, 0.1, 0.2)  # root mean square of the change of a logit, over that of the logits
NEAR = (0.5, 1.0, 2.0)  # of the step taken before, those tried in later rounds
LARGEST = 2.0  # a step that is the best and the longest of those tried is doubled up to here


class _Using(ReverseVisitor):
    """Has every router use these weights on both ways of a pass."""

    def __init__(self, model: OpenModel, weights: Weights) -> None:
        self.model, self.weights = model, weights

    def loaded(self, unit: str) -> None:
        put(self.model, unit, self.weights)


def bake_weights(model: OpenModel, weights: Weights, fit: Sequence[Text], heldout: Text, progress: Progress) -> Baked:
    """Move the router weights of a smaller model, a round for each text of `fit`; what `heldout` likes best is kept.

    Raises `CompressionError` for an architecture through which no gradients go layer by layer.
    """
    progress.start("bake into the routers", len(fit))
    before = now = judged(model, heldout, [weights])[0]
    steps, taken = list[Step](), None
    for text in fit:
        trial = _best(model, weights, _moments(model, weights, text), heldout, taken)
        if (step := gained(now, trial.found, trial.ridge, trial.step)).step:
            taken, weights, now = trial.step, trial.weights, trial.found
        else:
            taken = trial.step / 2
        steps.append(step)
        progress.advance("round")
    return Baked(weights, float(before.mean()), float(now.mean()), tuple(steps))


def _moments(model: OpenModel, weights: Weights, text: Text) -> dict[str, Moments]:
    gradients = RouterGradients(model, here().owners(text.batches))
    run = ReversePass(model.partial, [text.batches[number] for number in text.own], model.architecture.units)
    run.run(
        lambda batch, output: text.divergence(text.own[batch], output.logits).sum(), _Using(model, weights), gradients
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
