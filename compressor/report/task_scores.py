"""Tasks of a comparison: every model answers the same items, and each is paired with the base's."""

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from compressor.answers.lm_eval_run import TaskEvaluation, identity, plan_evaluation
from compressor.answers.options import TaskOptions
from compressor.answers.scores import ItemScores
from compressor.answers.tasks import EvaluationOptions, EvaluationTask, resolve_tasks
from compressor.checkpoint.source import ModelSource
from compressor.distributed import refuse_several
from compressor.errors import CompressionError
from compressor.files import default_folder
from compressor.model.opened import OpenModel
from compressor.progress import Progress
from compressor.quality_gate.options import GateOptions
from compressor.quality_gate.statistics import judge
from compressor.quality_gate.verdict import TaskGate
from compressor.recipe.plan import ExpertPlan
from compressor.report.comparison_report import Row
from compressor.report.grid import Grid
from compressor.steps.cutting import CutFiles
from compressor.steps.job import make_job
from compressor.steps.workdir import write_stage


@dataclass(frozen=True, slots=True)
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

    def plan(self, source: ModelSource, content: Mapping[str, Any] | None = None) -> TaskEvaluation:
        """Plan the evaluation of a model; raises `CompressionError` for tasks that it can't do."""
        return plan_evaluation(source, self.tasks, self.options, self.cache, content=content)

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
            write_stage(job, folder, ["prune"], progress.advance)
            model.partial.stream()  # lm-eval may load the smaller model as a whole
            source = ModelSource(str(folder), None, folder)
            content = identity(source, digests=True)
            del content["weights"]  # times of files
            return tuple(self.plan(source, content).run(progress).values())


def with_differences(rows: Sequence[Row]) -> tuple[Row, ...]:
    """Return the rows with each task's difference to the first row, the base.

    Of the rows of a size, those that lost no more than the best one, as far as the items can tell,
    are its equals."""
    base, *smaller = [replace(row, tasks=paired(rows[0], row)) for row in rows]
    results = [base]
    for row in smaller:
        peers = [peer for peer in smaller if peer.kept == row.kept]
        equal = [task for task in row.tasks if paired(_best(peers, task), row)[task].lower <= 0]
        results.append(replace(row, equal_to_best=tuple(equal)))
    return tuple(results)


def _best(rows: Sequence[Row], task: str) -> Row:
    return min(rows, key=lambda row: row.tasks[task].drop)


def paired(before: Row, after: Row) -> dict[str, TaskGate]:
    """Return the drop between two rows for each task, and over all items if there are several
    tasks.

    Bounds and verdicts are those of a gate without options.
    """
    gate = GateOptions(tasks=tuple(task.task for task in before.answers))
    tasks, pooled = judge(before.answers, after.answers, gate)
    shown = [*tasks]
    if pooled is not None and len(tasks) > 1:
        shown.append(pooled)
    return {task.task: task for task in shown}
