"""MoNE: a constant for each expert that is left out, as vLLM serves them (arXiv:2507.00390).

An expert with output o and gate weight g adds g o to a token. The constant c that misses least of it over all tokens,
sum g^2 ||o - c||^2, is c = sum g^2 o / sum g^2, and leaves sum g^2 ||o||^2 - ||sum g^2 o||^2 / sum g^2. The paper takes
the plain mean of o and chooses by its variance and by the expert's routed tokens.

Layers give up as many experts each, or more where the model loses least on held-out text. A layer's cost is a curve:
what replacing its 1, 2, 3 ... most replaceable experts costs the whole model. It is measured at a few numbers, and
between two of them it grows with what the constants miss. Errors grow on their way through the layers, and those of
several layers do not simply add up. So the division of least cost is then moved an expert at a time by measurements of
the whole, and taken where it is nearer to the base than the even one (`compressor.evaluation.evaluator.accepts`).

Every tensor that stays is a copy of the stored bytes, quantised ones included, unless `correct` refitted it. Experts
keep their numbers. A constant is `<experts prefix>.<id>.approx_value` [H], and config.json lists them by decoder layer.
Stock transformers computes with none, so a written checkpoint is compared with the source by a forward of our own.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from compressor.checkpoint.reader import Checkpoint
from compressor.checkpoint.source import ModelSource
from compressor.data.batches import Calibration
from compressor.errors import CompressionError
from compressor.evaluation.evaluator import FEWEST, Evaluator, Figures, HeldoutProbe, accepts, require_enough
from compressor.kept import facts_of, keep_tensors, kept_tensors
from compressor.model.constant_experts import (
    FIELD,
    SUFFIX,
    SubstitutedCheckpoint,
    Substitutes,
    is_replaced,
    number_in,
)
from compressor.model.layout import expert_prefixes
from compressor.model.moe_layer import MoeLayer, left_by
from compressor.model.opened import OpenModel, open_substituted, pick_dtype
from compressor.model.streaming import LayerVisitor, Pass
from compressor.model.substitution import SideBySide, Substitution
from compressor.model.verification import check_carried
from compressor.progress import Progress
from compressor.recipe.plan import ExpertPlan, LayerPlan
from compressor.recipe.step import Requirements, StepOptions
from compressor.statistics.statistics import LayerStatistics, collect
from compressor.steps.configuration import config_with
from compressor.steps.constants.options import Constants
from compressor.steps.correct.in_order import (
    LayerWork,
    compress_in_order,
    constants_key,
    refitted_substitution,
)
from compressor.steps.correct.options import Correct
from compressor.steps.cutting import Conversion, CutFiles
from compressor.steps.job import files_with, stored_partial
from compressor.steps.prune.planning import planner_of, protected_experts
from compressor.steps.prune.protecting import Protected, given_protected, listed
from compressor.steps.state import State
from compressor.steps.tensors import (
    OutputJob,
    OutputTensor,
    Piece,
    in_order_of,
    refuse_overflow,
    stored_unit,
    tensor_bytes_view,
    tensor_output,
)

PROBED = 4096  # held-out tokens that curves are measured on, at least
ROUNDS = 4  # of moving experts between layers
EVEN, UNEVEN = "even", "uneven"
CHECKED = 32  # that a written checkpoint is checked on
TOLERANCE = 1e-3  # of the largest logit; the same sums in the same order differ by nothing
REMEDY = "calibrate on more sequences (--samples, 16 at the least), or pass --budget even"

NEEDS = frozenset({"squared_gate_sum", "squared_gate_output_sum", "squared_gated_norm_sum"})

Curve = NDArray[np.float64]  # [most + 1]: the cost of 0, 1, 2 ... experts less
ConstantsByLayer = Mapping[str, Substitutes]  # by experts module; a layer that is not named stays as it is

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


def replaceable(
    layers: Sequence[MoeLayer], constants: Mapping[str, LayerConstants], protected: Protected
) -> list[list[int]]:
    """Of each layer the experts that can become constants, those that miss least first; of equals the higher number.

    Every layer keeps its top-k and its protected experts.
    """
    orders = list[list[int]]()
    for layer in layers:
        guarded, missed = protected.get(layer.name, frozenset()), constants[layer.name].missed
        order = (layer.experts - 1 - missed.flip(0).argsort(stable=True)).tolist()
        most = layer.experts - max(layer.top_k, len(guarded), 1)
        orders.append([expert for expert in order if expert not in guarded][:most])
    return orders


def measure(
    model: OpenModel, calibration: Calibration, progress: Progress, seed: int, kept: Path | None = None
) -> dict[str, LayerConstants]:
    """The constants of all layers by experts module, from one pass over the calibration text that is not held out.

    A resumed run reads them from `kept`, a folder whose name says what they were measured on.
    """
    paths = dict[str, Path]()
    if kept is not None:
        paths = {layer.name: kept / f"{layer.name}.safetensors" for layer in model.architecture.layers}
    if paths and all(facts_of(path) is not None for path in paths.values()):
        return {name: LayerConstants(**kept_tensors(path)) for name, path in paths.items()}
    constants = dict[str, LayerConstants]()
    for stats in collect(model, NEEDS, calibration, progress, seed):
        name, measured = stats.layer.name, LayerConstants.of(stats)
        constants[name] = measured
        if name in paths:
            keep_tensors(paths[name], {"values": measured.values, "missed": measured.missed}, name)
    return constants


def substitutes_of(dropped: Mapping[str, Sequence[int]], constants: Mapping[str, LayerConstants]) -> ConstantsByLayer:
    """The constants of the experts that are `dropped`, both by experts module."""
    substitutes = dict[str, Substitutes]()
    for name, experts in dropped.items():
        if experts:
            chosen = sorted(experts)
            substitutes[name] = Substitutes(tuple(chosen), constants[name].values[chosen])
    return substitutes


def replacing(
    layers: Sequence[MoeLayer],
    constants: Mapping[str, LayerConstants],
    orders: Sequence[Sequence[int]],
    numbers: Sequence[int],
) -> ConstantsByLayer:
    """The constants of a division: of each layer's `numbers` the first of the experts that are `replaceable`."""
    divided = zip(layers, orders, numbers, strict=True)
    return substitutes_of({layer.name: order[:number] for layer, order, number in divided}, constants)


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
    while left := removed - sum(numbers):
        for place in [place for place, number in enumerate(numbers) if number < most[place]][-left:]:
            numbers[place] += 1
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


def shifted(numbers: Sequence[int], layer: int, change: int) -> list[int]:
    """Return a division with another number of one layer."""
    changed = list(numbers)
    changed[layer] += change
    return changed


@dataclass(slots=True)
class _Search:
    """Measures divisions of the same sum, numbers in the order of the layers, each of them once."""

    model: OpenModel
    constants: Mapping[str, LayerConstants]
    orders: Sequence[Sequence[int]]  # of the experts that are replaceable
    evaluator: Evaluator
    progress: Progress
    figures: dict[tuple[int, ...], Figures] = field(default_factory=dict)

    def costs(self, divisions: Sequence[Sequence[int]], phase: str, only: Sequence[int] | None = None) -> list[Figures]:
        """Figures of each division's model, on all held-out batches or on those of these numbers."""
        if not divisions:
            return []
        layers = self.model.architecture.layers
        variants = [
            Substitution(constants=replacing(layers, self.constants, self.orders, numbers)) for numbers in divisions
        ]
        return self.evaluator.measure(self.model, variants, progress=self.progress, phase=phase, only=only)

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
        """Return each layer's cost of replacing 0, 1 ... experts while all others stay as they are."""
        layers = self.model.architecture.layers
        changes = list[tuple[int, int]]()
        for place, layer in enumerate(layers):
            changes += [(place, number) for number in probed_numbers(len(self.orders[place]), layer.experts)]
        nothing = [0] * len(layers)
        divisions = [shifted(nothing, *change) for change in changes]
        measured: list[dict[int, float]] = [{} for _ in layers]
        for (place, number), figures in zip(changes, self.costs(divisions, "measure curves", self._few()), strict=True):
            measured[place][number] = figures.means["kl"]
        curves = list[Curve]()
        for layer, order, costs in zip(layers, self.orders, measured, strict=True):
            curves.append(curve(self.constants[layer.name].missed[order].tolist(), costs))
        return curves

    def _few(self) -> list[int]:
        """Return the first held-out batches, of `PROBED` tokens at least if there are as many."""
        numbers, tokens = list[int](), 0
        for number, batch in enumerate(self.evaluator.batches):
            if tokens < PROBED:
                numbers.append(number)
                tokens += batch.numel()
        return numbers

    def moved(self, step: int) -> list[list[int]]:
        """Return divisions in which the layers that cost least give `step` more, those that cost most as many fewer."""
        best, base = self.best, self.kl(self.best)
        changes = list[tuple[int, int]]()
        for place, order in enumerate(self.orders):
            changes += [(place, change) for change in (step, -step) if 0 <= best[place] + change <= len(order)]
        costs = self.costs([shifted(best, *change) for change in changes], "measure moves")
        ranked = sorted((figures.means["kl"] - base, *change) for figures, change in zip(costs, changes, strict=True))
        giving = [(cost, place) for cost, place, change in ranked if change == step]
        taking = [(cost, place) for cost, place, change in ranked if change == -step]
        divisions, numbers, used = list[list[int]](), list(best), set[int]()
        for (more, giver), (less, taker) in zip(giving, taking, strict=False):
            if more + less >= 0 or giver == taker or {giver, taker} & used:
                break
            used |= {giver, taker}
            numbers = shifted(shifted(numbers, giver, step), taker, -step)
            divisions.append(numbers)
        return divisions


def divide(
    model: OpenModel,
    constants: Mapping[str, LayerConstants],
    orders: Sequence[Sequence[int]],
    removed: int,
    heldout: Sequence[Tensor],
    progress: Progress,
) -> tuple[list[int], dict[str, Any]]:
    """How many experts of each layer become constants, `removed` in all, at the least KL on `heldout` [B, L] batches.

    `orders` are those of `replaceable`. Returns the numbers in the order of the layers, and how they were chosen.
    Raises `CompressionError` for fewer than eight held-out sequences.
    """
    evaluator = Evaluator.of(model, heldout)
    require_enough(evaluator.sequences, "an uneven budget", REMEDY)
    search = _Search(model, constants, orders, evaluator, progress)
    curves = search.curves()
    even = tuple(even_numbers(removed, [len(order) for order in orders]))
    alone = tuple(cheapest_numbers(curves, removed))
    wary = tuple(cheapest_numbers([costs**2 for costs in curves], removed))
    search.consider([even, alone, wary, halfway(even, alone), halfway(even, wary)])
    step = max(1, model.architecture.layers[0].experts // 16)
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


def requirements_of(options: Constants, model: OpenModel, steps: Sequence[StepOptions]) -> Requirements:
    """Check model, numbers and what follows; raises `CompressionError` for what this format cannot do."""
    refuse_model(model)
    kept, budget = total_kept(options, model.architecture.layers), budget_of(options)
    correct = next((step for step in steps if isinstance(step, Correct)), None)
    if correct is not None and model.layout.quantized:
        raise CompressionError(
            f"--correct {correct.method} changes experts, which stay quantised with --format mone; pass --correct none"
        )
    if model.layout.quantized:
        logger.warning("vLLM serves constants only beside experts that are not quantised, and these stay quantised")
    given_protected(options.protect, model.architecture.layers, kept // len(model.architecture.layers))
    heldout = FEWEST if budget == UNEVEN else int(correct is not None)
    return Requirements(True, heldout, passes=1)


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


def total_kept(options: Constants, layers: Sequence[MoeLayer]) -> int:
    """Experts of all layers together for which no constant stands."""
    budget = budget_of(options)
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
    kept = None if state.work is None else state.work.kept(state.stage[0], "measured")
    return measure(state.model, state.text.fit, state.progress, state.seed, kept)


def plan_stage(options: Constants, state: State) -> ExpertPlan:
    """Which experts constants stand for in each layer."""
    assert state.text is not None
    model, calibration, total = state.model, state.text.fit, total_kept(options, state.model.architecture.layers)
    layers = model.architecture.layers
    protected = protected_experts(options.protect, total // len(layers), planner_of(state))
    constants = measured_constants(state)
    removed = sum(layer.experts for layer in layers) - total
    orders = replaceable(layers, constants, protected)
    most = [len(order) for order in orders]
    if sum(most) < removed:
        raise CompressionError(f"--protect leaves {sum(most)} experts to replace, fewer than {removed}; keep more")
    numbers, figures = even_numbers(removed, most), dict[str, Any]()
    if budget_of(options) == UNEVEN:
        numbers, figures = divide(model, constants, orders, removed, calibration.heldout_batches, state.progress)
    plans = list[LayerPlan]()
    for layer, order, number in zip(layers, orders, numbers, strict=True):
        missed, replaced = constants[layer.name].missed, sorted(order[:number])
        share = float(missed[replaced].sum() / missed.sum().clamp(min=1e-300)) if replaced else 0.0
        layer_figures = {"missed": [round(value, 6) for value in missed.tolist()], "share_missed": round(share, 6)}
        plans.append(layer_plan(layer, replaced, decided_by="sum g^2 ||o - c||^2", figures=layer_figures))
    return ExpertPlan(
        total // len(layers),
        tuple(plans),
        listed(protected),
        format="mone",
        budget=budget_of(options),
        experts_total=total,
        figures=figures,
    )


def layer_plan(layer: MoeLayer, replaced: Sequence[int], **more: Any) -> LayerPlan:
    """Return the plan by which constants stand for some of a layer's experts."""
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
    """Refit constants, and the experts that stay, layer by layer; returns the plans of layers that have constants.

    Every layer is refitted on what the corrected earlier layers output. The batches of an evaluator's `probe` run
    through them to the model's end. Layers that are in `files` are not made again.
    """
    correction = correction.model_copy(update={"toward": 0.0})  # which is not known beside constants
    work = LayerWork(
        None,
        lambda stats: layer_plan(stats.layer, planned[stats.layer.name].dropped),
        correction=correction,
        seed=seed,
        constants=planned,
    )
    plans = compress_in_order(model, work, calibration, progress, files, probe)
    return {plan.module: plan for plan in plans}


def _planned(state: State) -> ConstantsByLayer:
    """Return the constants that a stage's plan names, as measured."""
    dropped = {layer.module: layer.constants for layer in state.expert_plan().layers}
    return substitutes_of(dropped, measured_constants(state))


def refit_constants(state: State) -> ExpertPlan | None:
    """Refit constants and the experts that stay into the work folder; returns the plan with figures."""
    correction = state.options_of(Correct)
    if correction is None:
        return None
    assert state.text is not None
    refitted = refit(state.model, _planned(state), state.text.fit, state.progress, state.seed, correction, state.cut())
    plan, layers = state.expert_plan(), list[LayerPlan]()
    for layer in plan.layers:
        if layer.module in refitted:
            figures = {**layer.figures, "correction": refitted[layer.module].figures["correction"]}
            layer = replace(layer, figures=figures)
        layers.append(layer)
    return replace(plan, layers=tuple(layers))


def constants_job(state: State) -> OutputJob:
    """Return the job of writing the stage. What is measured and refitted waits in the work folder."""
    model, roles = state.model, state.model.layout.roles
    planned = _planned(state)
    layers = [layer for layer in model.architecture.layers if layer.name in planned]
    files = None if state.options_of(Correct) is None else state.cut()
    if files is None:
        stored = pick_dtype("auto", model.config, model.checkpoint)
        planned = {name: replace(each, values=each.values.to(stored)) for name, each in planned.items()}
        written = Substitution(constants=planned)
    else:
        written = refitted_substitution(model, state.expert_plan().layers, files)
    copies = [
        OutputTensor.copy(model.checkpoint, name, role.unit)
        for name, role in roles.items()
        if not is_replaced(role, planned)
    ]
    added = list[OutputTensor]()
    for layer in layers:
        prefixes, values = expert_prefixes(model.layout, layer), written.constants[layer.name].values
        for expert, value in zip(planned[layer.name].dropped, values, strict=True):
            name = f"{prefixes[expert]}{SUFFIX}"
            content = partial(iter, (tensor_bytes_view(refuse_overflow(name, value)),))
            added.append(replace(tensor_output(name, value, layer.unit), content=content))
    outputs = in_order_of(model.architecture.units, [*copies, *added])
    config, zeroed = config_with(model.checkpoint.raw_config, model.architecture, {})
    config[FIELD] = {str(entry.layer): list(entry.constants) for entry in state.expert_plan().layers if entry.constants}

    def produce(unit: str) -> Iterator[tuple[str, Iterator[Piece]]]:
        of_unit = [output for output in copies if output.unit == unit]
        if files is not None:
            changed = {output.name for output in of_unit if roles[output.name].layer in planned}
            yield from _refitted(model, planned, files, unit, changed) if changed else ()
            of_unit = [output for output in of_unit if output.name not in changed]
        yield from stored_unit([*of_unit, *added], unit)

    def verify(folder: Path) -> None:
        written_tensors = {(name, info.dtype, info.shape) for name, info in Checkpoint(folder).tensors.items()}
        wanted = {(output.name, output.dtype, output.shape) for output in outputs}
        if odd := sorted(name for name, *_ in written_tensors ^ wanted):
            raise CompressionError(f"the written tensor {odd[0]!r} is not as planned; please report this model")
        check_carried(folder, model.source.folder)
        check_forward(folder, model, written)

    units = ("", *model.architecture.units)
    return OutputJob(tuple(outputs), units, produce, files_with(model, config), verify, tuple(zeroed))


def _refitted(
    model: OpenModel, planned: ConstantsByLayer, files: CutFiles, unit: str, wanted: set[str]
) -> Iterator[tuple[str, Iterator[Piece]]]:
    """Yield the refitted tensors of a unit by their stored names: experts are put back at their own numbers first."""
    stored = stored_partial(model)

    def change(layer: MoeLayer) -> dict[str, Tensor]:
        if layer.name not in planned:
            return {}
        tensors = files.tensors(layer)
        del tensors[constants_key(layer)]
        kept = [expert for expert in range(layer.experts) if expert not in planned[layer.name].dropped]
        for key, value in tensors.items():
            if key.startswith(f"{layer.name}."):
                tensors[key] = value.new_zeros(layer.experts, *value.shape[1:])
                tensors[key][kept] = value
            refuse_overflow(key, value.to(stored.dtype))
        return tensors

    for name, content in Conversion(stored, model.architecture, stored.model).produce(change, None, unit):
        if name in wanted:
            yield name, content


@dataclass(slots=True)
class _Outputs(LayerVisitor):
    logits: list[Tensor] = field(default_factory=list)

    def on_batch_end(self, batch: int, output: Any) -> None:
        self.logits.append(output[0].detach().float().cpu())


def logits_with(model: OpenModel, substitution: Substitution, batches: Sequence[Tensor]) -> list[Tensor]:
    """Return the logits [B, L, V] of each batch of token ids [B, L] by a variant of the model."""
    outputs = _Outputs()
    Pass(model, batches, to_end=True).run(SideBySide(model, [substitution], [0] * len(batches)), outputs)
    return outputs.logits


def read_constants(folder: Path, dtype: str = "auto", device: str = "auto") -> tuple[OpenModel, ConstantsByLayer]:
    """A written checkpoint with constants, and these by experts module; an unfit one is a `CompressionError`."""
    model = open_substituted(ModelSource(str(folder), None, folder), dtype, device)
    assert isinstance(model.checkpoint, SubstitutedCheckpoint)
    partial = model.partial
    return model, model.checkpoint.substitutes(model.architecture.layers, partial.dtype, partial.device)


def check_forward(folder: Path, source: OpenModel, substitution: Substitution) -> None:
    """Refuse a written checkpoint that does not compute what this variant of the source does."""
    tokens = torch.arange(CHECKED)[None] * 7919 % source.vocabulary
    written, constants = read_constants(folder, source.dtype_name, str(source.partial.device))
    [wanted] = logits_with(source, substitution, [tokens])
    [logits] = logits_with(written, Substitution(constants=constants), [tokens])
    off, size = float((logits - wanted).abs().max()), float(wanted.abs().max())
    if not off <= TOLERANCE * max(size, 1e-6):
        raise CompressionError(
            f"the written checkpoint's logits differ by {off:.3g} from the source's with constants; please report this "
            "model"
        )
