"""Comparing: one calibration pass, many plans, and for each what the compressed model loses, all streamed."""

import math
import random
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from compressor.checkpoint.headers import Size
from compressor.comparison.constants import STRATEGY as CONSTANTS
from compressor.comparison.constants import Substituted, run_judged, substituted_models
from compressor.comparison.rows import Comparison, Row
from compressor.data.batches import Calibration, EvaluationSet
from compressor.distributed.present import here
from compressor.evaluation.heldout import Judge, Judgement, evaluation_batches
from compressor.grouping.choose import keep_best
from compressor.memory import PeakMemory
from compressor.model.opened import OpenModel
from compressor.model.streaming import LayerStream
from compressor.planning.make import Planned, Wish, make_plans
from compressor.planning.protecting import Protected, listed
from compressor.planning.steering import Steering
from compressor.progress import Progress
from compressor.recipe.plan import LayerPlan
from compressor.recipe.registry import Strategy, load_strategy, read_option
from compressor.run_record import versions
from compressor.statistics.statistics import LayerStatistics, needs_data
from compressor.steps.correct.in_order import LayerWork, compress_in_order
from compressor.steps.correct.refit import Correction
from compressor.steps.correct.whole_model import Verdict
from compressor.surgery.job import idle_parameters, output_size

RANDOM = "random"


@dataclass(frozen=True, slots=True)
class Contender:
    """A strategy with options, as it is named in the table."""

    name: str
    strategy: Strategy
    options: Mapping[str, Any]
    corrections: tuple[Correction, ...]
    seed: int | None = None


def random_drop(seed: int) -> Strategy:
    """Drop experts at random, protected ones excepted; every layer draws anew."""

    def plan(stats: LayerStatistics, keep: int, protected: frozenset[int] = frozenset()) -> LayerPlan:
        draw = random.Random(f"{seed} {stats.layer.name}")
        scores = torch.tensor([draw.random() for _ in range(stats.layer.experts)])
        return keep_best(stats, scores, keep, protected, decided_by="chance")

    return Strategy(RANDOM, plan, frozenset())


def parse_contender(text: str, corrections: Sequence[str] | None) -> Contender:
    """A strategy's name, or name:option=value:option=value; corrected by its own default as well, if it has one."""
    name, *settings = text.split(":")
    options = dict(
        read_option(setting, f"strategy {text!r}: {setting!r} should be option=value") for setting in settings
    )
    strategy = load_strategy(name, options)
    methods = dict.fromkeys(corrections or ("none", strategy.correction))
    shown = " ".join([name, *(f"({setting})" for setting in settings)])
    return Contender(shown, strategy, options, tuple(Correction(method) for method in methods))


def _judge_original(model: OpenModel, judge: Judge, progress: Progress) -> None:
    units, batches = model.architecture.units, judge.tokens
    progress.start("original", len(units))
    stream = LayerStream(model.partial, batches, units, units, range(len(batches)), own=here().own(batches))
    for unit in stream.passing(judge):
        progress.advance(unit)


def _mean(found: Iterable[Judgement]) -> Judgement:
    """All sets together, each token counting alike."""
    parts = list(found)
    return Judgement(sum(p.tokens for p in parts), sum(p.loss for p in parts), sum(p.kl for p in parts))


def _heldout(calibration: Calibration) -> Calibration:
    """The held-out batches alone."""
    batches = calibration.heldout_batches
    return Calibration(batches, calibration.identity, heldout=frozenset(range(len(batches))))


def _held_by_source(calibration: Calibration) -> list[EvaluationSet]:
    """What is held out of each calibration source, for judging corrections of whole models."""
    found: list[list[torch.Tensor]] = [[] for _ in calibration.source_names]
    for number in sorted(calibration.heldout):
        found[calibration.source_of(number)].append(calibration.batches[number])
    return [EvaluationSet(name, tuple(batches)) for name, batches in zip(calibration.source_names, found, strict=True)]


def _layer_error(layers: Sequence[LayerPlan]) -> float | None:
    errors = [layer.figures["correction"].get("heldout_error") for layer in layers]
    known = [error for error in errors if error is not None]
    return sum(known) / len(known) if known else None


@dataclass(frozen=True, slots=True)
class Variant:
    """The model as it is to be cut: with whole or split experts, and its own or another top-k; to these counts."""

    model: OpenModel
    counts: Sequence[int]
    protected: Protected | None = None
    steering: Steering | None = None


@dataclass(slots=True)
class _Table:
    """Rows in the making."""

    model: OpenModel
    judge: Judge
    sets: Sequence[EvaluationSet]
    progress: Progress
    seed: int
    sizes: dict[int, tuple[Size, int]] = field(default_factory=dict)  # by experts kept: stored, and idle parameters

    @property
    def _shown(self) -> list[Judgement]:
        """What was found on the sets that rows tell; the calibration's held-out sets come after these."""
        return self.judge.found[: len(self.sets)]

    def _apart(self, source: int | None) -> list[float]:
        """KL of each sequence that is held out of a calibration source, or of all."""
        held = self.judge.kl_of[len(self.sets) :]
        return [value for part in (held if source is None else held[source : source + 1]) for value in part]

    def row(self, name: str, experts: int, seconds: float, peak: int, stored: Size | None = None, **more: Any) -> Row:
        """A row of what the judge has just found."""
        whole = _mean(self._shown)
        if experts not in self.sizes:  # for which the smaller model is built
            self.sizes[experts] = output_size(self.model, experts), idle_parameters(self.model, experts)
        cut, idle = self.sizes[experts]
        size = stored or cut
        loss = whole.loss / whole.tokens
        return Row(
            name=name,
            experts=experts,
            parameters=size.parameters,
            bytes=size.bytes,
            loss=loss,
            perplexity=math.exp(loss) if loss < 700 else math.inf,
            kl=max(0.0, whole.kl / whole.tokens),
            seconds=seconds,
            peak_memory=peak,
            loss_by_source={
                entry.name: part.loss / part.tokens for entry, part in zip(self.sets, self._shown, strict=True)
            },
            split=self.model.architecture.layers[0].parts,
            top_k=self.model.top_k,
            active=None if self.model.layout.quantized else size.parameters - idle,
            **more,
        )

    def judged(self, planned: Planned, contender: Contender, calibration: Calibration) -> list[Row]:
        """Carry a plan out with each correction layer by layer without writing it, and judge what comes out.

        As in `compress`, a correction is undone that takes the whole model further away on what is held out.
        """
        data, source = planned.calibration or calibration, None
        if planned.source is not None:
            source = calibration.source_names.index(planned.source)
        same = planned.source is not None and not needs_data(contender.strategy.needs)  # the plan for all, again
        rows: list[Row] = []
        if same and not any(correction.wanted for correction in contender.corrections):
            return rows
        plain = self._carried_out(planned, contender, Correction(), data)
        apart = self._apart(source)
        for correction in contender.corrections:
            if not correction.wanted:
                rows += [] if same else [plain]
                continue
            row = self._carried_out(planned, contender, correction, data)
            if apart and Verdict.of(self._apart(source), apart).undoes:
                row = replace(
                    plain, correction=row.correction, seconds=row.seconds, peak_memory=row.peak_memory, undone=True
                )
            rows.append(row)
        return rows

    def _carried_out(self, planned: Planned, contender: Contender, correction: Correction, data: Calibration) -> Row:
        plans = {layer.module: layer for layer in planned.plan.layers}
        method = "" if correction.method == "none" else f" + {correction.method}"
        work = LayerWork(
            planned.plan.experts,
            lambda stats: plans[stats.layer.name],
            correction=correction,
            seed=self.seed,
            measure=True,
        )
        begin = time.perf_counter()
        with PeakMemory() as peak, self.judge.watch(self.model.partial.model):
            layers = compress_in_order(
                self.model,
                work,
                data if correction.wanted else _heldout(data),
                self.progress,
                judge=self.judge,
                phase=f"{contender.name}{method}, {planned.plan.experts}",
            )
        spent = time.perf_counter() - begin if correction.wanted else 0.0
        return self.row(
            contender.name,
            planned.plan.experts,
            planned.seconds + spent,
            peak.anonymous,
            strategy=planned.plan.strategy,
            correction=correction.method,
            error=_layer_error(layers),
            source=planned.source,
            seed=contender.seed,
        )

    def substituted(self, made: Substituted, correction: Correction, calibration: Calibration) -> Row:
        """Run a model in which constants stand for experts, without writing it, and judge it."""
        begin = time.perf_counter()
        with PeakMemory() as peak, self.judge.watch(self.model.partial.model):
            error = run_judged(self.model, made, correction, calibration, self.judge, self.progress, self.seed)
        spent = time.perf_counter() - begin if correction.wanted else 0.0
        return self.row(
            made.name,
            made.experts,
            made.seconds + spent,
            peak.anonymous,
            made.size,
            strategy=CONSTANTS,
            correction=correction.method,
            error=error,
        )


def compare_models(
    original: OpenModel,
    variants: Sequence[Variant],
    contenders: Sequence[Contender],
    calibration: Calibration,
    sets: Sequence[EvaluationSet],
    progress: Progress,
    seed: int = 0,
    per_source: bool = False,
    constants: Sequence[Correction] = (),
) -> Comparison:
    """Plan with every contender at every count, from one pass of each variant, carry plans out, and judge all alike.

    Protected experts, by layer name, stay as they are in every plan, the random ones included. With `constants`, rows
    of whole experts for which constants stand follow, one for each of these corrections.
    """
    held = _held_by_source(calibration) if any(each.wanted for one in contenders for each in one.corrections) else []
    judge = Judge(evaluation_batches([*sets, *held], original.vocabulary), len(sets) + len(held))
    table = _Table(original, judge, sets, progress, seed)
    with PeakMemory() as peak, judge.watch(original.partial.model):
        _judge_original(original, judge, progress)
    before = original.architecture.experts
    rows = [table.row("original", before, 0.0, peak.anonymous, strategy="original", correction="none", error=0.0)]
    shared = 0.0
    for variant in variants:
        made, spent = _planned(variant, contenders, calibration, progress, seed, per_source)
        shared += spent
        table = _Table(variant.model, judge, sets, progress, seed)
        for contender, planned in made:
            rows += table.judged(planned, contender, calibration)
        if constants and variant.model is original:
            for found in substituted_models(original, variant.counts, calibration, progress, seed, variant.protected):
                rows += [table.substituted(found, correction, calibration) for correction in constants]
    return Comparison(
        model=original.source.label,
        rows=tuple(rows),
        calibration=calibration.identity,
        evaluation={entry.name: sum(batch.numel() for batch in entry.batches) for entry in sets},
        calibration_seconds=shared,
        seed=seed,
        versions=versions(),
        protected=listed(variants[0].protected) if len(variants) == 1 else {},
    )


def _planned(
    variant: Variant,
    contenders: Sequence[Contender],
    calibration: Calibration,
    progress: Progress,
    seed: int,
    per_source: bool,
) -> tuple[list[tuple[Contender, Planned]], float]:
    """Each contender's plans of a variant, and the seconds of the pass that they share."""
    pairs = [(contender, count) for count in variant.counts for contender in contenders]
    wishes = [Wish(contender.strategy, count, contender.options) for contender, count in pairs]
    begin = time.perf_counter()
    made = make_plans(
        variant.model, wishes, calibration, progress, seed, variant.protected, per_source, variant.steering
    )
    shared = time.perf_counter() - begin - sum(planned.seconds for planned in made)
    return [(pairs[planned.wish][0], planned) for planned in made], shared
