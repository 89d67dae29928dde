"""Comparing: one calibration pass, many plans, and for each what the compressed model loses, all
streamed.

Rows of models in which constants stand for experts (`compare --format mone`), even and uneven, come
beside the drops. With tasks, every model answers the same items, and each is paired with the
base's."""

import logging
import random
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from functools import lru_cache
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from compressor.answers.lm_eval_run import plan_evaluation
from compressor.answers.models import identity
from compressor.answers.options import TaskOptions
from compressor.answers.scores import ItemScores
from compressor.answers.tasks import EvaluationOptions, EvaluationTask, resolve_tasks
from compressor.checkpoint.reader import Size
from compressor.checkpoint.source import ModelSource
from compressor.data.batches import Calibration, EvaluationSet, evaluation_sets
from compressor.distributed import refuse_several
from compressor.divergence.evaluator import FEWEST, Evaluator, Figures, HeldoutProbe, accepts
from compressor.entry_points import read_option
from compressor.errors import CompressionError
from compressor.files import default_folder
from compressor.frozen import frozen
from compressor.memory import PeakMemory
from compressor.model.constant_experts import is_replaced
from compressor.model.moe_layer import resolve_count
from compressor.model.opened import OpenModel, shared_experts
from compressor.model.substitution import Substitution
from compressor.model.tokenizer import load_tokenizer
from compressor.options import validated
from compressor.pipeline.resolve import HELDOUT, Session, read_calibration
from compressor.progress import Progress
from compressor.quality_gate.options import GateOptions
from compressor.quality_gate.statistics import judge
from compressor.quality_gate.verdict import TaskGate
from compressor.recipe.plan import UNEVEN, ExpertPlan, LayerPlan
from compressor.recipe.recipe import default_steps, make_step
from compressor.recipe.registry import Strategy, load_strategy, working_strategies
from compressor.recipe.step import TextOptions
from compressor.report.comparison_report import Comparison
from compressor.report.comparison_rows import Row, Variant, row_of
from compressor.report.grid import Grid
from compressor.report.sizes import compare_sizes
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
from compressor.steps.job import active_parameters, make_job, output_size
from compressor.steps.prune.options import Prune
from compressor.steps.prune.planning import (
    Planned,
    Planner,
    Protected,
    PruneSpec,
    given_protected,
    listed,
    protected_experts,
)
from compressor.steps.prune.selection import keep_best
from compressor.steps.split.view import partitioned, seen_as, with_top_k
from compressor.steps.workdir import write_checkpoint

RANDOM, CONSTANTS = "random", "constants"
UNCORRECTED = Correct(method="none")

logger = logging.getLogger(__name__)


@frozen
class Candidate:
    """A strategy with options and corrections, by its name in the table."""

    name: str
    strategy: Strategy
    options: Mapping[str, Any]
    corrections: tuple[Correct, ...]
    seed: int | None = None


@frozen
class TaskRun:
    """The tasks of a comparison, and the folder with results of earlier runs."""

    tasks: tuple[EvaluationTask, ...]
    options: EvaluationOptions
    cache: Path

    @classmethod
    def read(
        cls, named: TaskOptions, grid: Grid, device: str, dtype: str, cache: Path | None = None
    ) -> "TaskRun | None":
        """Load the tasks; None if none are named. Raises `CompressionError` for those that there
        aren't."""
        if not named.tasks:
            for name in named.model_fields_set:
                raise CompressionError(f"--{name.replace('_', '-')} is of tasks; name --tasks, too")
            return None
        if grid.schemes or grid.constants:
            raise CompressionError(
                "--tasks compares models with fewer experts; leave out number formats and --format"
            )
        refuse_several("--tasks")
        options = EvaluationOptions.of(named, device, dtype)
        return cls(resolve_tasks(options), options, cache or default_folder())

    def answer(
        self, model: OpenModel, plan: ExpertPlan, files: CutFiles | None, progress: Progress
    ) -> tuple[ItemScores, ...]:
        """Write the smaller model of a plan, with refitted layers from `files`, and have it answer
        the tasks.

        Its files are gone afterwards. An equal model's results are taken from an earlier run.
        """
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch) / f"{plan.experts} experts"
            job = make_job(model, plan, files)
            progress.start("write", len(job.decoder_layers))
            write_checkpoint(job, folder, ["prune"], progress.advance)
            model.partial.stream()  # lm-eval may load the smaller model as a whole
            source = ModelSource.of(folder)
            content = identity(source, digests=True)
            del content["weights"]  # times of files
            planned = plan_evaluation(source, self.tasks, self.options, self.cache, content=content)
            return tuple(planned.run(progress).values())


def random_drop(seed: int) -> Strategy:
    """Drop experts at random, protected ones excepted; every layer draws anew."""

    def plan(
        stats: LayerStatistics, keep: int, protected: frozenset[int] = frozenset()
    ) -> LayerPlan:
        draw = random.Random(f"{seed} {stats.layer.name}")
        scores = torch.tensor([draw.random() for _ in range(stats.layer.experts)])
        return keep_best(stats, scores, keep, protected, decided_by="chance")

    return Strategy(RANDOM, plan, frozenset())


def corrections_of(methods: Iterable[str]) -> tuple[Correct, ...]:
    """Return corrections of these methods, each once."""
    unique = dict.fromkeys(methods)
    return tuple(validated(Correct, {"method": method}, "correct") for method in unique)


def candidates_of(grid: Grid) -> list[Candidate]:
    """Return the strategies to compare, each once, and without formats random drops; no model is
    read.

    A strategy is a name or name:option=value:option=value, where the option `balance` is that of
    `prune`; by default, its own correction is tried beside none. Raises `CompressionError` for
    unknown strategies, options and corrections, and constants on several processes."""
    if grid.constants:
        refuse_several("--format mone", "leave it out, or start the command without torchrun")
    # others follow a list
    measuring = [strategy.name for strategy in working_strategies() if strategy.needs]
    candidates = list[Candidate]()
    for text in grid.strategies or (["auto"] if grid.schemes else measuring):
        name, *settings = text.split(":")
        options = dict(
            read_option(setting, f"strategy {text!r}: {setting!r} should be option=value")
            for setting in settings
        )
        prune = make_step("prune", {"balance": options.pop("balance", None)})
        assert isinstance(prune, Prune)
        strategy = load_strategy(name, options).balancing(prune.balance)
        corrections = corrections_of(grid.corrections or ("none", strategy.correction))
        shown = " ".join([name, *(f"({setting})" for setting in settings)])
        candidates.append(Candidate(shown, strategy, options, corrections))
    for seed in range(0 if grid.schemes else grid.random_seeds):
        drop = random_drop(seed)
        candidates.append(Candidate(f"random (seed {seed})", drop, {}, (UNCORRECTED,), seed))
    if len({candidate.name for candidate in candidates}) < len(candidates):
        raise CompressionError(
            "--strategies names one twice; name each once, or with other options"
        )
    return candidates


@frozen
class _Bench:
    """What every variant of a model is carried out and measured with. The calibration's held-out
    sets come after the evaluation `sets` that rows show."""

    model: OpenModel
    calibration: Calibration
    evaluator: Evaluator
    sets: Sequence[EvaluationSet]
    progress: Progress
    seed: int
    tasks: TaskRun | None
    # by experts kept: stored, and active parameters
    sizes: dict[int, tuple[Size, int | None]] = field(default_factory=dict)

    def variant(self, experts: int, stored: Size | None = None, **way: Any) -> Variant:
        """Return a variant of this size; its tensors are `stored`, by default those that stay with
        so many experts."""
        model = self.model
        if experts not in self.sizes:  # for which the smaller model is built
            size = output_size(model, experts)
            self.sizes[experts] = size, active_parameters(model, experts, size.parameters)
        size, active = self.sizes[experts]
        if stored is not None:
            active = None if active is None else active + stored.parameters - size.parameters
            size = stored
        layer = model.architecture.layers[0]
        return Variant(
            experts=experts,
            experts_before=layer.experts,
            parameters=size.parameters,
            bytes=size.bytes,
            split=layer.parts,
            top_k=model.top_k,
            active=active,
            **way,
        )

    def carried_out(
        self,
        variant: Variant,
        work: Callable[[HeldoutProbe], Iterable[LayerPlan]],
        seconds: float,
    ) -> tuple[Row, Figures]:
        """Carry a variant out layer by layer without writing it, evaluating it on the way; returns
        its row, and its figures on all sets. Deciding took so many `seconds`."""
        begin = time.perf_counter()
        with PeakMemory() as peak, self.evaluator.measuring(self.model.partial.model) as probe:
            layers = work(probe)
        if variant.correction != UNCORRECTED.method:
            seconds += time.perf_counter() - begin
        (figures,) = probe.figures
        errors = [layer.figures["correction"].get("heldout_error") for layer in layers]
        known = [error for error in errors if error is not None]
        more = {"error": fmean(known) if known else None, "peak_memory": peak.anonymous}
        return row_of(variant, figures, self.sets, seconds=seconds, **more), figures

    def rows(self, planned: Planned, candidate: Candidate) -> Iterator[Row]:
        """Yield a plan's row with each correction.

        As in `compress`, a correction is undone that takes the whole model further away on what is
        held out."""
        plan = planned.plan
        plans = plan.by_module
        heldout_sets = range(len(self.sets), len(self.evaluator.names))
        # where nothing is fitted, errors are those of what is held out
        batches = self.calibration.heldout_batches
        everything = frozenset(range(len(batches)))
        heldout = Calibration(batches, self.calibration.identity, heldout=everything)

        def carried_out(correction: Correct, files: CutFiles | None) -> tuple[Row, Figures]:
            variant = self.variant(
                plan.experts,
                name=candidate.name,
                strategy=candidate.strategy.name,
                correction=correction.method,
                seed=candidate.seed,
            )
            work = LayerWork(
                plan.experts,
                lambda stats: plans[stats.layer.name],
                correction=correction,
                seed=self.seed,
                measure=True,
            )
            text = self.calibration if correction.wanted else heldout
            name = candidate.name + (f" + {correction.method}" if correction.wanted else "")
            phase = f"{name}, {plan.experts}"

            def compressed(probe: HeldoutProbe) -> tuple[LayerPlan, ...]:
                return compress_sequentially(
                    self.model, work, text, self.progress, files, probe, phase
                )

            return self.carried_out(variant, compressed, planned.seconds)

        @lru_cache
        def answers(files: CutFiles | None) -> tuple[ItemScores, ...]:
            if self.tasks is None:
                return ()
            return self.tasks.answer(self.model, plan, files, self.progress)

        plain, uncorrected = carried_out(UNCORRECTED, None)
        for correction in candidate.corrections:
            if not correction.wanted:
                yield replace(plain, answers=answers(None))
                continue
            with tempfile.TemporaryDirectory() as folder:
                files = None if self.tasks is None else CutFiles(Path(folder))
                row, figures = carried_out(correction, files)
                if accepts(figures.of(heldout_sets), uncorrected.of(heldout_sets)):
                    row = replace(
                        plain,
                        variant=row.variant,
                        undone=True,
                        seconds=row.seconds,
                        peak_memory=row.peak_memory,
                    )
                    files = None
                yield replace(row, answers=answers(files))

    def constants(
        self, counts: Sequence[int], protected: Protected, corrections: Sequence[Correct]
    ) -> Iterator[Row]:
        """Yield rows of models in which constants replace experts, for each count and correction;
        nothing is written.

        Each count is kept in every layer, then on average over layers, where the model loses least.
        """
        model = self.model
        calibration = self.calibration
        heldout = calibration.heldout_batches
        begin = time.perf_counter()
        measured = measure(model, calibration, self.progress, self.seed)
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
            removed = sum(layer.experts - count for layer in model.architecture.layers)
            replaced, _ = choose_replaced(
                model, measured, protected, removed, budget, heldout, self.progress
            )
            seconds = shared + time.perf_counter() - begin
            constants = substitutes_of(replaced, measured)
            kept = Size.of(
                model.checkpoint.tensors[name]
                for name, role in model.layout.roles.items()
                if not is_replaced(role, constants)
            )
            # constants are stored in the dtype of the model
            more = sum(substitutes.values.numel() for substitutes in constants.values())
            itemsize = model.partial.dtype.itemsize
            stored = Size(kept.parameters + more, kept.bytes + more * itemsize)
            way = {"name": f"{CONSTANTS}, {budget}", "strategy": CONSTANTS}
            for correction in corrections:
                variant = self.variant(count, stored, **way, correction=correction.method)
                if correction.wanted:
                    yield self._refitted(variant, constants, correction, seconds)
                    continue
                with PeakMemory() as peak:
                    (figures,) = self.evaluator.measure(
                        model,
                        [Substitution(constants=constants)],
                        progress=self.progress,
                        phase=f"{way['name']}, {count}",
                    )
                cost = {"seconds": seconds, "peak_memory": peak.anonymous}
                yield row_of(variant, figures, self.sets, **cost)

    def _refitted(
        self, variant: Variant, constants: ConstantsByLayer, correction: Correct, seconds: float
    ) -> Row:
        def refitted(probe: HeldoutProbe) -> Iterable[LayerPlan]:
            arguments = (self.calibration, self.progress, self.seed, correction)
            return refit(self.model, constants, *arguments, probe=probe).values()

        return self.carried_out(variant, refitted, seconds)[0]


def _counts(model: OpenModel, grid: Grid, protect: Any) -> list[int]:
    """Return the experts to keep, each count once, checked against the model and what a list
    protects."""
    layers = model.architecture.layers
    counts = [resolve_count(layers, count * layers[0].parts, None) for count in grid.experts]
    counts += [resolve_count(layers, None, ratio) for ratio in grid.ratios]
    given_protected(protect, layers, min(counts, default=model.architecture.experts))
    shared = shared_experts(model)
    if shared:
        raise CompressionError(
            f"{shared} shares its experts with another layer, so plans cannot be carried out in "
            "order as comparing them takes; compress with one strategy after another instead"
        )
    return list(dict.fromkeys(counts))


def compare(
    run: Session,
    grid: Grid,
    candidates: Sequence[Candidate],
    text: TextOptions,
    seed: int,
    tasks: TaskRun | None = None,
) -> Comparison:
    """Plan with every strategy at every count, carry plans out with each correction, and evaluate
    all alike; with number formats, each share of the experts in each format.

    The model is tried with whole experts and with sub-experts, and with each top-k; one pass
    collects statistics for all plans of these experts. Protected experts stay as they are in every
    plan, the random ones included. Text to evaluate on may be reserved of the calibration's."""
    base = run.model
    progress = run.progress
    prune = Prune(protect=grid.protect, sample_tokens=grid.sample_tokens)
    views = []
    top_ks = list[int | None](dict.fromkeys(grid.top_ks)) or [None]
    if not grid.schemes:  # refused before text is read
        views = [seen_as(base, int(parts)) for parts in dict.fromkeys(grid.splits or (1,))]
        for view, top_k in product(views, top_ks):
            _counts(with_top_k(view, top_k), grid, prune.protect)
        if grid.constants:
            refuse_model(base)
    answers: tuple[ItemScores, ...] = ()
    if tasks is not None:
        evaluation = plan_evaluation(base.source, tasks.tasks, tasks.options, tasks.cache)
        answers = tuple(evaluation.run(progress).values())
    sets: Sequence[EvaluationSet]
    if grid.evaluate:
        sets = evaluation_sets(
            grid.evaluate,
            load_tokenizer(base.source.folder),
            length=text.sequence_length,
            seed=seed,
            vocab=base.vocabulary,
            most=grid.evaluation_samples,
            strict=text.strict,
        )
        calibration = read_calibration(run, text, seed, HELDOUT)
    else:
        calibration = read_calibration(run, text, seed, HELDOUT, grid.evaluation_samples)
        sets = calibration.reserved
    if grid.schemes:
        ways = []
        methods = grid.corrections or (None,)
        for candidate, parts, method in product(candidates, grid.splits or ("auto",), methods):
            options = {"options": candidate.options, "protect": grid.protect}
            name = candidate.strategy.name
            ways.append(default_steps(strategy=name, split=parts, correct=method, **options))
        return compare_sizes(run, ways, calibration, sets, seed, grid)
    calibration = replace(calibration, sample_tokens=prune.sample_count)
    changed = any(method.wanted for candidate in candidates for method in candidate.corrections)
    # by which corrections of whole models are kept or undone
    heldout = [EvaluationSet("held-out", calibration.heldout_batches)] if changed else []
    evaluator = Evaluator(base, [*sets, *heldout])
    with PeakMemory() as peak:
        (figures,) = evaluator.measure(base, progress=progress, phase="base")
    bench = _Bench(base, calibration, evaluator, sets, progress, seed, tasks)
    cost = {"error": 0.0, "seconds": 0.0, "peak_memory": peak.anonymous}
    variant = bench.variant(base.architecture.experts)
    rows = [row_of(variant, figures, sets, **cost, answers=answers)]
    shared = 0.0
    protected: Protected = {}
    for view in views:
        if view.is_split:
            view = partitioned(view, calibration, progress, seed, changed=changed)
        planner = Planner(view, calibration, progress, seed)
        try:
            planner.rank_changes([candidate.strategy for candidate in candidates])
        except CompressionError as error:  # the model has no attribution
            if grid.strategies:
                raise
            logger.warning("%s; it is left out", error)
            candidates = [
                candidate for candidate in candidates if not candidate.strategy.needs & ATTRIBUTED
            ]
        for top_k in top_ks:
            model = with_top_k(view, top_k)
            counts = _counts(model, grid, prune.protect)
            fewest = min(counts, default=view.architecture.experts)
            protected = protected_experts(prune.protect, fewest, planner)
            pairs = list(product(counts, candidates))
            specs = [PruneSpec(candidate.strategy, count) for count, candidate in pairs]
            begin = time.perf_counter()
            plans = replace(planner, model=model).plans(specs, protected)
            shared += time.perf_counter() - begin - sum(planned.seconds for planned in plans)
            bench = replace(bench, model=model, sizes={})
            for planned, (_, candidate) in zip(plans, pairs, strict=True):
                rows += bench.rows(planned, candidate)
            if grid.constants and model is base:
                corrections = corrections_of(grid.corrections or ("none",))
                rows += bench.constants(counts, protected, corrections)
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


def with_differences(rows: Sequence[Row]) -> tuple[Row, ...]:
    """Return the rows with each task's difference to the first row, the base.

    Of the rows of a size, those that lost no more than the best one, as far as the items can tell,
    are its equals."""
    base, *smaller = [replace(row, tasks=paired(rows[0], row)) for row in rows]
    results = [base]
    for row in smaller:
        equal = []
        for task in row.tasks:
            peers = [peer for peer in smaller if peer.variant.kept == row.variant.kept]
            drops = [peer.tasks[task].drop for peer in peers]
            best = peers[drops.index(min(drops))]
            if paired(best, row)[task].lower <= 0:
                equal.append(task)
        results.append(replace(row, equal_to_best=tuple(equal)))
    return tuple(results)


def paired(before: Row, after: Row) -> dict[str, TaskGate]:
    """Return the drop between two rows for each task, and over all items if there are several
    tasks.

    Bounds and verdicts are those of a gate without options.
    """
    gate = GateOptions(tasks=tuple(task.task for task in before.answers))
    judged = judge(before.answers, after.answers, gate)
    shown = judged.rows if len(judged.tasks) > 1 else judged.tasks
    return {task.task: task for task in shown}
