"""The bake into the router weights: rounds of one gradient, ridge regression and a line search on held-out text.

A round takes the gradient of KL(original || smaller) with respect to all router logits, one streamed pass forward and
back. Per layer, with the router's inputs X [T, H] and these gradients G [T, E], the change of its weight is
-(X'X + a)^-1 X'G (G'G + b)^-1: the ridge solution for logits that go down the gradient, each expert's by the size of
its own gradients (a Kronecker-factored natural gradient). What held-out text likes best is taken, nothing included.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from compressor.calibration.teacher import Distributions, divergence
from compressor.model.architecture import MoeLayer, layers_by_unit
from compressor.model.loading import set_tensor
from compressor.model.opened import OpenModel
from compressor.model.reverse import ReversePass, ReverseVisitor
from compressor.model.streaming import Forward, LayerStream, LayerVisitor
from compressor.pathways.router_logits import Product, router_weight, watched

import os
RIDGES = eval(os.environ.get("R","(0.001, 0.01, 0.1)"))  # of the mean square of what a router is given, and of its gradients
STEPS = eval(os.environ.get("S","(0.02, 0.05, 0.1, 0.2, 0.4)"))  # root mean square of the change of a logit

Weights = Mapping[str, Tensor]  # a router's weight [E, H] by its state-dict key


@dataclass(frozen=True, slots=True)
class Text:
    """Token ids [B, L] of some batches, and what the original expects after each of them."""

    batches: tuple[Tensor, ...]
    original: tuple[Distributions, ...]

    @property
    def tokens(self) -> int:
        return sum(batch.numel() for batch in self.batches)


class _Overlay(ReverseVisitor):
    """Has every router use its present weight, on both ways."""

    def __init__(self, model: OpenModel, weights: Weights) -> None:
        self.model, self.weights = model, weights

    def loaded(self, unit: str) -> None:
        for key in (key for key in self.weights if key.startswith(f"{unit}.")):
            set_tensor(self.model.partial.model, key, self.weights[key].to(self.model.partial.device))


@dataclass(slots=True)
class Moments:
    """Sums over tokens: of what a router is given, of the gradients, and of both."""

    inputs: Tensor | float = 0.0  # [H, H]
    gradients: Tensor | float = 0.0  # [E, E]
    both: Tensor | float = 0.0  # [H, E]
    tokens: int = 0

    def add(self, x: Tensor, g: Tensor) -> None:
        x, g = x.detach().float(), g.reshape(len(x), -1).float()
        self.inputs = self.inputs + (x.T @ x).double()
        self.gradients = self.gradients + (g.T @ g).double()
        self.both = self.both + (x.T @ g).double()
        self.tokens += len(x)

    def directions(self) -> list[Tensor]:
        """[E, H] for each ridge, together with the mean square of the change of a logit."""
        found = []
        for ridge in RIDGES:
            left, right = (value + ridge * value.diagonal().mean() * torch.eye(len(value), dtype=value.dtype) for value in (self.inputs, self.gradients))
            change = torch.linalg.solve(left, self.both)
            change = -torch.linalg.solve(right, change.T)
            found.append(change)
        return found

    def spread(self, change: Tensor) -> float:
        return float(((change @ self.inputs) * change).sum() / self.tokens / len(change))


class _Gradients(ReverseVisitor):
    def __init__(self, model: OpenModel) -> None:
        self.whole, self.layers = model.partial.model, layers_by_unit(model.architecture.layers)
        self.moments: dict[str, Moments] = {}
        self.stack, self.seen = ExitStack(), dict[str, Product]()

    def replaying(self, unit: str, batch: int) -> None:
        self.seen = {}
        for layer in self.layers.get(unit, ()):
            self.stack.enter_context(watched(self.whole, layer, lambda product, layer=layer: self._note(layer, product)))

    def _note(self, layer: MoeLayer, product: Product) -> Tensor:
        if not product.logits.requires_grad:
            product.logits.requires_grad_()
        product.logits.retain_grad()
        self.seen[router_weight(layer)] = product
        return product.logits

    def returned(self, unit: str, batch: int) -> None:
        self.stack.close()
        for key, product in self.seen.items():
            if product.logits.grad is not None:
                self.moments.setdefault(key, Moments()).add(product.inputs, product.logits.grad)
        self.seen = {}


class _Trials(LayerVisitor):
    """Judges several sets of router weights on the same batches in one pass: batch n of trial t is t * batches + n."""

    def __init__(self, model: OpenModel, text: Text, trials: Sequence[Weights]) -> None:
        self.whole, self.text, self.trials = model.partial.model, text, trials
        self.batch, self.found = 0, [[0.0] * len(text.batches) for _ in trials]

    def entering(self, batch: int) -> None:
        self.batch = batch

    def replaced(self, unit: str, own: Forward) -> Forward:
        weights = self.trials[self.batch // len(self.text.batches)]
        for key in (key for key in weights if key.startswith(f"{unit}.")):
            set_tensor(self.whole, key, weights[key])
        return own

    @torch.no_grad()
    def finished(self, batch: int, output: Any) -> None:
        trial, number = divmod(batch, len(self.text.batches))
        self.found[trial][number] = float(divergence(self.text.original[number], output.logits))


def judged(model: OpenModel, text: Text, trials: Sequence[Weights]) -> list[float]:
    """The divergence per token from the original with each of these sets of router weights."""
    units = model.architecture.units
    seen = _Trials(model, text, trials)
    batches = [*text.batches] * len(trials)
    LayerStream(model.partial, batches, units, units, range(len(batches))).run(seen)
    return [sum(values) / text.tokens for values in seen.found]


def bake(model: OpenModel, weights: Weights, fit: Sequence[Text], heldout: Text) -> Weights:
    old = {}
    M = float(os.environ.get("MOM", "0"))
    for number, text in enumerate(fit):
        gradients = _Gradients(model)
        overlay = _Overlay(model, weights)
        ReversePass(model.partial, text.batches, model.architecture.units).run(
            lambda batch, output, text=text: divergence(text.original[batch], output.logits), overlay, gradients
        )
        for key, moments in gradients.moments.items():
            if key in old and M:
                for f in ("inputs", "gradients", "both", "tokens"): setattr(moments, f, getattr(moments, f) + M * getattr(old[key], f))
        old = gradients.moments
        changes = {key: moments.directions() for key, moments in gradients.moments.items()}
        trials = [weights]
        names = ["zero"]
        for place, ridge in enumerate(RIDGES):
            spread = sum(gradients.moments[key].spread(entry[place]) for key, entry in changes.items()) / len(changes)
            print(ridge, [gradients.moments[key].spread(entry[place])**.5/ spread**.5 for key, entry in changes.items()])
            for step in STEPS:
                scale = step / spread**0.5
                trials.append({key: weights[key] + (scale * changes[key][place]).to(weights[key].dtype) for key in weights})
                names.append((ridge, step))
        found = judged(model, heldout, trials)
        best = min(range(len(found)), key=lambda place: found[place])
        print(number, "zero", found[0], "best", names[best], found[best], "gain", found[0] - found[best])
        for place, ridge in enumerate(RIDGES):
            print("   ", ridge, [round(found[0] - f, 5) for f, n in zip(found, names) if n[0] == ridge])
        weights = trials[best]
    return weights
