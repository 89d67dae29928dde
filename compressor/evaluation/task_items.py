"""The items of lm-eval's multiple-choice tasks, with the contexts and choices that lm-eval itself asks a model with."""

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from compressor.errors import CompressionError, faults_told
from compressor.evaluation.items import Item, read_items
from compressor.evaluation.quiet import quiet_lm_eval
from compressor.evaluation.tasks import EvaluationOptions, resolve_tasks

CHOICE = "multiple_choice"


def item_options(
    tasks: Sequence[str],
    data: str | Path | None,
    limit: int | None,
    include_path: str | Path | None,
    dtype: str = "auto",
) -> EvaluationOptions:
    """How items are asked for: by lm-eval `tasks` or by the JSONL file `data`, of which one has to be given."""
    if bool(tasks) == (data is not None):
        raise CompressionError("say what to ask: either --tasks with lm-eval tasks, or --data with a JSONL file")
    own = Path(include_path) if include_path is not None else None
    return EvaluationOptions(tuple(tasks) or ("data",), limit, own, dtype=dtype)


def items_of(options: EvaluationOptions, data: str | Path | None, training: bool = False) -> list[Item]:
    """The items of the tasks, or the first ones of the file."""
    return task_items(options, training) if data is None else read_items(Path(data))[: options.limit]


def task_items(options: EvaluationOptions, training: bool = False) -> list[Item]:
    """The items of all tasks, in their order; of their `training` splits without few-shot examples.

    Raises `CompressionError` for a task that is not multiple choice, asks each choice with a context of its own, or
    has no training split where that is wanted.
    """
    found = list[Item]()
    for task in resolve_tasks(options):
        for name, part in task.parts.items():
            if getattr(part, "OUTPUT_TYPE", None) != CHOICE:
                raise CompressionError(
                    f"task {name!r} is not multiple choice, so no answer of it is right; name another"
                )
            if training:
                _turn_to_training(name, part)
            with (
                quiet_lm_eval(),
                faults_told(
                    f"the items of task {name!r} could not be read",
                    "shorten them",
                    "see whether lm-eval alone can do it",
                ),
            ):
                found += _items(name, part, options)
    return found


def _turn_to_training(name: str, task: Any) -> None:
    """Have a task ask the items of its training split."""
    if not task.has_training_docs() or not hasattr(task.config, "training_split"):
        raise CompressionError(f"task {name!r} has no training split; name another, or give its items as --data")
    task.config.test_split = task.config.training_split
    task.set_config(key="num_fewshot", value=0)


def _items(name: str, task: Any, options: EvaluationOptions) -> list[Item]:
    """One part's items, few-shot examples drawn as an evaluation draws them."""
    if task.get_config("num_fewshot") is None:
        task.set_config(key="num_fewshot", value=0)
    task.set_fewshot_seed(seed=options.seed)
    task.build_all_requests(limit=options.limit, rank=0, world_size=1)
    docs = dict(task.doc_iterator(limit=options.limit, rank=0, world_size=1))
    return [
        _item(name, task, docs[number], list(requests))
        for number, requests in groupby(task.instances, key=lambda request: request.doc_id)
    ]


def _item(name: str, task: Any, doc: Any, requests: list[Any]) -> Item:
    choices = task.doc_to_choice(doc)
    gold = task.doc_to_text(doc) if getattr(task, "multiple_input", 0) else task.doc_to_target(doc)
    if isinstance(gold, str) and gold in choices:
        gold = choices.index(gold)
    contexts, continuations = zip(*(request.args for request in requests[: len(choices)]), strict=True)
    if len(set(contexts)) > 1:
        raise CompressionError(
            f"task {name!r} asks each choice with a context of its own, so its items have no prompt; name another task"
        )
    if isinstance(gold, bool) or not isinstance(gold, int) or not 0 <= gold < len(continuations):
        raise CompressionError(f"task {name!r} has an item without one right choice; name another task")
    return Item(contexts[0], continuations[gold], continuations, name)
