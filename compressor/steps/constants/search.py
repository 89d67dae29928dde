"""Constants of experts: measured, divided over layers, and refitted (MoNE, arXiv:2507.00390).

An expert with output o and gate weight g adds g o to a token. The constant c that misses least of
it over all tokens, sum g^2 ||o - c||^2, is c = sum g^2 o / sum g^2, and leaves sum g^2 ||o||^2 -
||sum g^2 o||^2 / sum g^2. The paper takes the plain mean of o and chooses by its variance and by
the expert's routed tokens.

Layers give up as many experts each, or more where the model loses least on held-out text. A layer's
cost is a curve: what replacing its 1, 2, 3 ... most replaceable experts costs the whole model. It
is measured at a few numbers, and between two of them it grows with what the constants miss. Errors
grow on their way through the layers, and those of several layers do not simply add up. So the
division of least cost is then moved an expert at a time by measurements of the whole, and taken
where it is nearer to the base than the even one (`compressor.divergence.evaluator.accepts`)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from compressor.data.batches import Calibration
from compressor.divergence.evaluator import (
    Evaluator,
    Figures,
    HeldoutProbe,
    accepts,
    require_enough,
)
from compressor.errors import CompressionError
from compressor.model.constant_experts import Substitutes
from compressor.model.moe_layer import MoeLayer
from compressor.model.opened import OpenModel
from compressor.model.substitution import Substitution
from compressor.progress import Progress
from compressor.recipe.plan import LayerPlan
from compressor.statistics.statistics import LayerStatistics, collect
from compressor.steps.correct.options import Correct
from compressor.steps.correct.sequential import LayerWork, compress_sequentially
from compressor.steps.cutting import CutFiles
from compressor.steps.prune.planning import Protected
from compressor.tensor_cache import load_tensors, read_metadata, save_tensors

PROBED = 4096  # held-out tokens that curves are measured on, at least
ROUNDS = 4  # of moving experts between layers
EVEN = "even"
REMEDY = "calibrate on more sequences (--samples, 16 at the least), or pass --budget even"

NEEDS = frozenset({"squared_gate_sum", "squared_gate_output_sum", "squared_gated_norm_sum"})

Curve = NDArray[np.float64]  # [most + 1]: the cost of 0, 1, 2 ... experts less
# by experts module; a layer that is not named stays as it is
ConstantsByLayer = Mapping[str, Substitutes]


@dataclass(frozen=True, slots=True, eq=False)
class LayerConstants:
    """Best constants of a layer's experts, `values` [E, H] in float32, and their errors, `missed`
    [E]."""

    values: Tensor
    missed: Tensor  # in float64: sum over the expert's tokens of g^2 ||o - c||^2

    @classmethod
    def of(cls, stats: LayerStatistics) -> "LayerConstants":
        """Compute them from statistics that hold `NEEDS`; all 0 for an expert no token reached."""
        share = stats.squared_gate_sum.double().clamp(min=torch.finfo(torch.float64).tiny)
        output = stats.squared_gate_output_sum.double()
        values = output / share[:, None]
        missed = (stats.squared_gated_norm_sum.double() - (output * values).sum(-1)).clamp(min=0)
        return cls(values.float(), missed)


def replaceable(
    layers: Sequence[MoeLayer], constants: Mapping[str, LayerConstants], protected: Protected
) -> list[list[int]]:
    """Return each layer's experts that can become constants, least error first; of equals the
    higher number.

    Every layer keeps its top-k and its protected experts.
    """
    orders = []
    for layer in layers:
        guarded = protected.get(layer.name, frozenset())
        missed = constants[layer.name].missed
        order = (layer.experts - 1 - missed.flip(0).argsort(stable=True)).tolist()
        most = layer.experts - max(layer.top_k, len(guarded), 1)
        orders.append([expert for expert in order if expert not in guarded][:most])
    return orders


def measure(
    model: OpenModel,
    calibration: Calibration,
    progress: Progress,
    seed: int,
    kept: Path | None = None,
) -> dict[str, LayerConstants]:
    """The constants of all layers by experts module, from one pass over the calibration text that
    is not held out.

    A resumed run reads them from `kept`, a folder whose name says what they were measured on.
    """
    layers = model.architecture.layers
    paths = {}
    if kept is not None:
        paths = {layer.name: kept / f"{layer.name}.safetensors" for layer in layers}
    if paths and all(read_metadata(path) is not None for path in paths.values()):
        return {name: LayerConstants(**load_tensors(path)) for name, path in paths.items()}
    constants = {}
    for stats in collect(model, NEEDS, calibration, progress, seed):
        name = stats.layer.name
        measured = LayerConstants.of(stats)
        constants[name] = measured
        if name in paths:
            save_tensors(paths[name], {"values": measured.values, "missed": measured.missed}, name)
    return constants


def substitutes_of(
    dropped: Mapping[str, Sequence[int]], constants: Mapping[str, LayerConstants]
) -> ConstantsByLayer:
    """Return the constants of the experts that are `dropped`, both by experts module."""
    substitutes = {}
    for name, experts in dropped.items():
        if experts:
            chosen = sorted(experts)
            substitutes[name] = Substitutes(tuple(chosen), constants[name].values[chosen])
    return substitutes


def probed_numbers(most: int, experts: int) -> tuple[int, ...]:
    """Return the numbers of replaced experts at which a layer's curve is measured: quarters of its
    experts, and `most`.

    At most `most` of its `experts` can be replaced.
    """
    quarters = {max(1, round(experts * share)) for share in (0.25, 0.5, 0.75)}
    return tuple(sorted(number for number in quarters | {most} if 0 < number <= most))


def curve(missed: Sequence[float], measured: Mapping[int, float]) -> Curve:
    """Costs of 0, 1 ... experts less, from what the constants miss of each, ascending [most], and
    measured costs.

    No further expert makes it cheaper: what says so is noise.
    """
    summed = np.concatenate([[0.0], np.cumsum(np.asarray(missed, dtype=np.float64))])
    # experts that miss nothing cost alike
    summed += np.arange(len(summed)) * (1e-12 * summed[-1] or 1.0)
    probed = [0, *sorted(measured)]
    costs = np.maximum.accumulate([0.0, *(measured[number] for number in probed[1:])])
    interpolated: Curve = np.interp(summed, summed[probed], costs)
    return interpolated


def even_numbers(removed: int, most: Sequence[int]) -> list[int]:
    """Divide `removed` equally over layers, as far as each can spare experts; the last layers give
    the rest."""
    numbers = [0] * len(most)
    while sum(numbers) < removed:
        remaining = removed - sum(numbers)
        able = [position for position, number in enumerate(numbers) if number < most[position]]
        for position in able[-remaining:]:
            numbers[position] += 1
    return numbers


def cheapest_numbers(curves: Sequence[Curve], removed: int) -> list[int]:
    """Return the number for each layer, `removed` in all, of least total cost: exact, by dynamic
    programming.

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
    numbers = [0] * len(curves)
    remaining = removed
    for layer in reversed(range(len(curves))):
        numbers[layer] = int(chosen[layer, remaining])
        remaining -= numbers[layer]
    return numbers


def halfway(one: Sequence[int], other: Sequence[int]) -> list[int]:
    """Return the numbers between two divisions of the same sum, with that sum."""
    doubled = [a + b for a, b in zip(one, other, strict=True)]
    numbers = [value // 2 for value in doubled]
    odd_positions = [position for position, value in enumerate(doubled) if value % 2]
    for position in odd_positions[len(odd_positions) // 2 :]:
        numbers[position] += 1
    return numbers


def shifted(numbers: Sequence[int], layer: int, change: int) -> list[int]:
    """Return a division with another number of one layer."""
    changed = list(numbers)
    changed[layer] += change
    return changed


def _first_of(
    layers: Sequence[MoeLayer], orders: Sequence[Sequence[int]], numbers: Sequence[int]
) -> dict[str, Sequence[int]]:
    """Return the experts that a division replaces: of each layer's order the first `numbers`."""
    divided = zip(layers, orders, numbers, strict=True)
    return {layer.name: order[:number] for layer, order, number in divided}


@dataclass
class _Search:
    """Measures divisions of the same sum, numbers in the order of the layers, each of them once."""

    model: OpenModel
    constants: Mapping[str, LayerConstants]
    orders: Sequence[Sequence[int]]  # of the experts that are replaceable
    evaluator: Evaluator
    progress: Progress
    figures: dict[tuple[int, ...], Figures] = field(default_factory=dict)

    def costs(
        self, divisions: Sequence[Sequence[int]], phase: str, only: Sequence[int] | None = None
    ) -> list[Figures]:
        """Return the figures of each division's model, on all held-out batches or on those of these
        numbers."""
        if not divisions:
            return []
        variants = []
        for numbers in divisions:
            dropped = _first_of(self.model.architecture.layers, self.orders, numbers)
            variants.append(Substitution(constants=substitutes_of(dropped, self.constants)))
        batches = None if only is None else [only] * len(variants)
        return self.evaluator.measure(
            self.model, variants, progress=self.progress, phase=phase, only=batches
        )

    def consider(self, divisions: Sequence[Sequence[int]]) -> None:
        """Measure on all held-out text what has not been."""
        fresh = [key for key in dict.fromkeys(map(tuple, divisions)) if key not in self.figures]
        self.figures.update(zip(fresh, self.costs(fresh, "evaluate divisions"), strict=True))

    def kl(self, division: Sequence[int]) -> float:
        """KL from the base of a division that has been measured, nats per token."""
        return self.figures[tuple(division)].means["kl"]

    @property
    def best(self) -> tuple[int, ...]:
        """The division of least KL so far; the first one measured among equals."""
        return min(self.figures, key=self.kl)

    def curves(self) -> list[Curve]:
        """Return each layer's cost of replacing 0, 1 ... experts while all others stay as they
        are."""
        layers = self.model.architecture.layers
        few = list[int]()  # the first held-out batches, of `PROBED` tokens if there are as many
        tokens = 0
        for number, batch in enumerate(self.evaluator.batches):
            if tokens < PROBED:
                few.append(number)
                tokens += batch.numel()
        changes = []
        for position, layer in enumerate(layers):
            numbers = probed_numbers(len(self.orders[position]), layer.experts)
            changes += [(position, number) for number in numbers]
        divisions = [shifted([0] * len(layers), *change) for change in changes]
        measured: list[dict[int, float]] = [{} for _ in layers]
        costs = self.costs(divisions, "measure curves", few)
        for (position, number), figures in zip(changes, costs, strict=True):
            measured[position][number] = figures.means["kl"]
        curves = [
            curve(self.constants[layer.name].missed[order].tolist(), costs_of_layer)
            for layer, order, costs_of_layer in zip(layers, self.orders, measured, strict=True)
        ]
        return curves

    def moved(self, step: int) -> list[list[int]]:
        """Return divisions in which the layers that cost least give `step` more, those that cost
        most as many fewer."""
        best = self.best
        base = self.kl(best)
        changes = []
        for position, order in enumerate(self.orders):
            for change in (step, -step):
                if 0 <= best[position] + change <= len(order):
                    changes.append((position, change))
        costs = self.costs([shifted(best, *change) for change in changes], "measure moves")
        sides: dict[int, list[tuple[float, int]]] = {step: [], -step: []}
        for figures, (position, change) in zip(costs, changes, strict=True):
            sides[change].append((figures.means["kl"] - base, position))
        giving = sorted(sides[step])
        taking = sorted(sides[-step])
        divisions = []
        numbers = list(best)
        used = set[int]()
        for (more, giver), (less, taker) in zip(giving, taking, strict=False):
            if more + less >= 0 or giver == taker or {giver, taker} & used:
                break
            used |= {giver, taker}
            numbers = shifted(shifted(numbers, giver, step), taker, -step)
            divisions.append(numbers)
        return divisions


def choose_replaced(
    model: OpenModel,
    constants: Mapping[str, LayerConstants],
    protected: Protected,
    removed: int,
    budget: str,
    heldout: Sequence[Tensor],
    progress: Progress,
) -> tuple[dict[str, Sequence[int]], dict[str, Any]]:
    """Experts for which constants stand, by experts module, `removed` in all, and how an uneven
    budget chose them.

    Layers of an uneven budget give up different numbers, at the least KL on the `heldout` [B, L]
    batches. Raises `CompressionError` for fewer than eight held-out sequences."""
    layers = model.architecture.layers
    orders = replaceable(layers, constants, protected)
    most = [len(order) for order in orders]
    if sum(most) < removed:
        raise CompressionError(
            f"--protect leaves {sum(most)} experts to replace, fewer than {removed}; keep more"
        )
    even = tuple(even_numbers(removed, most))
    if budget == EVEN:
        return _first_of(layers, orders, even), {}
    evaluator = Evaluator.of(model, heldout)
    require_enough(evaluator.sequences, "an uneven budget", REMEDY)
    search = _Search(model, constants, orders, evaluator, progress)
    curves = search.curves()
    alone = tuple(cheapest_numbers(curves, removed))
    wary = tuple(cheapest_numbers([costs**2 for costs in curves], removed))
    search.consider([even, alone, wary, halfway(even, alone), halfway(even, wary)])
    step = max(1, layers[0].experts // 16)
    for _ in range(ROUNDS):
        before = search.best
        search.consider(search.moved(step))
        if search.best == before:
            if step == 1:
                break
            step = max(1, step // 2)
    best = search.best if accepts(search.figures[even], search.figures[search.best]) else even
    return _first_of(layers, orders, best), {
        "heldout_tokens": sum(batch.numel() for batch in evaluator.batches),
        "heldout_kl_even": round(search.kl(even), 6),
        "heldout_kl_chosen": round(search.kl(best), 6),
        "chosen": {even: EVEN, alone: "curves", wary: "squared curves"}.get(best, "moved"),
        "divisions_judged": len(search.figures),
    }


def layer_plan(layer: MoeLayer, replaced: Sequence[int], **more: Any) -> LayerPlan:
    """Return the plan that replaces some of a layer's experts by constants."""
    kept = [expert for expert in range(layer.experts) if expert not in replaced]
    return LayerPlan.keep(layer, kept, constants=tuple(replaced), **more)


def refit(
    model: OpenModel,
    planned: ConstantsByLayer,
    calibration: Calibration,
    progress: Progress,
    seed: int,
    correction: Correct,
    files: CutFiles | None = None,
    probe: HeldoutProbe | None = None,
) -> dict[str, LayerPlan]:
    """Refit constants, and the experts that stay, layer by layer; returns the plans of layers that
    have constants.

    Every layer is refitted on what the corrected earlier layers output. The batches of an
    evaluator's `probe` run through them to the model's end. Layers that are in `files` are not made
    again."""
    # which is not known beside constants
    correction = correction.model_copy(update={"toward": 0.0})
    work = LayerWork(
        None,
        lambda stats: layer_plan(stats.layer, planned[stats.layer.name].dropped),
        correction=correction,
        seed=seed,
        constants=planned,
    )
    plans = compress_sequentially(model, work, calibration, progress, files, probe)
    return {plan.module: plan for plan in plans}
