"""Comparing: one calibration pass, many plans, and for each what the compressed model loses, all streamed.

Rows of models in which constants stand for experts (`compare --format mone`), even and uneven, come beside the drops.
"""

import logging
import math
import random
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import torch

from compressor.checkpoint.reader import Size
from compressor.data.batches import Calibration, EvaluationSet
from compressor.divergence.evaluator import FEWEST, Evaluator, Figures, accepts
from compressor.entry_points import read_option
from compressor.memory import PeakMemory
from compressor.model.constant_experts import is_replaced
from compressor.model.opened import OpenModel
from compressor.model.substitution import Substitution
from compressor.progress import Progress
from compressor.quality_gate.domains import suffering_of
from compressor.recipe.plan import LayerPlan
from compressor.recipe.recipe import make_step
from compressor.recipe.registry import Strategy, load_strategy
from compressor.report.comparison_report import Comparison, Row
from compressor.run_record import versions
from compressor.statistics.statistics import LayerStatistics
from compressor.steps.constants.search import (
    EVEN,
    UNEVEN,
    ConstantsByLayer,
    choose_replaced,
    measure,
    refit,
    substitutes_of,
)
from compressor.steps.correct.options import Correct
from compressor.steps.correct.sequential import LayerWork, compress_sequentially
from compressor.steps.job import idle_parameters, output_size
from compressor.steps.prune.planning import Planned, Planner, PruneSpec
from compressor.steps.prune.protection import Protected, listed
from compressor.steps.prune.selection import keep_best

RANDOM, CONSTANTS = "random", "constants"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Contender:
    """A strategy with options and corrections, by its name in the table."""

    name: str
    strategy: Strategy
    options: Mapping[str, Any]
    corrections: tuple[Correct, ...]
    seed: int | None = None


def random_drop(seed: int) -> Strategy:
    """Drop experts at random, protected ones excepted; every layer draws anew."""

    def plan(stats: LayerStatistics, keep: int, protected: frozenset[int] = frozenset()) -> LayerPlan:
        draw = random.Random(f"{seed} {stats.layer.name}")
        scores = torch.tensor([draw.random() for _ in range(stats.layer.experts)])
        return keep_best(stats, scores, keep, protected, decided_by="chance")

    return Strategy(RANDOM, plan, frozenset())


def correction(method: str) -> Correct:
    """The step of that method; raises `CompressionError` for an unknown one."""
    made = make_step("correct", {"method": method})
    assert isinstance(made, Correct)
    return made


def parse_contender(text: str, corrections: Sequence[str] | None) -> Contender:
    """A strategy's name, or name:option=value:option=value; corrected by its own default as well, if it has one."""
    name, *settings = text.split(":")
    options = dict(
        read_option(setting, f"strategy {text!r}: {setting!r} should be option=value") for setting in settings
    )
    strategy = load_strategy(name, options)
    methods = dict.fromkeys(corrections or ("none", strategy.correction))
    shown = " ".join([name, *(f"({setting})" for setting in settings)])
    return Contender(shown, strategy, options, tuple(correction(method) for method in methods))


def _layer_error(corrections: Iterable[Mapping[str, Any]]) -> float | None:
    """Mean over layers, by what their corrections recorded; None where no layer has an error."""
    known = [error for figures in corrections if (error := figures.get("heldout_error")) is not None]
    return sum(known) / len(known) if known else None


@dataclass(frozen=True, slots=True)
class Variant:
    """The model as it is to be cut: with whole or split experts, and its own or another top-k; to these counts."""

    model: OpenModel
    counts: Sequence[int]
    protected: Protected
    planner: Planner


@dataclass(slots=True)
class _Table:
    """Rows in the making. The calibration's held-out sets come after the evaluation sets that rows show."""

    model: OpenModel
    calibration: Calibration
    evaluator: Evaluator
    sets: Sequence[EvaluationSet]
    progress: Progress
    seed: int
    sizes: dict[int, tuple[Size, int]] = field(default_factory=dict)  # by experts kept: stored, and idle parameters

    def row(self, figures: Figures, experts: int, stored: Size | None = None, **more: Any) -> Row:
        """A row of a model's figures."""
        means = figures.of(range(len(self.sets))).means
        by_source = {each.name: figures.of({number}).means for number, each in enumerate(self.sets)}
        if experts not in self.sizes:  # for which the smaller model is built
            self.sizes[experts] = output_size(self.model, experts), idle_parameters(self.model, experts)
        cut, idle = self.sizes[experts]
        size = stored or cut
        return Row(
            experts=experts,
            parameters=size.parameters,
            bytes=size.bytes,
            loss=means["loss"],
            perplexity=math.exp(means["loss"]) if means["loss"] < 700 else math.inf,
            kl=max(0.0, means["kl"]),
            flips=means["flips"],
            loss_by_source={name: each["loss"] for name, each in by_source.items()},
            kl_by_source={name: max(0.0, each["kl"]) for name, each in by_source.items()},
            flips_by_source={name: each["flips"] for name, each in by_source.items()},
            suffering=tuple(each.domain for each in suffering_of(figures, dict(enumerate(by_source)))),
            split=self.model.architecture.layers[0].parts,
            top_k=self.model.top_k,
            active=None if self.model.layout.quantized else size.parameters - idle,
            **more,
        )

    def planned(self, planned: Planned, contender: Contender) -> list[Row]:
        """Carry a plan out with each correction layer by layer without writing it, and evaluate the result.

        As in `compress`, a correction is undone that takes the whole model further away on what is held out.
        """
        heldout = range(len(self.sets), len(self.evaluator.names))
        corrections = list(contender.corrections)
        none = Correct(method="none")
        plain, uncorrected = self._carried_out(planned, contender, none)
        rows = {none.method: plain}
        for correction in corrections:
            if correction.wanted:
                row, figures = self._carried_out(planned, contender, correction)
                if accepts(figures.of(heldout), uncorrected.of(heldout)):
                    undone = replace(plain, correction=correction.method, undone=True)
                    row = replace(undone, seconds=row.seconds, peak_memory=row.peak_memory)
                rows[correction.method] = row
        return [rows[correction.method] for correction in corrections]

    def _carried_out(self, planned: Planned, contender: Contender, correction: Correct) -> tuple[Row, Figures]:
        plan, data, begin = planned.plan, self.calibration, time.perf_counter()
        plans, seconds = {layer.module: layer for layer in plan.layers}, planned.seconds
        phase = f"{contender.name}{f' + {correction.method}' if correction.wanted else ''}, {plan.experts}"
        work = LayerWork(
            plan.experts, lambda stats: plans[stats.layer.name], correction=correction, seed=self.seed, measure=True
        )
        if not correction.wanted:  # nothing is fitted, and errors are those of what is held out
            held = data.heldout_batches
            data = Calibration(held, data.identity, heldout=frozenset(range(len(held))))
        with PeakMemory() as peak, self.evaluator.measuring(self.model.partial.model) as probe:
            layers = compress_sequentially(self.model, work, data, self.progress, probe=probe, phase=phase)
        row = self.row(
            probe.figures[0],
            plan.experts,
            name=contender.name,
            strategy=contender.strategy.name,
            correction=correction.method,
            error=_layer_error(layer.figures["correction"] for layer in layers),
            seconds=seconds + (time.perf_counter() - begin if correction.wanted else 0.0),
            peak_memory=peak.anonymous,
            seed=contender.seed,
        )
        return row, probe.figures[0]

    def constants(self, counts: Sequence[int], protected: Protected, corrections: Sequence[Correct]) -> Iterator[Row]:
        """For each count of experts as many in every layer, then as many in all where the model loses least.

        Constants stand for the others; each model is run with each correction, without writing it.
        """
        model, heldout, layers = self.model, self.calibration.heldout_batches, self.model.architecture.layers
        begin = time.perf_counter()
        measured = measure(model, self.calibration, self.progress, self.seed)
        shared = time.perf_counter() - begin
        budgets = [EVEN, UNEVEN]
        if (held := sum(map(len, heldout))) < FEWEST:
            logger.warning("%d held-out sequences are too few to divide experts unevenly; raise --samples", held)
            budgets = [EVEN]
        for count, budget in product(counts, budgets):
            removed, begin = sum(layer.experts - count for layer in layers), time.perf_counter()
            replaced, _ = choose_replaced(model, measured, protected, removed, budget, heldout, self.progress)
            variant, name = substitutes_of(replaced, measured), f"{CONSTANTS}, {budget}"
            deciding = shared + time.perf_counter() - begin
            for correction in corrections:
                begin, error = time.perf_counter(), None
                with PeakMemory() as peak:
                    if correction.wanted:
                        given = (model, variant, self.calibration, self.progress, self.seed, correction)
                        with self.evaluator.measuring(model.partial.model) as probe:
                            plans = refit(*given, probe=probe)
                        error = _layer_error(plan.figures["correction"] for plan in plans.values())
                        (figures, *_), seconds = probe.figures, time.perf_counter() - begin
                    else:
                        one, phase = [Substitution(constants=variant)], f"{name}, {count}"
                        (figures, *_), seconds = self.evaluator.measure(model, one, (), self.progress, phase), 0.0
                yield self.row(
                    figures,
                    count,
                    stored_substituted(model, variant),
                    name=name,
                    strategy=CONSTANTS,
                    correction=correction.method,
                    error=error,
                    seconds=deciding + seconds,
                    peak_memory=peak.anonymous,
                )


def stored_substituted(model: OpenModel, variant: ConstantsByLayer) -> Size:
    """Parameters and bytes of the stored tensors with these constants, which are stored as the model computes."""
    kept = Size.of(
        model.checkpoint.tensors[name] for name, role in model.layout.roles.items() if not is_replaced(role, variant)
    )
    more = sum(constants.values.numel() for constants in variant.values())
    return Size(kept.parameters + more, kept.bytes + more * model.partial.dtype.itemsize)


def compare_models(
    base: OpenModel,
    variants: Sequence[Variant],
    contenders: Sequence[Contender],
    calibration: Calibration,
    sets: Sequence[EvaluationSet],
    progress: Progress,
    seed: int = 0,
    constants: Sequence[Correct] = (),
) -> Comparison:
    """Plan with every contender at every count, from one pass of each variant, carry plans out, and evaluate all alike.

    Protected experts, by layer name, stay as they are in every plan, the random ones included. With `constants`, rows
    of whole experts for which constants stand follow, one for each of these corrections.
    """
    held = list[EvaluationSet]()  # of each calibration source, by which corrections of whole models are kept or undone
    if any(each.wanted for one in contenders for each in one.corrections):
        for place, name in enumerate(calibration.source_names):
            own = [number for number in sorted(calibration.heldout) if calibration.source_of(number) == place]
            held.append(EvaluationSet(name, tuple(calibration.batches[number] for number in own)))
    evaluator = Evaluator(base, [*sets, *held])
    table = _Table(base, calibration, evaluator, sets, progress, seed)
    with PeakMemory() as peak:
        (figures,) = evaluator.measure(base, progress=progress, phase="base")
    unchanged: dict[str, Any] = {"strategy": "base", "correction": "none", "error": 0.0, "seconds": 0.0}
    rows = [table.row(figures, base.architecture.experts, name="base", peak_memory=peak.anonymous, **unchanged)]
    shared = 0.0
    for variant in variants:
        pairs = [(contender, count) for count in variant.counts for contender in contenders]
        specs = [PruneSpec(contender.strategy, count) for contender, count in pairs]
        begin = time.perf_counter()
        plans = replace(variant.planner, model=variant.model).plans(specs, variant.protected)
        shared += time.perf_counter() - begin - sum(planned.seconds for planned in plans)
        table = _Table(variant.model, calibration, evaluator, sets, progress, seed)
        for planned, (contender, _) in zip(plans, pairs, strict=True):
            rows += table.planned(planned, contender)
        if constants and variant.model is base:
            rows += table.constants(variant.counts, variant.protected, constants)
    return Comparison(
        model=base.source.label,
        rows=tuple(rows),
        calibration=calibration.identity,
        evaluation={entry.name: entry.tokens for entry in sets},
        calibration_seconds=shared,
        seed=seed,
        versions=versions(),
        protected=listed(variants[0].protected) if len(variants) == 1 else {},
    )
