"""Evaluates a model with lm-eval, item by item, and takes results from an earlier run where nothing has changed."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

from compressor.checkpoint.reader import Checkpoint
from compressor.checkpoint.source import ModelSource
from compressor.errors import faults_told
from compressor.evaluation.quiet import quiet_lm_eval, require_lm_eval
from compressor.evaluation.scores import ItemScores, ResultStore, identity, item_scores
from compressor.evaluation.tasks import EvaluationOptions, EvaluationTask
from compressor.progress import Progress

REMEDIES = ("pass a smaller --batch-size, or --device cpu", "see whether lm-eval alone can do it")


@dataclass(frozen=True, slots=True)
class Answerer:
    """Another way to answer for a model than to run it once.

    `load` opens what lm-eval asks, while it is needed: lm-eval's `LM` that has `watch` and `spent`, as `WatchedModel`.
    """

    facts: Mapping[str, Any]  # plain JSON: what decides the answers beside the model
    load: Callable[[ModelSource, EvaluationOptions], AbstractContextManager[Any]]


def evaluate_stored(
    source: ModelSource,
    tasks: Sequence[EvaluationTask],
    options: EvaluationOptions,
    store: ResultStore,
    progress: Progress,
    answerer: Answerer | None = None,
) -> tuple[dict[str, ItemScores], bool]:
    """A model's results by task, asking it only for what is not stored; also whether all of it was."""
    model, routing = identity(source), None if answerer is None else answerer.facts
    keys = {task.name: store.key(model, task, options, routing) for task in tasks}
    known = {name: scores for name, key in keys.items() if (scores := store.load(key)) is not None}
    missing = [task for task in tasks if task.name not in known]
    # Each is stored at once, so that an interrupted run keeps what is done.
    known |= run_tasks(
        source, missing, options, progress, lambda scores: store.save(keys[scores.task], scores), answerer
    )
    return {task.name: known[task.name] for task in tasks}, not missing


def run_tasks(
    source: ModelSource,
    tasks: Sequence[EvaluationTask],
    options: EvaluationOptions,
    progress: Progress,
    keep: Callable[[ItemScores], None] = lambda scores: None,
    answerer: Answerer | None = None,
) -> dict[str, ItemScores]:
    """Load the model once and answer task after task, handing each result to `keep`; for no tasks nothing is loaded."""
    if not tasks:
        return {}
    require_lm_eval()
    Checkpoint(source.folder)  # whose errors name the file that is wrong
    found: dict[str, ItemScores] = {}
    with quiet_lm_eval():
        from compressor.evaluation.model import AnswerWatch, loaded_model

        progress.start(f"Loading {source.label}", 1)
        loading = faults_told(f"{source.label} could not be loaded by lm-eval", *REMEDIES)
        opened = answerer.load(source, options) if answerer else loaded_model(source.folder, options)
        with loading, opened as model:
            progress.advance("")
            for task in tasks:
                with faults_told(f"{source.label} could not be evaluated on task {task.name!r}", *REMEDIES):
                    model.watch(AnswerWatch(source.label, task.name, progress))
                    found[task.name] = replace(item_scores(task, _samples(model, task, options)), spent=model.spent)
                keep(found[task.name])
    return found


def _samples(model: Any, task: EvaluationTask, options: EvaluationOptions) -> dict[str, list[dict[str, Any]]]:
    """What lm-eval notes of every item, by part of the task."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    results = lm_eval.simple_evaluate(
        model=model,
        tasks=[task.loaded],
        task_manager=TaskManager(include_defaults=False),  # the tasks are loaded already
        num_fewshot=options.num_fewshot,
        limit=options.limit,
        bootstrap_iters=0,
        log_samples=True,
        random_seed=options.seed,
        numpy_random_seed=options.seed % 2**32,
        torch_random_seed=options.seed,
        fewshot_random_seed=options.seed,
    )
    return dict(results["samples"])
