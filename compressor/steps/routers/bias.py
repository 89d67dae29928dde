"""A bias for each expert: where it can go in a stock checkpoint, and the average optimised pathway put there.

It goes into a bias that the router has, or into its weight. T tokens, E experts (and any rows beyond them), H width, L
late MoE layers.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from compressor.evaluation.evaluator import Evaluator
from compressor.model.architecture import MoeLayer
from compressor.model.opened import OpenModel
from compressor.model.router_logits import Product, router_weight, watched
from compressor.model.streaming import LayerVisitor, Pass
from compressor.pathways.answering import Average
from compressor.progress import Progress
from compressor.steps.routers.weights import Calibrated, Step, Weights, evaluate_trials, line_search, ridged

SCALES = (0.25, 0.5, 1.0, 2.0, 4.0)  # of the average, that are tried
LARGEST = 64.0  # a scale that is the best and the largest of those tried is doubled up to here

Kind = Literal["router bias", "selection bias", "router weight"]
RIDGE = 0.01  # of the mean square of a router's inputs


@dataclass(frozen=True, slots=True)
class BiasPlace:
    """The tensor of a layer's router that takes a bias.

    A router bias is added to the logits. A selection bias is added to the scores by which experts are chosen, and
    their weights stay as they are. A router weight takes b u', where u·x is close to 1 for what the router is given:
    `mean` and `deviation` say how close, over all tokens.
    """

    layer: str
    key: str
    kind: Kind
    direction: Tensor | None = None  # u [H]
    mean: float = 1.0
    deviation: float = 0.0

    def moved(self, own: Tensor, logits: Tensor, scores: Tensor) -> Tensor:
        """The tensor `own` with a change of the logits [E] in it; `scores` [E] is what that does to the scores."""
        if self.direction is not None:
            change = torch.outer(logits.double(), self.direction.to(logits.device))
        else:
            change = (scores if self.kind == "selection bias" else logits).double().reshape(own.shape)
        return (own.double() + change).to(own.dtype)


@dataclass(slots=True)
class _Sums:
    """What a layer's router is given: X'X [H, H] and X'1 [H]; and if its product adds a bias."""

    squares: Tensor
    sums: Tensor
    tokens: int = 0
    has_bias: bool = False


@dataclass(slots=True)
class _Inputs(LayerVisitor):
    layers: Sequence[MoeLayer]
    found: dict[str, _Sums] = field(default_factory=dict)
    _watching: ExitStack = field(default_factory=ExitStack)

    def loaded(self, unit: str) -> None:
        for layer in self.at.moe_layers:
            if layer in self.layers:
                self._watching.enter_context(watched(self.at.model, layer, partial(self._add, layer.name)))

    def passed(self, unit: str) -> None:
        self._watching.close()

    def _add(self, name: str, product: Product) -> None:
        x = product.inputs.detach().double()
        if name not in self.found:
            self.found[name] = _Sums(x.new_zeros(x.shape[1], x.shape[1]).cpu(), x.new_zeros(x.shape[1]).cpu())
        sums = self.found[name]
        sums.squares += (x.T @ x).cpu()
        sums.sums += x.sum(0).cpu()
        sums.tokens += len(x)
        sums.has_bias = product.bias is not None


def bias_places(model: OpenModel, layers: Sequence[MoeLayer], batches: Sequence[Tensor]) -> list[BiasPlace]:
    """Where the biases of these MoE layers go, from one streamed pass of some text (token ids [B, L]).

    Layers that text does not reach, as those of images, have none.
    """
    inputs, places = _Inputs(layers), list[BiasPlace]()
    Pass(model, batches, wanted={layer.unit for layer in layers}).run(inputs)
    for layer in layers:
        if (seen := inputs.found.get(layer.name)) is None:
            continue
        biases = [  # tensors outside the experts with a bias for each expert
            tensor.key
            for tensor in layer.tensors
            if tensor.key.startswith(f"{layer.block}.")
            and not tensor.key.startswith(f"{layer.name}.")
            and tensor.key.rpartition(".")[2].endswith("bias")
            and model.partial.empty[tensor.key].numel() == layer.experts + tensor.extra
        ]
        if len(biases) == 1:
            kind: Kind = "router bias" if seen.has_bias else "selection bias"
            places.append(BiasPlace(layer.name, biases[0], kind))
            continue
        direction = torch.linalg.solve(ridged(seen.squares, RIDGE), seen.sums)
        mean = float(direction @ seen.sums) / seen.tokens
        spread = float(direction @ seen.squares @ direction) / seen.tokens - mean**2
        place = BiasPlace(layer.name, router_weight(layer), "router weight", direction, mean, max(spread, 0.0) ** 0.5)
        places.append(place)
    return places


def calibrate_bias(
    model: OpenModel,
    own: Weights,
    places: Sequence[BiasPlace],
    average: Average,
    evaluator: Evaluator,
    progress: Progress,
) -> Calibrated:
    """The tensors `own` with the average pathway in them, at the scale of least KL, if it is accepted.

    `places` are of late layers, whose tensors `own` holds by state-dict key as they are stored.
    """
    progress.start("try the biases", 1)
    late = [layer.name for layer in model.architecture.layers[-len(average.logits) :]]

    def moved(_: float, scale: float) -> Weights:
        weights = dict(own)
        for place in places:
            number = late.index(place.layer)
            logits, scores = scale * average.logits[number], scale * average.scores[number]
            weights[place.key] = place.moved(own[place.key], logits, scores)
        return weights

    before = evaluate_trials(model, evaluator, [own])[0]
    best = line_search(model, evaluator, moved, (0.0,), SCALES, LARGEST)
    progress.advance("")
    step = Step.taken(before, best)
    weights, after = (best.weights, best.figures) if step.step else (own, before)
    return Calibrated(weights, before, after, (step,))
