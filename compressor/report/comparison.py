"""Comparing: one calibration pass, many plans, and for each what the compressed model loses, all
streamed.

Rows of models in which constants stand for experts (`compare --format mone`), even and uneven, come
beside the drops."""

import logging
import math
import random
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from compressor.answers.scores import ItemScores
from compressor.checkpoint.reader import Size
from compressor.data.batches import Calibration, EvaluationSet
from compressor.distributed import refuse_several
from compressor.divergence.evaluator import FEWEST, Evaluator, Figures, accepts
from compressor.entry_points import read_option
from compressor.errors import CompressionError
from compressor.memory import PeakMemory
from compressor.model.constant_experts import is_replaced
from compressor.model.moe_layer import resolve_count
from compressor.model.opened import OpenModel, shared_experts
from compressor.model.substitution import Substitution
from compressor.pipeline.resolve import HELDOUT, Session, read_calibration, read_evaluation
from compressor.progress import Progress
from compressor.quality_gate.domains import several_domains
from compressor.recipe.plan import UNEVEN, ExpertPlan, LayerPlan
from compressor.recipe.recipe import make_step
from compressor.recipe.registry import Strategy, load_strategy, working_strategies
from compressor.recipe.step import TextOptions
from compressor.report.comparison_report import BY_SOURCE, Comparison, Row
from compressor.report.grid import Grid
from compressor.report.task_scores import TaskRun, with_differences
from compressor.run_record import versions
from compressor.statistics.statistics import ATTRIBUTED, LayerStatistics
from compressor.steps.constants.search import (
    EVEN,
    ConstantsByLayer,
    choose_replaced,
    measure,
    refit,
    substitutes_of,
)
from compressor.steps.constants.step import refuse_model
from compressor.steps.correct.options import Correct
from compressor.steps.correct.sequential import LayerWork, compress_sequentially
from compressor.steps.cutting import CutFiles
from compressor.steps.job import idle_parameters, output_size
from compressor.steps.prune.options import Prune
from compressor.steps.prune.planning import Planned, Planner, PruneSpec, protected_experts
from compressor.steps.prune.protection import Protected, given_protected, listed
from compressor.steps.prune.selection import keep_best
from compressor.steps.split.view import partitioned, seen_as, with_top_k

RANDOM, CONSTANTS = "random", "constants"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A strategy with options and corrections, by its name in the table."""

    name: str
    strategy: Strategy
    options: Mapping[str, Any]
    corrections: tuple[Correct, ...]
    seed: int | None = None


def random_drop(seed: int) -> Strategy:
    """Drop experts at random, protected ones excepted; every layer draws anew."""

    def plan(
        stats: LayerStatistics, keep: int, protected: frozenset[int] = frozenset()
    ) -> LayerPlan:
        draw = random.Random(f"{seed} {stats.layer.name}")
        scores = torch.tensor([draw.random() for _ in range(stats.layer.experts)])
        return keep_best(stats, scores, keep, protected, decided_by="chance")

    return Strategy(RANDOM, plan, frozenset())


def correction(method: str) -> Correct:
    """Return the step of that method; raises `CompressionError` for an unknown one."""
    step = make_step("correct", {"method": method})
    assert isinstance(step, Correct)
    return step


def parse_candidate(text: str, corrections: Sequence[str] | None) -> Candidate:
    """Read name or name:option=value:option=value; by default, its own correction is tried beside
    none.

    The option `balance` is that of `prune`.
    """
    name, *settings = text.split(":")
    options = dict(
        read_option(setting, f"strategy {text!r}: {setting!r} should be option=value")
        for setting in settings
    )
    prune = make_step("prune", {"balance": options.pop("balance", None)})
    assert isinstance(prune, Prune)
    strategy = load_strategy(name, options).balancing(prune.balance)
    methods = dict.fromkeys(corrections or ("none", strategy.correction))
    shown = " ".join([name, *(f"({setting})" for setting in settings)])
    return Candidate(shown, strategy, options, tuple(correction(method) for method in methods))


def _layer_error(corrections: Iterable[Mapping[str, Any]]) -> float | None:
    """Return the mean error over the layers that recorded one; None if no layer did."""
    errors = [figures.get("heldout_error") for figures in corrections]
    known = [error for error in errors if error is not None]
    return fmean(known) if known else None


def measured(figures: Figures, sources: Sequence[str]) -> dict[str, Any]:
    """Return what a row says of figures; `sources` are the evaluation sets that it shows, the first
    ones."""
    means = figures.of(range(len(sources))).means
    by_source = {name: figures.of({number}).means for number, name in enumerate(sources)}
    divergence = several_domains(figures, dict(enumerate(sources)))
    row: dict[str, Any] = {
        "loss": means["loss"],
        "perplexity": math.exp(means["loss"]) if means["loss"] < 700 else math.inf,
        "kl": max(0.0, means["kl"]),
        "flips": means["flips"],
        "errors_by_source": {},
    }
    for figure, field_name in BY_SOURCE.items():
        row[field_name] = {name: max(source[figure], 0.0) for name, source in by_source.items()}
    if divergence is None:
        return row
    row["degraded"] = tuple(domain.domain for domain in divergence.degraded)
    for figure in BY_SOURCE:
        errors = {
            domain.domain: getattr(domain, figure).standard_error for domain in divergence.domains
        }
        row["errors_by_source"][figure] = errors
    return row


@dataclass(slots=True)
class _RowBuilder:
    """Rows in the making. The calibration's held-out sets come after the evaluation sets that rows
    show."""

    model: OpenModel
    calibration: Calibration
    evaluator: Evaluator
    sets: Sequence[EvaluationSet]
    progress: Progress
    seed: int
    tasks: TaskRun | None = None
    # by experts kept: stored, and idle parameters
    sizes: dict[int, tuple[Size, int]] = field(default_factory=dict)

    def row(self, figures: Figures, experts: int, stored: Size | None = None, **more: Any) -> Row:
        """Return a model's row."""
        if experts not in self.sizes:  # for which the smaller model is built
            self.sizes[experts] = (
                output_size(self.model, experts),
                idle_parameters(self.model, experts),
            )
        cut, idle = self.sizes[experts]
        size = stored or cut
        layer = self.model.architecture.layers[0]
        return Row(
            experts=experts,
            experts_before=layer.experts,
            parameters=size.parameters,
            bytes=size.bytes,
            split=layer.parts,
            top_k=self.model.top_k,
            active=None if self.model.layout.quantized else size.parameters - idle,
            **measured(figures, [evaluation_set.name for evaluation_set in self.sets]),
            **more,
        )

    def planned(self, planned: Planned, candidate: Candidate) -> list[Row]:
        """Carry a plan out with each correction layer by layer without writing it, and evaluate the
        result.

        As in `compress`, a correction is undone that takes the whole model further away on what is
        held out."""
        heldout = range(len(self.sets), len(self.evaluator.names))
        corrections = list(candidate.corrections)
        none = Correct(method="none")
        plain, uncorrected = self._carried_out(planned, candidate, none)
        answer = lru_cache(partial(self._answers, planned.plan))
        rows = []
        for correction in corrections:
            row = plain
            with tempfile.TemporaryDirectory() as folder:
                files = None
                if correction.wanted:
                    files = CutFiles(Path(folder)) if self.tasks is not None else None
                    row, figures = self._carried_out(planned, candidate, correction, files)
                    if accepts(figures.of(heldout), uncorrected.of(heldout)):
                        undone = replace(plain, correction=correction.method, undone=True)
                        row = replace(undone, seconds=row.seconds, peak_memory=row.peak_memory)
                        files = None
                rows.append(replace(row, answers=answer(files)))
        return rows

    def _answers(self, plan: ExpertPlan, files: CutFiles | None) -> tuple[ItemScores, ...]:
        return (
            () if self.tasks is None else self.tasks.answer(self.model, plan, files, self.progress)
        )

    def _carried_out(
        self,
        planned: Planned,
        candidate: Candidate,
        correction: Correct,
        files: CutFiles | None = None,
    ) -> tuple[Row, Figures]:
        begin = time.perf_counter()
        experts = planned.plan.experts
        plans = {layer.module: layer for layer in planned.plan.layers}
        work = LayerWork(
            experts,
            lambda stats: plans[stats.layer.name],
            correction=correction,
            seed=self.seed,
            measure=True,
        )
        if correction.wanted:
            calibration = self.calibration
            name = f"{candidate.name} + {correction.method}"
        else:  # nothing is fitted, and errors are those of what is held out
            heldout = self.calibration.heldout_batches
            calibration = Calibration(
                heldout, self.calibration.identity, heldout=frozenset(range(len(heldout)))
            )
            name = candidate.name
        phase = f"{name}, {experts}"
        with PeakMemory() as peak, self.evaluator.measuring(self.model.partial.model) as probe:
            layers = compress_sequentially(
                self.model, work, calibration, self.progress, files, probe, phase
            )
        correcting = time.perf_counter() - begin if correction.wanted else 0.0
        row = self.row(
            probe.figures[0],
            experts,
            name=candidate.name,
            strategy=candidate.strategy.name,
            correction=correction.method,
            error=_layer_error(layer.figures["correction"] for layer in layers),
            seconds=planned.seconds + correcting,
            peak_memory=peak.anonymous,
            seed=candidate.seed,
        )
        return row, probe.figures[0]

    def constants(
        self, counts: Sequence[int], protected: Protected, corrections: Sequence[Correct]
    ) -> Iterator[Row]:
        """Yield rows of models in which constants replace experts, for each count and correction;
        nothing is written.

        Each count is kept in every layer, then on average over layers, where the model loses least.
        """
        model = self.model
        heldout = self.calibration.heldout_batches
        layers = model.architecture.layers
        begin = time.perf_counter()
        measured = measure(model, self.calibration, self.progress, self.seed)
        shared = time.perf_counter() - begin
        budgets = [EVEN, UNEVEN]
        sequences = sum(map(len, heldout))
        if sequences < FEWEST:
            logger.warning(
                "%d held-out sequences are too few to divide experts unevenly; raise --samples",
                sequences,
            )
            budgets = [EVEN]
        for count, budget in product(counts, budgets):
            begin = time.perf_counter()
            removed = sum(layer.experts - count for layer in layers)
            replaced, _ = choose_replaced(
                model, measured, protected, removed, budget, heldout, self.progress
            )
            variant = substitutes_of(replaced, measured)
            name = f"{CONSTANTS}, {budget}"
            deciding = shared + time.perf_counter() - begin
            for correction in corrections:
                begin = time.perf_counter()
                error = None
                seconds = 0.0
                with PeakMemory() as peak:
                    if correction.wanted:
                        with self.evaluator.measuring(model.partial.model) as probe:
                            plans = refit(
                                model,
                                variant,
                                self.calibration,
                                self.progress,
                                self.seed,
                                correction,
                                probe=probe,
                            )
                        figures = probe.figures[0]
                        error = _layer_error(plan.figures["correction"] for plan in plans.values())
                        seconds = time.perf_counter() - begin
                    else:
                        substituted = [Substitution(constants=variant)]
                        phase = f"{name}, {count}"
                        (figures,) = self.evaluator.measure(
                            model, substituted, progress=self.progress, phase=phase
                        )
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
    """Return parameters and bytes of the stored tensors with these constants, in the dtype of the
    model."""
    kept = Size.of(
        model.checkpoint.tensors[name]
        for name, role in model.layout.roles.items()
        if not is_replaced(role, variant)
    )
    more = sum(constants.values.numel() for constants in variant.values())
    return Size(kept.parameters + more, kept.bytes + more * model.partial.dtype.itemsize)


def candidates_of(grid: Grid) -> list[Candidate]:
    """Return the strategies to compare, each once, and without formats random drops; no model is
    read.

    Raises `CompressionError` for unknown strategies, options and corrections, and constants on
    several processes."""
    if grid.constants:
        refuse_several("--format mone", "leave it out, or start the command without torchrun")
    # others follow a list
    measuring = [strategy.name for strategy in working_strategies() if strategy.needs]
    texts = grid.strategies or (["auto"] if grid.schemes else measuring)
    candidates = [parse_candidate(text, grid.corrections) for text in texts]
    none = (Correct(method="none"),)
    for seed in range(0 if grid.schemes else grid.random_seeds):
        candidates.append(Candidate(f"random (seed {seed})", random_drop(seed), {}, none, seed))
    if len({candidate.name for candidate in candidates}) < len(candidates):
        raise CompressionError(
            "--strategies names one twice; name each once, or with other options"
        )
    return candidates


def read_texts(
    run: Session, grid: Grid, text: TextOptions, seed: int
) -> tuple[Calibration, Sequence[EvaluationSet]]:
    """Return the calibration text, and the text to evaluate on, which may be reserved of the
    calibration's."""
    most = grid.evaluation_samples
    if not grid.evaluate:
        calibration = read_calibration(run, text, seed, HELDOUT, most)
        return calibration, calibration.reserved
    evaluation = read_evaluation(run, grid.evaluate, text, seed, most)
    return read_calibration(run, text, seed, HELDOUT), evaluation


def _attributable(
    candidates: Sequence[Candidate], planner: Planner, named: bool
) -> list[Candidate]:
    """Return the candidates, without unnamed ones that need an attribution if the model has
    none."""
    try:
        planner.rank_changes([candidate.strategy for candidate in candidates])
    except CompressionError as error:
        if named:
            raise
        logger.warning("%s; it is left out", error)
        return [candidate for candidate in candidates if not candidate.strategy.needs & ATTRIBUTED]
    return list(candidates)


def _counts(model: OpenModel, grid: Grid, prune: Prune) -> list[int]:
    """Return the experts to keep, each count once, checked against the model and what a list
    protects."""
    layers = model.architecture.layers
    counts = [resolve_count(layers, count * layers[0].parts, None) for count in grid.experts]
    counts += [resolve_count(layers, None, ratio) for ratio in grid.ratios]
    counts = list(dict.fromkeys(counts))
    given_protected(prune.protect, layers, min(counts, default=model.architecture.experts))
    shared = shared_experts(model)
    if shared:
        raise CompressionError(
            f"{shared} shares its experts with another layer, so plans cannot be carried out in "
            "order as comparing "
            "them takes; compress with one strategy after another instead"
        )
    return counts


def compare_strategies(
    run: Session,
    grid: Grid,
    candidates: Sequence[Candidate],
    text: TextOptions,
    seed: int,
    tasks: TaskRun | None = None,
) -> Comparison:
    """Plan with every strategy at every count, carry plans out with each correction, and evaluate
    all alike.

    The model is tried with whole experts and with sub-experts, and with each top-k; one pass
    collects statistics for all plans of these experts. Protected experts stay as they are in every
    plan, the random ones included."""
    base = run.model
    progress = run.progress
    prune = Prune(protect=grid.protect, sample_tokens=grid.sample_tokens)
    constants = (
        [correction(method) for method in grid.corrections or ("none",)] if grid.constants else []
    )
    views = [seen_as(base, int(parts)) for parts in dict.fromkeys(grid.splits or (1,))]
    top_ks = list[int | None](dict.fromkeys(grid.top_ks)) or [None]
    for view, top_k in product(views, top_ks):
        _counts(with_top_k(view, top_k), grid, prune)  # refused before text is read
    if constants:
        refuse_model(base)
    answers = () if tasks is None else tuple(tasks.plan(base.source).run(progress).values())
    calibration, sets = read_texts(run, grid, text, seed)
    calibration = replace(calibration, sample_tokens=prune.sample_count)
    changed = any(method.wanted for candidate in candidates for method in candidate.corrections)
    # by which corrections of whole models are kept or undone
    heldout = [EvaluationSet("held-out", calibration.heldout_batches)] if changed else []
    evaluator = Evaluator(base, [*sets, *heldout])
    with PeakMemory() as peak:
        (figures,) = evaluator.measure(base, progress=progress, phase="base")
    table = _RowBuilder(base, calibration, evaluator, sets, progress, seed)
    unchanged: dict[str, Any] = {
        "strategy": "base",
        "correction": "none",
        "error": 0.0,
        "seconds": 0.0,
    }
    unchanged["answers"] = answers
    rows = [
        table.row(
            figures, base.architecture.experts, name="base", peak_memory=peak.anonymous, **unchanged
        )
    ]
    shared = 0.0
    protected: Protected = {}
    for view in views:
        if view.is_split:
            view = partitioned(view, calibration, progress, seed, changed=changed)
        planner = Planner(view, calibration, progress, seed)
        candidates = _attributable(candidates, planner, named=bool(grid.strategies))
        for top_k in top_ks:
            model = with_top_k(view, top_k)
            counts = _counts(model, grid, prune)
            protected = protected_experts(
                prune.protect, min(counts, default=view.architecture.experts), planner
            )
            pairs = list(product(counts, candidates))
            specs = [PruneSpec(candidate.strategy, count) for count, candidate in pairs]
            begin = time.perf_counter()
            plans = replace(planner, model=model).plans(specs, protected)
            shared += time.perf_counter() - begin - sum(planned.seconds for planned in plans)
            table = _RowBuilder(model, calibration, evaluator, sets, progress, seed, tasks)
            for planned, (_, candidate) in zip(plans, pairs, strict=True):
                rows += table.planned(planned, candidate)
            if constants and model is base:
                rows += table.constants(counts, protected, constants)
    return Comparison(
        model=base.source.label,
        rows=tuple(rows) if tasks is None else with_differences(rows),
        calibration=calibration.identity,
        evaluation={evaluation_set.name: evaluation_set.tokens for evaluation_set in sets},
        calibration_seconds=shared,
        seed=seed,
        versions=versions(),
        protected=listed(protected) if len(views) * len(top_ks) == 1 else {},
    )
