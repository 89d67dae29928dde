"""A base's answers to tasks in one small file, which takes the base's place in later gates."""

import gzip
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from compressor.answers.forms import TaskForm
from compressor.answers.options import AskedOptions
from compressor.answers.scores import ItemScores
from compressor.answers.task_suites import asked_by
from compressor.answers.tasks import EvaluationTask
from compressor.errors import CompressionError, wrap_faults
from compressor.files import check_parent, write_whole
from compressor.formatting import joined
from compressor.frozen import frozen
from compressor.options import validated
from compressor.quality_gate.options import GateOptions
from compressor.records import Finite, Json, plain_json, read_as, read_json, value_as

FORMAT = "moe-compressor-baseline/1"
SUFFIXES = (".json", ".json.gz")
COMPUTING = ("batch_size", "device", "dtype")  # facts in which the two models may differ
SETTINGS = {*AskedOptions.model_fields}
ANEW = "or make the baseline anew with gate baseline"


@frozen
class Baseline:
    """A base's answers by item, and everything that they depend on."""

    base: str
    identity: Json  # of the model's files
    # options of tasks, which are the defaults of a gate with this baseline
    settings: Json
    facts: Json  # that decide results
    versions: Mapping[str, str]  # of packages
    tasks: tuple[ItemScores, ...]
    asked: Mapping[str, TaskForm]  # by task: the form of its questions

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a baseline; raises `CompressionError` for any other file."""
        remedy = "name a file that moe-compress gate baseline has written"
        content = read_json(path, remedy, remedy)
        if not isinstance(content, dict) or content.pop("format", None) != FORMAT:
            raise CompressionError(f"{path} is no baseline in the format {FORMAT}; {remedy}")
        with wrap_faults(f"{path} cannot be read as a baseline", remedy, remedy):
            for task in content["tasks"]:
                columns = task["items"]
                rows = zip(*columns.values(), strict=True)
                task["items"] = [dict(zip(columns, row, strict=True)) for row in rows]
            baseline = read_as(cls, content, f"{path}: ", closed=True)
        asked_by(AskedOptions, baseline.settings, str(path))
        names = [scores.task for scores in baseline.tasks]
        if sorted(names) != sorted(baseline.asked):
            raise CompressionError(
                f"{path} should say once how each of its tasks was asked; {remedy}"
            )
        for scores in baseline.tasks:
            if len({item.id for item in scores.items}) != len(scores.items):
                raise CompressionError(f"{path} has an item of {scores.task} twice; {remedy}")
        return baseline

    def write(self, path: Path) -> None:
        """Write the file, compressed if it is named so; fields of items are columns."""
        for scores in self.tasks:
            for item in scores.items:
                value_as(item.score, Finite, f"the base's score on {scores.task}, item {item.id},")
        content = {"format": FORMAT, **plain_json(self)}
        for task in content["tasks"]:
            rows = [item.values() for item in task["items"]]
            task["items"] = dict(zip(task["items"][0], zip(*rows, strict=True), strict=True))
        data = json.dumps(content, separators=(",", ":")).encode()
        write_whole(path, gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)

    def complete(self, options: GateOptions) -> GateOptions:
        """Return the options of a gate, with the baseline's settings where they give none."""
        given = {name: getattr(options, name) for name in options.model_fields_set}
        return validated(GateOptions, {**self.settings, **given}, "the baseline")

    def answers_to(self, tasks: Sequence[EvaluationTask], path: Path | None) -> list[ItemScores]:
        """Return the base's scores on these tasks; refuse those that have changed."""
        by_name = {scores.task: scores for scores in self.tasks}
        for task in tasks:
            version = by_name[task.name].version if task.name in by_name else "none"
            if version != task.version:
                raise CompressionError(
                    f"{path} has answers to version {version} of {task.name}, which is version "
                    f"{task.version} here; take the task's files and lm-eval from then, {ANEW}"
                )
        return [by_name[task.name] for task in tasks]


def check_path(path: Path, overwrite: bool) -> None:
    """Refuse a file for a baseline that cannot be written, or is there already and not to be
    replaced."""
    if not path.name.endswith(SUFFIXES):
        raise CompressionError(
            f"{path} should end in {joined(SUFFIXES, 'or')}; name another file for the baseline"
        )
    check_parent(path, "file for the baseline")
    if path.exists() and not overwrite:
        raise CompressionError(
            f"{path} exists already; name another file for the baseline or pass --overwrite"
        )
