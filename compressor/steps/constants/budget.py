"""How many experts each layer gives up: as many in every layer, or more where the model loses least on held-out text.

A layer's cost is a curve: what replacing its 1, 2, 3 ... most replaceable experts costs the whole model. It is measured
at a few numbers, and between two of them it grows with what the constants miss, sum g^2 ||o - c||^2. Errors grow on
their way through the layers, and those of several layers do not simply add up. So the division that the curves ask for
is then moved an expert at a time by measurements of the whole, and taken where it is nearer to the base than the even
one by the rule of `compressor.evaluation.evaluator.accepts`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from compressor.evaluation.evaluator import Evaluator, Figures, accepts, require_enough
from compressor.model.architecture import MoeLayer
from compressor.model.opened import OpenModel
from compressor.progress import Progress
from compressor.steps.constants.measure import LayerConstants, Substituting, replacing

PROBED = 4096  # held-out tokens that curves are measured on, at least
ROUNDS = 4  # of moving experts between layers
EVEN, UNEVEN = "even", "uneven"
REMEDY = "calibrate on more sequences (--samples, 16 at the least), or pass --budget even"

Curve = NDArray[np.float64]  # [most + 1]: the cost of 0, 1, 2 ... experts less
Protected = Mapping[str, frozenset[int]]  # by experts module


def spare(layer: MoeLayer, protected: Protected) -> int:
    """How many experts of a layer can become constants at the most."""
    return layer.experts - max(layer.top_k, len(protected.get(layer.name, ())), 1)


def probed_numbers(most: int, experts: int) -> tuple[int, ...]:
    """At which numbers of replaced experts a layer's curve is measured: quarters of its experts, and all it can spare.

    `most` of its `experts` can go.
    """
    quarters = {max(1, round(experts * share)) for share in (0.25, 0.5, 0.75)}
    return tuple(sorted(number for number in quarters | {most} if 0 < number <= most))


def curve(missed: Sequence[float], measured: Mapping[int, float]) -> Curve:
    """Costs of 0, 1 ... experts less, from what the constants miss of each, ascending [most], and measured costs.

    No further expert makes it cheaper: what says so is noise.
    """
    summed = np.concatenate([[0.0], np.cumsum(np.asarray(missed, dtype=np.float64))])
    costs = np.zeros(len(summed))
    places = [0, *sorted(measured)]
    known = np.maximum.accumulate([0.0, *(measured[place] for place in places[1:])])
    for number, (begin, end) in enumerate(pairwise(places)):
        inside = np.arange(begin + 1, end + 1)
        width = summed[end] - summed[begin]
        share = (summed[inside] - summed[begin]) / width if width > 0 else (inside - begin) / (end - begin)
        costs[inside] = known[number] + share * (known[number + 1] - known[number])
    return costs


def even_numbers(removed: int, most: Sequence[int]) -> list[int]:
    """As many from every layer, as far as `removed` divides and each can spare them; the last layers give the rest."""
    numbers = [0] * len(most)
    left = removed
    while left > 0:
        open_layers = [place for place, number in enumerate(numbers) if number < most[place]]
        for place in open_layers[-left:]:
            numbers[place] += 1
            left -= 1
    return numbers


def cheapest_numbers(curves: Sequence[Curve], removed: int) -> list[int]:
    """How many of each layer, `removed` in all, at the least sum of costs: exact, by dynamic programming.

    Ties break towards fewer from the earlier layers.
    """
    best = np.full(removed + 1, np.inf)
    best[0] = 0.0
    chosen = np.zeros((len(curves), removed + 1), dtype=np.int64)
    for layer, costs in enumerate(curves):
        fresh = np.full(removed + 1, np.inf)
        for number in range(min(len(costs) - 1, removed) + 1):
            tried = best[: removed + 1 - number] + costs[number]
            better = tried < fresh[number:]
            fresh[number:][better] = tried[better]
            chosen[layer, number:][better] = number
        best = fresh
    numbers, left = [0] * len(curves), removed
    for layer in reversed(range(len(curves))):
        numbers[layer] = int(chosen[layer, left])
        left -= numbers[layer]
    return numbers


def halfway(one: Sequence[int], other: Sequence[int]) -> list[int]:
    """Numbers between two divisions of the same sum, with that sum."""
    doubled = [a + b for a, b in zip(one, other, strict=True)]
    numbers = [value // 2 for value in doubled]
    odd = [place for place, value in enumerate(doubled) if value % 2]
    for place in odd[len(odd) // 2 :]:
        numbers[place] += 1
    return numbers


@dataclass(slots=True)
class _Search:
    """Measures divisions of the same sum, numbers in the order of the layers, each of them once."""

    model: OpenModel
    constants: Mapping[str, LayerConstants]
    protected: Protected
    most: Sequence[int]
    evaluator: Evaluator
    progress: Progress
    figures: dict[tuple[int, ...], Figures] = field(default_factory=dict)

    def measure(
        self, divisions: Sequence[Sequence[int]], phase: str, only: Sequence[int] | None = None
    ) -> list[Figures]:
        """Figures of each division's model, on all held-out batches or on those of these numbers."""
        if not divisions:
            return []
        layers = self.model.architecture.layers
        variants = [replacing(layers, self.constants, numbers, self.protected) for numbers in divisions]
        visitor = Substituting(self.model, variants)
        return self.evaluator.measure(self.model, visitor, len(variants), self.progress, phase, only)

    def consider(self, divisions: Sequence[Sequence[int]]) -> None:
        """Measure on all held-out text what has not been."""
        fresh = [key for key in dict.fromkeys(map(tuple, divisions)) if key not in self.figures]
        self.figures.update(zip(fresh, self.measure(fresh, "evaluate divisions"), strict=True))

    def kl(self, division: Sequence[int]) -> float:
        """KL from the base of a division that has been measured, nats per token."""
        return self.figures[tuple(division)].means["kl"]

    @property
    def best(self) -> tuple[int, ...]:
        """The division of least KL so far; the first one measured among equals."""
        return min(self.figures, key=self.kl)

    def curves(self) -> list[Curve]:
        """Each layer's cost of replacing 0, 1 ... experts while all others stay as they are."""
        layers, batches = self.model.architecture.layers, self.evaluator.batches
        trials = [
            (place, number)
            for place, layer in enumerate(layers)
            for number in probed_numbers(self.most[place], layer.experts)
        ]
        alone = [[number if place == own else 0 for place in range(len(layers))] for own, number in trials]
        before = np.cumsum([0, *(batch.numel() for batch in batches)])  # tokens of the batches before each
        few = [number for number in range(len(batches)) if before[number] < PROBED]
        measured = self.measure(alone, "measure curves", few)
        costs: list[dict[int, float]] = [{} for _ in layers]
        for (place, number), figures in zip(trials, measured, strict=True):
            costs[place][number] = figures.means["kl"]
        missed = [
            self.constants[layer.name].least_missed(most, self.protected.get(layer.name, frozenset()))
            for layer, most in zip(layers, self.most, strict=True)
        ]
        return list(map(curve, missed, costs))

    def moved(self, step: int) -> list[list[int]]:
        """Divisions in which the layers that cost least give `step` more, those that cost most as many fewer."""
        best, base = self.best, self.kl(self.best)
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
        divisions, numbers, used = list[list[int]](), list(best), set[int]()
        for (more, giver), (less, taker) in zip(giving, taking, strict=False):
            if more + less >= 0 or {giver, taker} & used or giver == taker:
                break
            used |= {giver, taker}
            numbers[giver], numbers[taker] = numbers[giver] + step, numbers[taker] - step
            divisions.append([*numbers])
        return divisions


def divide(
    model: OpenModel,
    constants: Mapping[str, LayerConstants],
    removed: int,
    protected: Protected,
    heldout: Sequence[torch.Tensor],
    progress: Progress,
) -> tuple[list[int], dict[str, Any]]:
    """How many experts of each layer become constants, `removed` in all, at the least KL on `heldout` [B, L] batches.

    Every layer keeps its top-k and its protected experts. Returns the numbers in the order of the layers, and how they
    were chosen. Raises `CompressionError` for fewer than eight held-out sequences.
    """
    evaluator = Evaluator.of(model, heldout)
    require_enough(evaluator.sequences, "an uneven budget", REMEDY)
    layers = model.architecture.layers
    most = [spare(layer, protected) for layer in layers]
    search = _Search(model, constants, protected, most, evaluator, progress)
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
    if not accepts(search.figures[tuple(even)], search.figures[best]):
        best = tuple(even)
    kinds = {tuple(even): EVEN, tuple(alone): "curves", tuple(wary): "squared curves"}
    return list(best), {
        "heldout_tokens": sum(batch.numel() for batch in evaluator.batches),
        "heldout_kl_even": round(search.kl(even), 6),
        "heldout_kl_chosen": round(search.kl(best), 6),
        "chosen": kinds.get(best, "moved"),
        "divisions_judged": len(search.figures),
    }
