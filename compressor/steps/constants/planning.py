"""Constants of experts, and which experts they stand for: from the options of `constants` to a plan of every layer.

An expert with output o and gate weight g adds g o to a token. The constant c that misses least of it over all tokens,
sum g^2 ||o - c||^2, is c = sum g^2 o / sum g^2, and leaves sum g^2 ||o||^2 - ||sum g^2 o||^2 / sum g^2. MoNE
(arXiv:2507.00390) takes the plain mean of o and chooses by its variance and by the expert's routed tokens.

Layers give up as many experts each, or more where the model loses least on held-out text. A layer's cost is a curve:
what replacing its 1, 2, 3 ... most replaceable experts costs the whole model. It is measured at a few numbers, and
between two of them it grows with what the constants miss, sum g^2 ||o - c||^2. Errors grow on their way through the
layers, and those of several layers do not simply add up. So the division of least cost is then moved an expert at a
time by measurements of the whole, and taken where it is nearer to the base than the even one by the rule of
`compressor.evaluation.evaluator.accepts`.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from compressor.data.batches import Calibration
from compressor.errors import CompressionError
from compressor.evaluation.evaluator import FEWEST, Evaluator, Figures, Variants, accepts, require_enough
from compressor.kept import keep_tensors, kept_tensors, told_of
from compressor.model.architecture import MoeLayer
from compressor.model.constant_experts import Substitutes, number_in, substitute
from compressor.model.layout import expert_prefixes
from compressor.model.opened import OpenModel, left_by
from compressor.progress import Progress
from compressor.recipe.plan import LayerPlan
from compressor.recipe.step import Needs, Step
from compressor.recipe.steps_plan import layer_to_dict
from compressor.statistics.statistics import LayerStatistics, collect
from compressor.steps.constants.step import Constants
from compressor.steps.correct.step import CONSTANTS
from compressor.steps.prune.planning import planner_of, protected_experts
from compressor.steps.prune.protecting import Protected, given_protected
from compressor.steps.state import State

MONE = "mone"  # the format in which constants stand for experts
PROBED = 4096  # held-out tokens that curves are measured on, at least
ROUNDS = 4  # of moving experts between layers
EVEN, UNEVEN = "even", "uneven"
REMEDY = "calibrate on more sequences (--samples, 16 at the least), or pass --budget even"

NEEDS = frozenset({"squared_gate_sum", "squared_gate_output_sum", "squared_gated_norm_sum"})

Curve = NDArray[np.float64]  # [most + 1]: the cost of 0, 1, 2 ... experts less
Variant = Mapping[str, Substitutes]  # by experts module; a layer that is not named stays as it is

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class LayerConstants:
    """Of each expert of a layer its best constant, `values` [E, H] in float32, and what that misses, `missed` [E]."""

    values: Tensor
    missed: Tensor  # in float64: sum over the expert's tokens of g^2 ||o - c||^2

    @classmethod
    def of(cls, stats: LayerStatistics) -> "LayerConstants":
        """Of a layer whose statistics hold `NEEDS`; all 0 for an expert no token reached."""
        share = stats.squared_gate_sum.double().clamp(min=torch.finfo(torch.float64).tiny)
        output = stats.squared_gate_output_sum.double()
        values = output / share[:, None]
        missed = (stats.squared_gated_norm_sum.double() - (output * values).sum(-1)).clamp(min=0)
        return cls(values.float(), missed)

    def replaceable(self, count: int, protected: frozenset[int] = frozenset()) -> tuple[int, ...]:
        """The `count` experts whose constants miss least, ascending; none that is protected.

        Among equals the one with the higher number comes first.
        """
        backwards = self.missed.flip(0).argsort(stable=True)
        order = (len(self.missed) - 1 - backwards).tolist()
        return tuple(sorted([expert for expert in order if expert not in protected][:count]))


def measure(
    model: OpenModel, calibration: Calibration, progress: Progress, seed: int, kept: Path | None = None
) -> dict[str, LayerConstants]:
    """The constants of all layers by experts module, from one pass over the calibration text that is not held out.

    A resumed run reads them from `kept`, a folder whose name says what they were measured on.
    """
    names = [layer.name for layer in model.architecture.layers]
    paths = {} if kept is None else {name: kept / f"{name}.safetensors" for name in names}
    if paths and all(told_of(path) is not None for path in paths.values()):
        return {name: LayerConstants(**kept_tensors(path)) for name, path in paths.items()}
    constants: dict[str, LayerConstants] = {}
    for stats in collect(model, NEEDS, calibration, progress, seed):
        name = stats.layer.name
        own = constants[name] = LayerConstants.of(stats)
        if name in paths:
            keep_tensors(paths[name], {"values": own.values, "missed": own.missed}, name)
    return constants


def substitutes_of(dropped: Mapping[str, Sequence[int]], constants: Mapping[str, LayerConstants]) -> Variant:
    """The constants of the experts that are `dropped`, both by experts module."""
    chosen = {name: sorted(experts) for name, experts in dropped.items() if experts}
    return {name: Substitutes(tuple(own), constants[name].values[own]) for name, own in chosen.items()}


def replacing(
    layers: Sequence[MoeLayer],
    constants: Mapping[str, LayerConstants],
    numbers: Sequence[int],
    protected: Mapping[str, frozenset[int]],
) -> Variant:
    """The constants of a division: of each layer's `numbers`, in their order, the experts that are missed least."""
    dropped = {
        layer.name: constants[layer.name].replaceable(number, protected.get(layer.name, frozenset()))
        for layer, number in zip(layers, numbers, strict=True)
    }
    return substitutes_of(dropped, constants)


class Substituting(Variants):
    """Has each batch of a pass meet the constants of its variant, those of the first unless an evaluator says else."""

    def __init__(self, model: OpenModel, variants: Sequence[Variant]) -> None:
        self.model, self.variants = model, variants

    def entering(self, batch: int) -> None:
        partial = self.model.partial
        for layer in self.at.moe_layers:
            constants = None if self.variant is None else self.variants[self.variant].get(layer.name)
            if constants is not None:
                constants = replace(constants, values=constants.values.to(partial.device, partial.dtype))
            substitute(partial.model.get_submodule(layer.name), constants)

    def passed(self, unit: str) -> None:
        for layer in self.at.moe_layers:
            substitute(self.model.partial.model.get_submodule(layer.name), None)


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
        alone = [
            tuple(number if place == own else 0 for place in range(len(layers)))
            for own, layer in enumerate(layers)
            for number in probed_numbers(self.most[own], layer.experts)
        ]
        before = np.cumsum([0, *(batch.numel() for batch in batches)])  # tokens of the batches before each
        few = [number for number in range(len(batches)) if before[number] < PROBED]
        measured = dict(zip(alone, self.measure(alone, "measure curves", few), strict=True))
        curves = list[Curve]()
        for place, (layer, most) in enumerate(zip(layers, self.most, strict=True)):
            constants = self.constants[layer.name]
            replaced = constants.replaceable(most, self.protected.get(layer.name, frozenset()))
            costs = {division[place]: own.means["kl"] for division, own in measured.items() if division[place]}
            curves.append(curve(sorted(constants.missed[list(replaced)].tolist()), costs))
        return curves

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
        ranked = sorted((cost, *change) for cost, change in zip(costs, changes, strict=True))
        giving, taking = ([(cost, place) for cost, place, own in ranked if own == change] for change in (step, -step))
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
    heldout: Sequence[Tensor],
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
    curves = search.curves()
    even, alone = tuple(even_numbers(removed, most)), tuple(cheapest_numbers(curves, removed))
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
    return list(best), {
        "heldout_tokens": sum(batch.numel() for batch in evaluator.batches),
        "heldout_kl_even": round(search.kl(even), 6),
        "heldout_kl_chosen": round(search.kl(best), 6),
        "chosen": {even: EVEN, alone: "curves", wary: "squared curves"}.get(best, "moved"),
        "divisions_judged": len(search.figures),
    }


def budget_of(options: Constants) -> str:
    """How the experts that stay are divided over layers."""
    return options.budget or (EVEN if options.experts_total is None else UNEVEN)


def needs_of(options: Constants, model: OpenModel, steps: Sequence[Step]) -> Needs:
    """Check model, numbers and what follows; raises `CompressionError` for what this format cannot do."""
    refuse_model(model)
    kept, budget = _kept(model, options), budget_of(options)
    correct: Any = next((step for step in steps if step.name == "correct"), None)
    if correct is not None and correct.method != CONSTANTS and model.layout.quantized:
        raise CompressionError(
            f"--correct {correct.method} changes experts, which stay quantised with --format mone; pass --correct "
            f"{CONSTANTS} or none"
        )
    if model.layout.quantized:
        logger.warning("vLLM serves constants only beside experts that are not quantised, and these stay quantised")
    given_protected(options.protect, model.architecture.layers, kept // len(model.architecture.layers))
    heldout = FEWEST if budget == UNEVEN else int(correct is not None)
    return Needs(True, heldout, experts=kept // len(model.architecture.layers))


def refuse_model(model: OpenModel) -> None:
    """Refuse a model of which single experts cannot be left out, or whose layers vLLM would not tell apart."""
    layout = model.layout
    fused = next((name for name, role in layout.roles.items() if role.kind == "fused" and not role.is_router), None)
    if fused is not None or not layout.regular:
        raise CompressionError(
            f"--format mone leaves out single experts, but {model.architecture.family} checkpoints store all experts "
            f"of a layer together{'' if fused is None else f' ({fused})'}; compress without --format mone"
        )
    for layer in model.architecture.layers:
        prefixes = expert_prefixes(layout, layer)
        shared = {prefix.rpartition(".")[0] for prefix in prefixes.values()}
        if len(prefixes) < layer.experts or len(shared) > 1 or number_in(min(shared)) != layer.index:
            raise CompressionError(
                f"{layer.name}: vLLM finds constants by names such as layers.3.experts.7, and this checkpoint's are "
                f"others ({min(shared, default='none')}); compress without --format mone"
            )


def _kept(model: OpenModel, options: Constants) -> int:
    layers, budget = model.architecture.layers, budget_of(options)
    total, count = sum(layer.experts for layer in layers), len(layers)
    given = [value for value in (options.experts, options.ratio, options.experts_total) if value is not None]
    if len(given) != 1:
        raise CompressionError("say how many experts to keep: one of --experts N, --ratio R and --experts-total N")
    if options.ratio is not None:
        uneven = budget == UNEVEN
        kept = left_by(total, options.ratio) if uneven else left_by(total // count, options.ratio) * count
    else:
        kept = options.experts * count if options.experts is not None else int(options.experts_total or 0)
    if budget == EVEN and kept % count:
        raise CompressionError(
            f"--experts-total {kept} does not divide over {count} layers; pass --budget uneven or a multiple of {count}"
        )
    least = sum(max(layer.top_k, 1) for layer in layers)
    if not least <= kept <= total:
        raise CompressionError(
            f"{kept} experts in all cannot be kept: the {count} layers have {total}, and need {least} for their top-k"
        )
    return kept


def measured_constants(state: State) -> dict[str, LayerConstants]:
    """The constants of all layers; a run that was killed finds them in its work folder."""
    assert state.text is not None
    number = state.number_of("constants")
    kept = None if state.work is None or number is None else state.work.kept(number, "measured")
    return measure(state.model, state.text.fit, state.progress, state.seed, kept)


def plan_stage(options: Constants, state: State) -> Mapping[str, Any]:
    """Which experts constants stand for in each layer."""
    assert state.text is not None
    model, calibration, total = state.model, state.text.fit, _kept(state.model, options)
    layers = model.architecture.layers
    protected = protected_experts(options.protect, total // len(layers), planner_of(state))
    constants = measured_constants(state)
    removed = sum(layer.experts for layer in layers) - total
    most = [spare(layer, protected) for layer in layers]
    if sum(most) < removed:
        raise CompressionError(f"--protect leaves {sum(most)} experts to replace, fewer than {removed}; keep more")
    numbers, figures = even_numbers(removed, most), dict[str, Any]()
    if budget_of(options) == UNEVEN:
        numbers, figures = divide(model, constants, removed, protected, calibration.heldout_batches, state.progress)
    guarded = {name: sorted(experts) for name, experts in protected.items() if experts}
    plans = []
    for layer, number in zip(layers, numbers, strict=True):
        missed = constants[layer.name].missed
        replaced = constants[layer.name].replaceable(number, protected.get(layer.name, frozenset()))
        share = float(missed[list(replaced)].sum() / missed.sum().clamp(min=1e-300)) if replaced else 0.0
        plans.append(
            LayerPlan.keep(
                layer,
                [expert for expert in range(layer.experts) if expert not in replaced],
                constants=replaced,
                decided_by="sum g^2 ||o - c||^2",
                figures={"missed": [round(value, 6) for value in missed.tolist()], "share_missed": round(share, 6)},
            )
        )
    return {
        "experts": total // len(layers),
        "format": MONE,
        "budget": budget_of(options),
        "experts_total": total,
        "figures": figures,
        **({"protected": guarded} if guarded else {}),
        "layers": [layer_to_dict(plan) for plan in plans],
    }
