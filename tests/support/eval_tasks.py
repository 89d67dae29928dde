"""Tasks of a user's own, and evaluations as the tests run them, without a network; test support."""

import json
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from compressor.answers.lm_eval_run import TaskEvaluation
from compressor.answers.scores import ItemScores
from compressor.answers.tasks import EvaluationOptions, EvaluationTask, resolve_tasks
from compressor.checkpoint.source import locate
from compressor.progress import Progress, Silent

CHOICE = """
task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
  cache_dir: {cache}
output_type: multiple_choice
test_split: test
doc_to_text: question
doc_to_choice: choices
doc_to_target: answer
target_delimiter: " "
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: {better}
metadata:
  version: 3
"""


class Steps:
    """Remembers what a run told."""

    def __init__(self) -> None:
        self.phases: list[tuple[str, int]] = []
        self.advanced = 0

    def start(self, phase: str, total: int) -> None:
        self.phases.append((phase, total))

    def advance(self, detail: str) -> None:
        self.advanced += 1


def no_stock_tasks(patch: pytest.MonkeyPatch) -> None:
    """From now on lm-eval knows the demo's tasks and a user's own; its thousands take ten seconds to read."""
    from lm_eval.tasks import TaskManager

    every = TaskManager.__init__
    few = lambda self, *given, **named: every(self, *given, **named | {"include_defaults": False})  # noqa: E731
    patch.setattr(TaskManager, "__init__", few)


def no_network(patch: pytest.MonkeyPatch) -> list[Any]:
    """From now on any attempt to reach another machine fails, and is noted in the list."""
    asked: list[Any] = []

    def refuse(*arguments: Any, **_: Any) -> Any:
        asked.append(arguments)
        raise OSError("the tests have no network")

    patch.setattr(socket.socket, "connect", refuse)
    patch.setattr(socket, "getaddrinfo", refuse)
    patch.delenv("HF_HUB_OFFLINE", raising=False)
    return asked


def own_tasks(parent: Path) -> Path:
    """A folder with a user's tasks `sums` and `sums_worse`, of two-way choices, their data, and a group `both`."""
    folder = parent / "own"
    folder.mkdir()
    rows = [{"question": f"{n} and {n}:", "choices": [f"{2 * n}", f"{2 * n + 1}"], "answer": 0} for n in range(6)]
    data = folder / "sums.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, better in (("sums", "true"), ("sums_worse", "false")):
        text = CHOICE.format(name=name, data=data, cache=parent / "cache", better=better)
        (folder / f"{name}.yaml").write_text(text)
    (folder / "both.yaml").write_text("group: both\ntask:\n  - sums\n  - moe_demo_sorting\n")
    return folder


def written_task(folder: Path, rows: Sequence[tuple[str, str]] = (("a", "b"),), more: str = "") -> None:
    """Put a task `written`, of questions whose answers are written out, into the folder."""
    content = (json.dumps({"question": question, "answer": answer}) + "\n" for question, answer in rows)
    (folder / "rows.jsonl").write_text("".join(content))
    (folder / "written.yaml").write_text(
        f"task: written\ndataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {folder / 'rows.jsonl'}\n"
        f"  cache_dir: {folder / 'cache'}\noutput_type: generate_until\ntest_split: test\ndoc_to_text: question\n"
        f"doc_to_target: answer\nmetric_list:\n  - metric: exact_match\n{more}"
    )


def evaluate(
    model: str,
    revision: str | None,
    options: EvaluationOptions,
    progress: Progress,
    tasks: Sequence[EvaluationTask] | None = None,
) -> dict[str, ItemScores]:
    """A model's results by task; `tasks` are the options' own, resolved, if several models answer them."""
    source = locate(model, revision, progress)
    return TaskEvaluation(source, tuple(tasks or resolve_tasks(options)), options).run(progress)


def ask(folder: Path, *tasks: str, **settings: Any) -> dict[str, ItemScores]:
    return evaluate(str(folder), None, EvaluationOptions(tasks=tasks, **settings), Silent())
