"""Layers that keep different numbers of experts, chosen by what the whole model loses on held-out text.

Errors grow on their way through the layers, and those of several layers do not simply add up, so two things are
measured to the model's end: every layer's own curve first, then, at the best division found, one more and one fewer
expert of each layer. The division nearest to the base on held-out text is taken where it is nearer than the even one
by the rule of `compressor.evaluation.evaluator.accepts`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from compressor.evaluation.evaluator import Evaluator, Figures, accepts, require_enough
from compressor.model.architecture import MoeLayer
from compressor.model.opened import OpenModel
from compressor.progress import Progress
from compressor.steps.constants.budget import Curve, cheapest_numbers, curve, even_numbers, halfway, probed_numbers
from compressor.steps.constants.measure import LayerConstants, replacing
from compressor.steps.constants.variants import Substituting

PROBED = 4096  # held-out tokens that curves are measured on, at least
ROUNDS = 4  # of moving experts between layers
EVEN = "even"
REMEDY = "calibrate on more sequences (--samples, 16 at the least), or pass --budget even"


@dataclass(frozen=True, slots=True)
class Division:
    """Experts replaced in each layer, by experts module, and how the choice came about."""

    numbers: Mapping[str, int]
    figures: Mapping[str, Any]


@dataclass(slots=True)
class _Search:
    """Measures divisions of the same sum, numbers in the order of the layers, each of them once."""

    model: OpenModel
    constants: Mapping[str, LayerConstants]
    protected: Mapping[str, frozenset[int]]
    most: Sequence[int]
    evaluator: Evaluator
    progress: Progress
    found: dict[tuple[int, ...], Figures]

    @property
    def layers(self) -> tuple[MoeLayer, ...]:
        return self.model.architecture.layers

    def measure(
        self, divisions: Sequence[Sequence[int]], phase: str, only: Sequence[int] | None = None
    ) -> list[Figures]:
        """Figures of each division's model, on all held-out batches or on those of these numbers."""
        if not divisions:
            return []
        variants = [replacing(self.layers, self.constants, numbers, self.protected) for numbers in divisions]
        visitor = Substituting(self.model, variants)
        return self.evaluator.measure(self.model, visitor, len(variants), self.progress, phase, only)

    def consider(self, divisions: Sequence[Sequence[int]]) -> None:
        """Measure on all held-out text what has not been."""
        fresh = [key for key in dict.fromkeys(map(tuple, divisions)) if key not in self.found]
        self.found.update(zip(fresh, self.measure(fresh, "evaluate divisions"), strict=True))

    def kl(self, division: Sequence[int]) -> float:
        """KL from the base of a division that has been measured, nats per token."""
        return self.found[tuple(division)].means["kl"]

    @property
    def best(self) -> tuple[int, ...]:
        """The division of least KL so far; the first one measured among equals."""
        return min(self.found, key=self.kl)

    def curves(self) -> list[Curve]:
        """Each layer's cost of replacing 0, 1 ... experts while all others stay as they are."""
        trials: list[tuple[int, int]] = [
            (place, number)
            for place, layer in enumerate(self.layers)
            for number in probed_numbers(self.most[place], layer.experts)
        ]
        alone = [[number if place == own else 0 for place in range(len(self.most))] for own, number in trials]
        measured = self.measure(alone, "measure curves", self._few())
        found = {trial: figures.means["kl"] for trial, figures in zip(trials, measured, strict=True)}
        made = []
        for place, layer in enumerate(self.layers):
            own = self.constants[layer.name]
            chosen = [n for n in own.order if n not in self.protected.get(layer.name, frozenset())]
            missed = own.missed[chosen[: self.most[place]]].tolist()
            made.append(curve(missed, {n: kl for (p, n), kl in found.items() if p == place}))
        return made

    def moved(self, step: int) -> list[list[int]]:
        """Divisions in which the layers that cost least give `step` more, those that cost most as many fewer."""
        best, base = list(self.best), self.kl(self.best)
        changes = [
            (place, change)
            for place in range(len(best))
            for change in (step, -step)
            if 0 <= best[place] + change <= self.most[place]
        ]
        tried = [[number + (change if place == p else 0) for p, number in enumerate(best)] for place, change in changes]
        costs = [figures.means["kl"] - base for figures in self.measure(tried, "measure moves")]
        giving = sorted((cost, place) for cost, (place, change) in zip(costs, changes, strict=True) if change > 0)
        taking = sorted((cost, place) for cost, (place, change) in zip(costs, changes, strict=True) if change < 0)
        found, numbers, used = list[list[int]](), best, set[int]()
        for (more, giver), (less, taker) in zip(giving, taking, strict=False):
            if more + less >= 0 or {giver, taker} & used or giver == taker:
                break
            used |= {giver, taker}
            numbers = list(numbers)
            numbers[giver], numbers[taker] = numbers[giver] + step, numbers[taker] - step
            found.append(numbers)
        return found

    def _few(self) -> list[int]:
        """Numbers of the first held-out batches, of `PROBED` tokens."""
        taken, tokens = list[int](), 0
        for number, batch in enumerate(self.evaluator.batches):
            if tokens < PROBED:
                taken.append(number)
                tokens += batch.numel()
        return taken


def divide(
    model: OpenModel,
    constants: Mapping[str, LayerConstants],
    removed: int,
    protected: Mapping[str, frozenset[int]],
    heldout: Sequence[torch.Tensor],
    progress: Progress,
    evaluator: Evaluator | None = None,
) -> Division:
    """How many experts of each layer become constants, `removed` in all, at the least KL on `heldout` [B, L] batches.

    Every layer keeps its top-k and its protected experts. Measured is with the `evaluator`, if one is given. Raises
    `CompressionError` for fewer than eight held-out sequences.
    """
    evaluator = evaluator or Evaluator.of(model, heldout)
    require_enough(evaluator.sequences, "an uneven budget", REMEDY)
    layers = model.architecture.layers
    most = [spare(layer, protected) for layer in layers]
    search = _Search(model, constants, protected, most, evaluator, progress, {})
    even = even_numbers(removed, most)
    curves = search.curves()
    alone = cheapest_numbers(curves, removed)
    wary = cheapest_numbers([costs**2 for costs in curves], removed)
    search.consider([even, alone, wary, halfway(even, alone), halfway(even, wary)])
    step = max(1, layers[0].experts // 16)
    for _ in range(ROUNDS):
        before = search.best
        search.consider(search.moved(step))
        if search.best == before:
            if step == 1:
                break
            step = max(1, step // 2)
    best = search.best
    if not accepts(search.found[tuple(even)], search.found[best]):
        best = tuple(even)
    kinds = {tuple(even): EVEN, tuple(alone): "curves", tuple(wary): "squared curves"}
    figures = {
        "heldout_tokens": sum(batch.numel() for batch in evaluator.batches),
        "heldout_kl_even": round(search.kl(even), 6),
        "heldout_kl_chosen": round(search.kl(best), 6),
        "chosen": kinds.get(best, "moved"),
        "divisions_judged": len(search.found),
    }
    return Division({layer.name: number for layer, number in zip(layers, best, strict=True)}, figures)


def spare(layer: MoeLayer, protected: Mapping[str, frozenset[int]]) -> int:
    """How many experts of a layer can become constants at the most."""
    return layer.experts - max(layer.top_k, len(protected.get(layer.name, ())), 1)
