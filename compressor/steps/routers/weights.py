"""New router weights or biases toward the base, by line search on held-out text. T tokens, E
experts, H width.

C3PO (arXiv:2504.07964) optimises which experts a test sample is routed to. Here all routers of the
smaller model are moved once, for all text, and what the evaluator does not accept is left. Either
the weights go, in rounds, down the gradient of KL(base || smaller) with respect to the router
logits of all layers and tokens, which ridge regression carries into them. Or the average optimised
pathway of the L late MoE layers goes into a bias that their routers have, or else into their
weights. Beyond the E experts a router may score further rows."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from compressor.data.emphasis import PLAIN, Emphasis
from compressor.devices import as_float64
from compressor.distributed import ranks
from compressor.divergence.evaluator import Difference, Evaluator, Figures
from compressor.divergence.teacher_outputs import Distributions, top_divergence
from compressor.frozen import frozen
from compressor.model.loading import set_tensor
from compressor.model.moe_layer import MoeLayer
from compressor.model.opened import OpenModel
from compressor.model.router_logits import Product, router_weight, watched
from compressor.model.streaming import TINY, LayerVisitor, Pass, ReversePass, ReverseVisitor
from compressor.model.substitution import LayerTensors, Substitution
from compressor.progress import Progress

RIDGES = (0.01, 1.0)  # of the mean square of a router's inputs, and of its logits' gradients
# root mean square of the change of a logit, over that of the logits
STEPS = (0.0125, 0.025, 0.05, 0.1, 0.2)
NEAR = (0.5, 1.0, 2.0)  # of the step taken before, those tried in later rounds
LARGEST = 2.0  # a step that is the best and the longest of those tried is doubled up to here
SCALES = (0.25, 0.5, 1.0, 2.0, 4.0)  # of the average pathway, that are tried
LARGEST_SCALE = 64.0  # as `LARGEST`
RIDGE = 0.01  # of the mean square of a router's inputs, for a bias that goes into its weight

# routers' tensors, such as weights [E, H], as they are stored, by state-dict key
Weights = Mapping[str, Tensor]
# This rank's token ids [B, L], and the base's distributions after each.
Answered = Sequence[tuple[Tensor, Distributions]]


@frozen
class RouterTrial:
    """A choice, the router tensors that it leads to, and their figures on held-out text."""

    ridge: float
    step: float
    weights: Weights
    figures: Figures


@frozen
class Round:
    """The step that a round took, and its gain in KL on held-out text in nats per token; zeros for
    nothing."""

    ridge: float = 0.0
    step: float = 0.0
    gain: float = 0.0
    standard_error: float = 0.0

    @classmethod
    def of(cls, before: Figures, trial: RouterTrial, forced: bool = False) -> "Round":
        """Return the step of a trial, if its gain is accepted or it is forced; else one of zero."""
        gained = Difference.of(before.kl, trial.figures.kl)
        if not forced and not gained.accepted:
            return cls()
        return cls(trial.ridge, trial.step, gained.gain, gained.standard_error)


@frozen
class Calibrated:
    """New router tensors, with figures on held-out text before and after, and other facts."""

    weights: Weights
    before: Figures
    after: Figures
    steps: tuple[Round, ...]
    details: Mapping[str, Any] = field(default_factory=dict)


def _layer_tensors(model: OpenModel, weights: Weights) -> LayerTensors:
    """Return these router tensors by decoder layer, in the dtype of the model's own."""

    def tensors(decoder_layer: str) -> Weights | None:
        changed = {}
        for key, weight in weights.items():
            if key.startswith(f"{decoder_layer}."):
                present = model.partial.model.get_parameter_or_buffer(key)
                changed[key] = weight.to(present.device, present.dtype)
        return changed or None

    return tensors


class _Substituted(ReverseVisitor):
    """Puts tensors into the live model for a pass with gradients."""

    def __init__(self, tensors: LayerTensors) -> None:
        self.tensors = tensors

    def on_layer_loaded(self, decoder_layer: str) -> None:
        for key, value in (self.tensors(decoder_layer) or {}).items():
            set_tensor(self.at.model, key, value)


def evaluate_trials(
    model: OpenModel, evaluator: Evaluator, trials: Sequence[Weights]
) -> list[Figures]:
    variants = [Substitution(_layer_tensors(model, weights)) for weights in trials]
    return evaluator.measure(model, variants)


def calibrate_weights(
    model: OpenModel,
    weights: Weights,
    fit: Sequence[Answered],
    evaluator: Evaluator,
    progress: Progress,
    emphasis: Emphasis = PLAIN,
    forced: bool = False,
) -> Calibrated:
    """Move the router weights of a smaller model, a round for each text of `fit`; the best accepted
    ones are kept.

    If `forced`, each round's best step is taken even where it is no gain. Gradients are of the KL
    of all tokens, each times its emphasis. Raises `CompressionError` for an architecture through
    which no gradients go layer by layer."""
    progress.start("calibrate the routers", len(fit))
    before = best = evaluate_trials(model, evaluator, [weights])[0]
    rounds = []
    steps: Sequence[float] = STEPS
    for text in fit:
        moved = partial(_moved, weights, _moments(model, weights, text, emphasis))
        trial = line_search(model, evaluator, moved, RIDGES, steps, LARGEST)
        rounds.append(Round.of(best, trial, forced))
        around = trial.step / 2
        if rounds[-1].step:
            around = trial.step
            weights = trial.weights
            best = trial.figures
        steps = [near * around for near in NEAR]
        progress.advance("round")
    return Calibrated(weights, before, best, tuple(rounds))


@dataclass
class Moments:
    """X'X [H, H], X'G [H, E] and G'G [E, E] of a router's inputs X [T, H] and its logits' gradients
    G [T, E]."""

    inputs: Tensor
    both: Tensor
    gradients: Tensor
    tokens: int = 0

    @classmethod
    def empty(cls, width: int, rows: int) -> "Moments":
        """Return the moments before any token, in float64."""
        sizes = ((width, width), (width, rows), (rows, rows))
        inputs, both, gradients = (torch.zeros(size, dtype=torch.float64) for size in sizes)
        return cls(inputs, both, gradients)

    def add(self, x: Tensor, g: Tensor) -> None:
        """Take in some tokens' inputs [T, H] and gradients [T, E]."""
        self.inputs += (x.T @ x).cpu()
        self.both += (x.T @ g).cpu()
        self.gradients += (g.T @ g).cpu()
        self.tokens += len(x)

    def direction(self, ridge: float) -> Tensor:
        """[E, H]: -(G'G + b)^-1 G'X (X'X + a)^-1, the way down in the metric of inputs and
        gradients.

        It is the ridge solution for logits that follow the negative gradient, preconditioned on the
        right (Kronecker- factored curvature). a and b are `ridge` times the mean of each diagonal.
        """
        inner = torch.linalg.solve(ridged(self.inputs, ridge), self.both)
        change: Tensor = torch.linalg.solve(ridged(self.gradients, ridge), inner.T)
        return -change

    def mean_square(self, change: Tensor) -> float:
        """Mean square of what a change [E, H] of the weight adds to a logit."""
        return float(((change @ self.inputs) * change).sum()) / (self.tokens * len(change))


def ridged(square: Tensor, ridge: float) -> Tensor:
    """Return a matrix of moments with that share of its mean diagonal added to the diagonal."""
    added = ridge * square.diagonal().mean().clamp_min(TINY)
    return square + added * torch.eye(len(square), dtype=square.dtype)


class RouterGradients(ReverseVisitor):
    """Moments of every router that gradients reach, by its weight's state-dict key, added up over
    ranks."""

    def __init__(self) -> None:
        # of the present layer's routers, on this rank's batches
        self.moments: dict[str, Moments] = {}
        self._watching = ExitStack()
        self._seen = list[tuple[str, Product]]()

    def before_reverse(self, decoder_layer: str, batch: int) -> None:
        self._seen = []
        for layer in self.at.moe_layers:
            note = partial(self._note, router_weight(layer))
            self._watching.enter_context(watched(self.at.model, layer, note))

    def _note(self, key: str, product: Product) -> Tensor:
        logits = product.logits
        if not logits.requires_grad:  # in the first layer, nothing before it needs gradients
            logits = logits.detach().requires_grad_()
        logits.retain_grad()
        self._seen.append((key, Product(product.inputs, logits, product.weight)))
        return logits

    def on_gradient(self, decoder_layer: str, batch: int) -> None:
        self._watching.close()
        for key, product in self._seen:
            gradient = product.logits.grad
            if gradient is None:
                continue  # the chosen experts' scores have no effect
            x = as_float64(product.inputs.detach())
            g = as_float64(gradient.reshape(len(x), -1))
            self.moments.setdefault(key, Moments.empty(x.shape[1], g.shape[1])).add(x, g)

    def on_reverse_end(self, decoder_layer: str) -> None:
        """Add up the moments of the layer's routers over all ranks."""
        for layer in self.at.moe_layers:
            key = router_weight(layer)
            rows, width = self.at.model.get_parameter(key).shape
            moments = self.moments.pop(key, Moments.empty(width, rows))
            inputs, both, gradients = map(
                ranks().all_reduce, (moments.inputs, moments.both, moments.gradients)
            )
            tokens = int(ranks().all_reduce(torch.tensor(moments.tokens)))
            if tokens:
                self.moments[key] = Moments(inputs, both, gradients, tokens)


def _moments(
    model: OpenModel, weights: Weights, text: Answered, emphasis: Emphasis
) -> dict[str, Moments]:
    def loss(batch: int, output: Any) -> Tensor:
        tokens, base = text[batch]
        counting = emphasis.loss_weights(tokens).to(output.logits.device)
        return (top_divergence(base, output.logits) * counting).sum()

    gradients = RouterGradients()
    substituted = _Substituted(_layer_tensors(model, weights))
    ReversePass(model, [tokens for tokens, _ in text]).run(loss, substituted, gradients)
    return gradients.moments


def line_search(
    model: OpenModel,
    evaluator: Evaluator,
    moved: Callable[[float, float], Weights],
    ridges: Sequence[float],
    steps: Sequence[float],
    largest: float,
) -> RouterTrial:
    """Return the `moved(ridge, step)` of least KL on held-out text.

    A largest step that wins is doubled up to `largest`.
    """

    choices = [(ridge, step) for ridge in ridges for step in steps]
    longest = max(steps)
    trials = []
    while True:
        weights = [moved(*choice) for choice in choices]
        measured = evaluate_trials(model, evaluator, weights)
        for choice, tried, figures in zip(choices, weights, measured, strict=True):
            trials.append(RouterTrial(*choice, tried, figures))
        best = min(trials, key=lambda trial: trial.figures.means["kl"])
        if best.step != longest or 2 * longest > largest:
            return best
        trials = [best]
        longest *= 2
        choices = [(best.ridge, longest)]


def _moved(weights: Weights, moments: Mapping[str, Moments], ridge: float, step: float) -> Weights:
    """The weights after a step: how much the logits of all routers change, over what they are (root
    mean squares)."""
    changes = {key: of_router.direction(ridge) for key, of_router in moments.items()}
    change_square = sum(moments[key].mean_square(change) for key, change in changes.items())
    logit_square = sum(
        of_router.mean_square(as_float64(weights[key])) for key, of_router in moments.items()
    )
    scale = step * math.sqrt(logit_square / change_square) if change_square > 0 else 0.0
    moved = dict(weights)
    for key, change in changes.items():
        moved[key] = (as_float64(weights[key]) + scale * change).to(weights[key].dtype)
    return moved


@frozen
class RouterShift:
    """Mean change of the late layers' router logits and of their scores, over all items (both [L,
    E]).

    `agreement` is the root mean square of the mean change of a logit over that of the changes of
    single items."""

    logits: Tensor
    scores: Tensor
    items: int
    agreement: float


@frozen
class BiasPlace:
    """The tensor of a layer's router that takes a bias.

    A router bias is added to the logits. A selection bias is added to the scores by which experts
    are chosen, and their weights stay as they are. A router weight takes b u', where u·x is close
    to 1 for what the router is given: `mean` and `deviation` say how close, over all tokens."""

    layer: str
    key: str
    kind: str  # router bias, selection bias or router weight
    direction: Tensor | None = None  # u [H]
    mean: float = 1.0
    deviation: float = 0.0

    def moved(self, tensor: Tensor, logits: Tensor, scores: Tensor) -> Tensor:
        """Return the tensor with a change of the logits [E] in it; `scores` [E] is what that does
        to the scores."""
        if self.direction is not None:
            change = torch.outer(as_float64(logits).cpu(), self.direction.cpu())
        else:
            added = scores if self.kind == "selection bias" else logits
            change = as_float64(added).cpu().reshape(tensor.shape)
        return (as_float64(tensor).cpu() + change).to(tensor.dtype)


@dataclass
class _Inputs(LayerVisitor):
    """X'X and X'1 of each router's inputs, and the layers whose product adds a bias."""

    layers: Sequence[MoeLayer]
    moments: dict[str, Moments] = field(default_factory=dict)
    biased: set[str] = field(default_factory=set)
    _watching: ExitStack = field(default_factory=ExitStack)

    def on_layer_loaded(self, decoder_layer: str) -> None:
        for layer in self.at.moe_layers:
            if layer in self.layers:
                self._watching.enter_context(
                    watched(self.at.model, layer, partial(self._add, layer.name))
                )

    def on_layer_end(self, decoder_layer: str) -> None:
        self._watching.close()

    def _add(self, name: str, product: Product) -> None:
        x = as_float64(product.inputs.detach())
        self.moments.setdefault(name, Moments.empty(x.shape[1], 1)).add(x, x.new_ones(len(x), 1))
        if product.bias is not None:
            self.biased.add(name)


def bias_places(
    model: OpenModel, layers: Sequence[MoeLayer], batches: Sequence[Tensor]
) -> list[BiasPlace]:
    """Find where these layers' biases go, by a streamed pass of text [B, L]; layers that it misses
    have no place."""
    inputs = _Inputs(layers)
    places = []
    Pass(model, batches, wanted={layer.decoder_layer for layer in layers}).run(inputs)
    for layer in layers:
        if layer.name not in inputs.moments:
            continue
        moments = inputs.moments[layer.name]
        biases = [  # tensors outside the experts with a bias for each expert
            tensor.key
            for tensor in layer.tensors
            if tensor.key.endswith("bias")
            and not tensor.key.startswith(f"{layer.name}.")
            and model.partial.empty[tensor.key].numel() == layer.experts + tensor.extra
        ]
        if len(biases) == 1:
            kind = "router bias" if layer.name in inputs.biased else "selection bias"
            places.append(BiasPlace(layer.name, biases[0], kind))
            continue
        direction = torch.linalg.solve(ridged(moments.inputs, RIDGE), moments.both[:, 0])
        mean = float(direction @ moments.both[:, 0]) / moments.tokens
        spread = float(direction @ moments.inputs @ direction) / moments.tokens - mean**2
        deviation = max(spread, 0.0) ** 0.5
        places.append(
            BiasPlace(layer.name, router_weight(layer), "router weight", direction, mean, deviation)
        )
    return places


def calibrate_bias(
    model: OpenModel,
    stored: Weights,
    places: Sequence[BiasPlace],
    average: RouterShift,
    evaluator: Evaluator,
    progress: Progress,
    forced: bool = False,
) -> Calibrated:
    """Return the late layers' tensors with the average pathway in them, at the scale of least KL.

    They stay as they are unless it is accepted or `forced`.
    """
    progress.start("try the biases", 1)
    late = [layer.name for layer in model.architecture.layers[-len(average.logits) :]]

    def moved(_: float, scale: float) -> Weights:
        weights = dict(stored)
        for place in places:
            number = late.index(place.layer)
            logits = scale * average.logits[number]
            scores = scale * average.scores[number]
            weights[place.key] = place.moved(stored[place.key], logits, scores)
        return weights

    before = evaluate_trials(model, evaluator, [stored])[0]
    best = line_search(model, evaluator, moved, (0.0,), SCALES, LARGEST_SCALE)
    progress.advance("")
    step = Round.of(before, best, forced)
    if step.step:
        return Calibrated(best.weights, before, best.figures, (step,))
    return Calibrated(stored, before, before, (step,))
