"""The gate: both models answer the same items, one after the other, and the paired tests judge
them.

Its power is known before any model is loaded, from the number of items, the margins and the
confidence alone."""

import math
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import field, replace
from pathlib import Path
from typing import Any

from compressor.answers.forms import SERVED, same_forms, samples, task_forms
from compressor.answers.lm_eval_run import TaskEvaluation, plan_evaluation
from compressor.answers.models import identity, model_of
from compressor.answers.prompts import PromptSet
from compressor.answers.scores import ItemScores
from compressor.answers.server import Server
from compressor.answers.tasks import (
    EvaluationOptions,
    EvaluationTask,
    generation_settings,
    resolve_tasks,
)
from compressor.checkpoint.source import ModelSource
from compressor.distributed import ranks
from compressor.errors import CompressionError
from compressor.files import default_folder
from compressor.formatting import joined
from compressor.frozen import frozen
from compressor.progress import Progress
from compressor.quality_gate.baseline import ANEW, COMPUTING, Baseline
from compressor.quality_gate.behaviour import UNIT, evaluate_behaviour, stock_pair
from compressor.quality_gate.language import unclear_language, wanted_by
from compressor.quality_gate.options import LENGTH, OTHER_LANGUAGE, GateOptions
from compressor.quality_gate.recorded import refuse_others
from compressor.quality_gate.statistics import (
    MOST_ITEMS,
    POOLED,
    at_most,
    conclude,
    judge,
    shown_by,
)
from compressor.quality_gate.teacher_forced import read_all
from compressor.quality_gate.verdict import Asked, GateResult, Side
from compressor.records import plain_json
from compressor.run_record import PACKAGES, versions

FLIPS = (0.0, 0.02, 0.05)  # shares of items that two models answer differently


@frozen
class GateRequest:
    """The options of a gate, all that they name and is known before any model is loaded, and where
    models compute."""

    options: GateOptions
    tasks: tuple[EvaluationTask, ...] = ()
    prompts: PromptSet | None = None
    baseline: Baseline | None = None  # in the base's place
    device: str = "auto"
    dtype: str = "auto"
    cache: Path = field(default_factory=default_folder)  # with results of earlier runs

    @classmethod
    def read(
        cls,
        options: GateOptions,
        device: str = "auto",
        dtype: str = "auto",
        cache: Path | None = None,
    ) -> "GateRequest":
        """Check the options; read baseline, prompts and tasks, the tasks on the first process
        before the others."""
        options.check()
        baseline = None if options.baseline is None else Baseline.read(options.baseline)
        if baseline is not None:
            options = baseline.complete(options)
        prompts = PromptSet.read(options, options.limit)
        request = cls(options, (), prompts, baseline, device, dtype, cache or default_folder())
        return replace(request, tasks=read_tasks(request))

    @property
    def date(self) -> str | None:
        """The date in the prompts of the baseline, which is that of this gate's, too."""
        forms = [] if self.baseline is None else self.baseline.asked.values()
        return next((form.date for form in forms if form.date), None)

    @property
    def evaluation(self) -> EvaluationOptions:
        """Options by which tasks are evaluated."""
        return EvaluationOptions.of(self.options, self.device, self.dtype)

    @property
    def power(self) -> "PowerAnalysis":
        """What the gate can show."""
        return analyse_power(self.tasks, self.options, self.prompts)


@frozen
class TaskPower:
    """Margins that the items of a task, or of all tasks together, can show: a power analysis."""

    task: str
    items: int
    max_drop: float  # the drop allowed
    # by FLIPS: the least margin that a model without loss passes; None without shares
    shown: tuple[float, ...] | None


@frozen
class PowerAnalysis:
    """Margins that a gate can show if all scores are of answers that are right or wrong, as with
    most tasks."""

    tasks: tuple[TaskPower, ...]
    pooled: TaskPower | None
    confidence: float
    flips: tuple[float, ...] = FLIPS
    refusal: str | None = None  # why not even an identical model passes, and what would do
    asked: Asked = field(default_factory=dict)  # by task: the form of its questions


def analyse_power(
    tasks: Sequence[EvaluationTask], options: GateOptions, prompts: PromptSet | None = None
) -> PowerAnalysis:
    """Return the number of items of each task and the margins that they can show; no model is
    needed."""
    alpha = 1 - options.confidence

    measures = []
    refusals = []
    scored = [task for task in tasks if not task.likelihood]
    for task in tasks:
        margin = options.max_drop if task.likelihood else options.task_drop
        measures.append((task.name, task.items(options.limit), margin, not task.likelihood))
    if prompts is not None:
        answers = prompts.answers
        for name, (option, rise) in options.answer_limits.items():
            judged = answers
            if name == OTHER_LANGUAGE:
                judged = prompts.options.seeds * sum(
                    wanted_by(prompt) is not None for prompt in prompts.prompts
                )
                if not judged:
                    raise unclear_language()
            measures.append((name, judged, rise, name != LENGTH))
            refusals.append(_refusal(options, judged, UNIT, option, rise))
    if scored:
        items = sum(task.items(options.limit) for task in scored)
        measures.append((POOLED, items, options.max_drop, True))
        refusals.append(_refusal(options, items, "items", "--max-drop", options.max_drop, scored))
    rows = []
    for name, items, margin, is_share in measures:
        shown = tuple(shown_by(items, flips, alpha) for flips in FLIPS) if is_share else None
        rows.append(TaskPower(name, items, margin, shown))
    pooled = rows.pop() if scored else None
    refusal = next(filter(None, refusals), None)
    return PowerAnalysis(tuple(rows), pooled, options.confidence, refusal=refusal)


def read_tasks(gate: GateRequest) -> tuple[EvaluationTask, ...]:
    """Read a gate's tasks; raises `CompressionError` for those that a baseline or another option
    does not go with."""
    baseline = gate.baseline
    path = gate.options.baseline
    if baseline is not None:
        for name, value in plain_json(gate.evaluation.facts()).items():
            if name not in COMPUTING and value != baseline.facts.get(name):
                raise CompressionError(
                    f"{path} was made with {name} {baseline.facts.get(name)}, and this gate is to "
                    f"use {value}; leave out --{name.replace('_', '-')}, {ANEW}"
                )
        known = [*baseline.settings.get("tasks", ()), *(scores.task for scores in baseline.tasks)]
        for task in gate.options.tasks:
            if task not in known:
                names = joined(list(dict.fromkeys(known)))
                raise CompressionError(
                    f"{path} has no answers to {task}, only to {names}; name these, {ANEW}"
                )
    tasks = ranks().first_before_others(lambda: resolve_tasks(gate.evaluation))
    for name in gate.options.expectations.keys() - {task.name for task in tasks}:
        raise CompressionError(
            f"--expect names {name!r}, which stands for several tasks; name one of them"
        )
    settings = [generation_settings(task, gate.evaluation) for task in tasks]
    if gate.options.repeats > 1 and not any(map(samples, settings)):
        raise CompressionError(
            "--repeats has no effect without sampling; add --gen-kwargs "
            "do_sample=true,temperature=1, or leave it out"
        )
    if baseline is not None:
        baseline.answers_to(tasks, path)
    return tasks


def asked_forms(
    base: ModelSource,
    compressed: ModelSource,
    gate: GateRequest,
    server: Server | None = None,
    base_server: Server | None = None,
) -> dict[str, dict[str, Any]]:
    """Return the form of each task's questions; raise `CompressionError` where it would not be that
    of both models."""
    tasks = gate.tasks
    baseline = gate.baseline
    if baseline is None:
        forms = task_forms(base, base_server, tasks, gate.evaluation)
        label = (base_server or base).label
    else:
        forms = {task.name: baseline.asked[task.name] for task in tasks}
        label = baseline.base
    others = task_forms(compressed, server, tasks, gate.evaluation)
    return same_forms(forms, others, (label, (server or compressed).label))


def _refusal(
    options: GateOptions,
    count: int,
    unit: str,
    option: str,
    margin: float,
    tasks: Sequence[EvaluationTask] = (),
) -> str | None:
    """Say why a number of items or answers without a flip does not show a margin; None if it
    does."""
    alpha = 1 - options.confidence
    if options.inconclusive == "pass" or at_most(0, 0, count, margin) < alpha:
        return None
    shown = shown_by(count, 0.0, alpha)
    digits = 10.0 ** (1 - math.floor(math.log10(shown)))
    remedies = [f"{option} {math.ceil(shown * digits) / digits:g}", "--inconclusive pass"]
    # without a flip it is the binomial test
    needed = math.log(alpha) / math.log1p(-margin) if margin > 0 else math.inf
    if needed < MOST_ITEMS:
        enough = math.floor(needed) + 1
        how = "name more tasks" if tasks else "more --prompts, or more --seeds"
        if options.limit is not None and sum(task.items(None) for task in tasks) >= enough:
            limit = bisect_left(
                range(enough), enough, key=lambda most: sum(task.items(most) for task in tasks)
            )
            how = f"--limit {limit}"
        remedies.insert(0, f"at least {enough:,} {unit} ({how})")
    return (
        f"this gate could not even pass an identical model: {count:,} {unit} cannot show with "
        f"confidence {100 * options.confidence:g}% a loss of no more than {margin:g}; it takes "
        f"{', or '.join(remedies)}"
    )


def passable(rows: PowerAnalysis) -> PowerAnalysis:
    """Refuse a gate that not even an identical model passes."""
    if rows.refusal is not None:
        raise CompressionError(rows.refusal)
    return rows


def run_gate(
    base: ModelSource,
    compressed: ModelSource,
    gate: GateRequest,
    progress: Progress,
    label: str | None = None,
    server: Server | None = None,
    base_server: Server | None = None,
    announce: Callable[[PowerAnalysis], None] | None = None,
) -> GateResult:
    """Evaluate tasks without stored results, pair the items and judge; `label` names the compressed
    model, and `announce` gets what the gate can show.

    With a `server` the compressed model answers there, and with a `base_server` the base. Where the
    gate has a baseline, nothing is asked of the base, and any model may be given as it.

    Raises `CompressionError` if a model cannot be evaluated or the two did not answer the same
    items."""
    options = gate.options
    tasks = gate.tasks
    asked = asked_forms(base, compressed, gate, server, base_server)
    if announce is not None:
        announce(replace(gate.power, asked=asked))
    rows = options.batch_size if isinstance(options.batch_size, int) else None
    base_writer = model_of(base, base_server, rows, gate.device, gate.dtype)
    writer = model_of(compressed, server, rows, gate.device, gate.dtype)
    stock = stock_pair(base_writer, writer, options)
    if options.reads and stock is not None:
        read_all(stock[0], options)  # what cannot be is refused before tasks are answered for hours
    compressed_identity = ranks().broadcast(lambda: identity(compressed, server, digests=True))
    content = dict(compressed_identity)
    content.pop("weights", None)  # whose times of change differ in a model made again
    # both are planned, and what cannot be answered refused, before either answers
    evaluations = dict[Side, TaskEvaluation]()
    scores = dict[Side, list[ItemScores]]()
    baseline = gate.baseline
    if baseline is None:
        evaluations["base"] = plan_evaluation(base, tasks, gate.evaluation, gate.cache, base_server)
    else:
        scores["base"] = baseline.answers_to(tasks, options.baseline)
    evaluations["compressed"] = plan_evaluation(
        compressed, tasks, gate.evaluation, gate.cache, server, content
    )
    seconds = dict[str, float]()
    speeds = dict[str, float]()
    streamed = list[Side]()
    for side, evaluation in evaluations.items():
        begin = time.perf_counter()
        scores[side] = list(evaluation.run(progress).values())
        seconds[side] = time.perf_counter() - begin
        answering = sum(task.seconds for task in scores[side])
        if answering:
            speeds[side] = sum(len(task.items) for task in scores[side]) / answering
        if any(task.streamed for task in scores[side]):
            streamed.append(side)
    for before, after in zip(scores["base"], scores["compressed"], strict=True):
        form = asked[before.task]
        # else no prompt is known
        if SERVED not in (form["chat_template"], form.get("compressed_chat_template")):
            refuse_others(
                before,
                after,
                f"{before.task}, {options.baseline or base_writer.label} and {writer.label}",
            )
    judgement = judge(scores["base"], scores["compressed"], options)
    behaviour = evaluate_behaviour(
        base_writer,
        writer,
        options,
        gate.prompts,
        options.confidence,
        gate.cache,
        progress,
        # some prompts may not do for these models
        lambda usable: passable(replace(gate, prompts=usable).power),
        reads_written=False,
    )
    facts = gate.evaluation.facts()
    written = behaviour.written
    if written is not None:
        facts |= {"prompts": written.prompts, "seeds": written.seeds, **written.options}
    if options.settings:
        facts["settings"] = {
            name: own.model_dump(exclude_none=True) for name, own in options.settings.items()
        }
    return conclude(
        judgement,
        scores["base"],
        options,
        behaviour.conditions,
        base=base_writer.label if baseline is None else baseline.base,
        compressed=label or writer.label,
        options=facts,
        base_identity=identity(base, base_server) if baseline is None else baseline.identity,
        compressed_identity=compressed_identity,
        versions=versions((*PACKAGES, "lm-eval")),
        asked=asked,
        benchmarks={task.name: task.benchmark for task in tasks if task.benchmark is not None},
        seconds=seconds,
        items_per_second=speeds,
        reused_base=bool(tasks) and ("base" not in evaluations or not evaluations["base"].missing),
        streamed=tuple(streamed),
        text=behaviour.text,
        answers=behaviour.answers,
    )
