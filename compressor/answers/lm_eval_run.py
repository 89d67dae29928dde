"""Evaluates a model with lm-eval, item by item: one metric, one number an item, greater is better.

Results are stored, and taken from an earlier run of the same model, task and options. A model that
does not fit into memory, or is shared by several ranks, answers layer by layer."""

import logging
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, field, replace
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any

from compressor.answers.forms import SERVED, TaskForm, task_forms
from compressor.answers.models import identity
from compressor.answers.scores import HASH_DIGITS, AnsweredItem, ItemScores, Kind
from compressor.answers.server import Server, served_facts
from compressor.answers.stock import PACKAGES, fits_whole, weight_bytes
from compressor.answers.tasks import (
    EvaluationOptions,
    EvaluationTask,
    aggregates_perplexity,
    quiet_lm_eval,
)
from compressor.checkpoint.source import ModelSource
from compressor.distributed import ranks
from compressor.errors import CompressionError, wrap_faults
from compressor.formatting import human_bytes
from compressor.frozen import frozen
from compressor.progress import Progress
from compressor.records import Json, read_as
from compressor.run_record import read_cached, request_key, versions, write_cached

logger = logging.getLogger(__name__)

PACKAGE = "moe-compressor"  # whose own code asks a server
REMEDIES = (
    "pass --stream, a smaller --batch-size, or --device cpu",
    "see whether lm-eval alone can do it",
)
Rows = Sequence[Json]  # a task's samples under its first filter
# the same items, told in nats as the other perplexities are
PER_BYTE = {"bits_per_byte": "byte_perplexity"}


def item_scores(
    task: EvaluationTask, samples: Mapping[str, Rows], cut_is_wrong: bool = False
) -> ItemScores:
    """Return the results of one model on a task, or on all parts of a group under one metric.

    With `cut_is_wrong` an answer that reached the token limit scores 0.
    """
    named, _, filter_named = (task.settings.metric or "").partition(",")
    rows = {}
    for part in task.parts:
        # of a task that reads its answers in several ways, the results of the first
        filter_name = filter_named or samples[part][0]["filter"]
        rows[part] = [row for row in samples[part] if row["filter"] == filter_name]
    metric, kind = choose_metric(task, rows, named)
    first = next(iter(task.parts.values()))
    negated = kind == "score" and not first.higher_is_better().get(metric, True)
    if negated and cut_is_wrong:
        raise CompressionError(
            f"task {task.name!r} scores by {metric}, of which less is better, so no score is that "
            "of a wrong answer; leave out --cut-counts-as-wrong"
        )
    chance = 0.0 if task.kinds == {"generate_until"} else None
    if task.kinds == {"multiple_choice"}:
        chance = fmean(1 / len(row["filtered_resps"]) for row in chain.from_iterable(rows.values()))
    items = []
    for part in task.parts:
        for row in rows[part]:
            number = row["doc_id"]
            result = row[metric]
            value, weight = result if isinstance(result, tuple) else (result, 1)
            if not math.isfinite(value):
                raise CompressionError(
                    f"task {part!r} gives item {number} a {metric} of {value}; check the model, "
                    "or name another task"
                )
            name = f"{part}/{number}" if task.grouped else str(number)
            score = -float(value) if negated else float(value)
            cut = row.get("cut")
            if cut and cut_is_wrong:
                score = 0.0
            content = str(row.get("doc_hash", ""))[:HASH_DIGITS]
            prompt = str(row.get("prompt_hash", ""))[:HASH_DIGITS]
            items.append(AnsweredItem(name, score, float(weight), content, prompt, cut))
    return ItemScores(
        task=task.name,
        metric=f"negated {metric}" if negated else PER_BYTE.get(metric, metric),
        version=task.version,
        kind=kind,
        items=tuple(items),
        chance=chance,
    )


def choose_metric(task: EvaluationTask, rows: Mapping[str, Rows], named: str) -> tuple[str, Kind]:
    """Return the `named` metric, or the first that gives every item of every part a number, and its
    kind."""
    first = next(iter(task.parts))
    names = dict.fromkeys(
        [named] if named else (*task.parts[first].aggregation(), *rows[first][0]["metrics"])
    )
    for name in names:
        kinds = set[Kind | None]()  # None: of a value that is not the item's alone
        for part, task_object in task.parts.items():
            is_perplexity = aggregates_perplexity(task_object, name)
            for value in (row.get(name) for row in rows[part]):
                is_weighted = isinstance(value, tuple) and len(value) == 2
                # NumPy's numbers have it, text has not
                is_number = hasattr(value, "__float__")
                if is_perplexity and (is_weighted or is_number):
                    kinds.add("likelihood")
                else:
                    kinds.add("score" if is_number else None)
        (kind, *others) = kinds
        if kind is not None and not others:
            return name, kind
    raise CompressionError(
        f"task {task.name!r} has no metric of single items (it has {', '.join(names) or 'none'}), "
        "so models cannot be compared item by item; name another task"
    )


@frozen
class TaskEvaluation:
    """A model with the tasks that it answers, and results of earlier runs."""

    source: ModelSource
    tasks: tuple[EvaluationTask, ...]
    options: EvaluationOptions
    server: Server | None = None  # that answers for the model
    journal: Path | None = None  # its answers, until all tasks have their results
    streamed: bool = False  # one layer in memory at a time
    # by task: where its result is kept, with key
    files: Mapping[str, Mapping[Path, Any]] = field(default_factory=dict)
    known: Mapping[str, ItemScores] = field(default_factory=dict)
    forms: Mapping[str, TaskForm] = field(default_factory=dict)  # by task

    @property
    def missing(self) -> tuple[EvaluationTask, ...]:
        return tuple(task for task in self.tasks if task.name not in self.known)

    def run(self, progress: Progress) -> dict[str, ItemScores]:
        """Return all results by task; load the model once for missing ones, and store each at once.

        A streamed model is read once for all tasks, which are answered together.
        """
        results = dict(self.known)
        if not self.missing:
            return results
        label = (self.server or self.source).label
        options = self.options
        forms = self.forms or task_forms(self.source, self.server, self.tasks, options)
        with quiet_lm_eval():
            from compressor.answers.lm_eval_adapter import lm_eval_model

            opening = lm_eval_model(self.source, options, self.streamed, self.server, self.journal)
            progress.start(f"{'Opening' if self.streamed else 'Loading'} {label}", 1)
            with (
                wrap_faults(f"{label} could not be loaded by lm-eval", *REMEDIES),
                opening as model,
            ):
                progress.advance("")
                for together in (
                    [self.missing] if self.streamed else [(task,) for task in self.missing]
                ):
                    names = ", ".join(task.name for task in together)
                    with wrap_faults(
                        f"{label} could not be evaluated on task {names!r}", *REMEDIES
                    ):
                        model.watch(names, progress)
                        begin = time.perf_counter()
                        # streamed tasks, all of them scored, have one
                        form = forms[together[0].name]
                        repeats = [
                            _evaluated(model, together, options, form, at)
                            for at in range(form.repeats)
                        ]
                        seconds = (time.perf_counter() - begin) / sum(
                            task.items(options.limit) for task in together
                        )
                        for task in together:
                            wrong = options.cut_counts_as_wrong and task.generates
                            scored = [item_scores(task, samples, wrong) for samples in repeats]
                            results[task.name] = self._mean(scored, seconds)
        return {task.name: results[task.name] for task in self.tasks}

    def _mean(self, repeats: Sequence[ItemScores], seconds: float) -> ItemScores:
        """Return each item's mean over repeated results on a task, and store it.

        Where that fails, the run goes on with a warning.
        """
        items = []
        for answers in zip(*(scores.items for scores in repeats), strict=True):
            mean = math.fsum(answer.score for answer in answers) / len(answers)
            cut = None if answers[0].cut is None else fmean(answer.cut for answer in answers)
            items.append(replace(answers[0], score=mean, cut=cut))
        took = seconds * len(items)
        scores = replace(repeats[0], items=tuple(items), streamed=self.streamed, seconds=took)
        files = self.files.get(scores.task, {}) if ranks().is_first else {}
        for path, key in files.items():
            error = write_cached(path, {"key": key, "scores": asdict(scores)})
            if error:
                warning = "the results on %s could not be stored in %s: %s"
                logger.warning(warning, scores.task, path.parent, error)
        return scores


def _evaluated(
    model: Any,
    tasks: Sequence[EvaluationTask],
    options: EvaluationOptions,
    form: TaskForm,
    repeat: int,
) -> Mapping[str, Rows]:
    """Return a model's samples on tasks of one form; each `repeat` has a sampling seed of its
    own."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    asked = {}
    for task in tasks:
        for part, count in zip(task.parts, task.counts, strict=True):
            asked[part] = range(count)[: task.settings.limit or options.limit]
    seeds = options.random_seeds
    seeds["torch_random_seed"] += repeat
    model.sampling_seed = seeds["torch_random_seed"]
    evaluated: Any = lm_eval.simple_evaluate(
        model=model,
        tasks=[task.loaded for task in tasks],
        task_manager=TaskManager(include_defaults=False),  # the tasks are loaded already
        samples=asked,
        confirm_run_unsafe_code=options.confirm_run_unsafe_code,
        bootstrap_iters=0,
        log_samples=True,
        apply_chat_template=form.chat_template is not None,
        fewshot_as_multiturn=form.fewshot_as_multiturn,
        system_instruction=options.system_instruction,
        gen_kwargs=options.generation_settings or None,
        **seeds,
    )
    samples: dict[str, list[dict[str, Any]]] = evaluated["samples"]
    for task in tasks:
        for row in chain.from_iterable(samples[part] for part in task.parts if task.generates):
            row["cut"] = float(model.was_cut(row["arguments"][0][0]))
    return samples


def plan_evaluation(
    source: ModelSource,
    tasks: Sequence[EvaluationTask],
    options: EvaluationOptions,
    cache: Path,
    server: Server | None = None,
    content: Json | None = None,
) -> TaskEvaluation:
    """Plan an evaluation, with results of earlier runs from the folder `cache`, also those of the
    same `content`.

    Raises `CompressionError` for a missing task that cannot be answered the way that it has to be.
    """
    # all that a result depends on, and:
    facts = {"options": options.facts(), "packages": versions(PACKAGES)}
    if server is not None:
        facts["package"] = versions((PACKAGE,))
    forms = task_forms(source, server, tasks, options)
    models = [identity(source, server), *([] if content is None else [content])]
    files = dict[str, dict[Path, Any]]()
    for task in tasks:
        files[task.name] = {}
        for model in models:
            key = {**facts, "model": model, "task": task.name, "version": task.version}
            key |= task.settings.model_dump(exclude_none=True)
            key["form"] = asdict(forms[task.name])
            files[task.name][cache / f"{request_key(key)[:32]}.json"] = key

    def stored() -> dict[str, ItemScores]:
        """Return the first result of each task that can be read."""
        known = dict[str, ItemScores]()
        for name, paths in files.items():
            for content in filter(None, map(read_cached, paths)):
                with suppress(KeyError, CompressionError):  # of another version of this package
                    known.setdefault(name, read_as(ItemScores, content["scores"]))
        return known

    known = ranks().broadcast(stored)
    journal = None
    if server is not None:
        journal = cache / f"served-{request_key(served_facts(server, source.folder))[:32]}.jsonl"
    missing = [task for task in tasks if task.name not in known]
    streamed = bool(missing) and server is None and streams(source, options)
    for task in missing:
        if server is not None and forms[task.name].chat_template == SERVED:
            server.check_chat(task.name)
        # all layers would be read anew for every token
        if streamed and "generate_until" in task.kinds:
            size = human_bytes(weight_bytes(source, options.dtype))
            raise CompressionError(
                f"task {task.name!r} writes its answers, which needs all {size} of {source.label} "
                "in memory; name tasks of multiple choice or likelihood, or pass --no-stream"
            )
    return TaskEvaluation(
        source, tuple(tasks), options, server, journal, streamed, files, known, forms
    )


def streams(source: ModelSource, options: EvaluationOptions) -> bool:
    """Return True if the model is to be streamed: as the options say, by several ranks, or where it
    does not fit.

    Raises `CompressionError` where several ranks are asked not to.
    """
    if ranks().is_alone:
        if options.stream is not None:
            return options.stream
        return not fits_whole(source, options.dtype, options.device)
    if options.stream is False:
        raise CompressionError(
            "several ranks answer layer by layer; leave out --no-stream, or start it without "
            "torchrun"
        )
    return True
