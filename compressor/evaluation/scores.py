"""From lm-eval's samples to item scores: one metric, one number an item, greater is better.

They are kept on disk, and found again only by the same model, task and options.
"""

import hashlib
import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from compressor.checkpoint.reader import Checkpoint
from compressor.checkpoint.source import ModelSource
from compressor.errors import CompressionError
from compressor.evaluation.tasks import EvaluationTask
from compressor.files import file_digest
from compressor.records import read_as
from compressor.run_record import read_cached, write_cached

logger = logging.getLogger(__name__)

READ_WHOLE = (".json", ".jinja", ".model", ".txt")  # files beside the weights that decide what a model answers
REPORT = "gate.json"  # written beside the weights once they are evaluated; no part of the model

Rows = Sequence[Mapping[str, Any]]  # a task's samples under its first filter
Kind = Literal["score", "likelihood"]
PER_BYTE = {"bits_per_byte": "byte_perplexity"}  # the same items, told in nats as the other perplexities are


@dataclass(frozen=True, slots=True)
class Spent:
    """What answering took where models do more than run once, in decoder layers times tokens."""

    work: int
    plain_work: int  # what running each item once would have taken
    left_plain: int = 0  # items that were run once and no more


@dataclass(frozen=True, slots=True)
class ItemScores:
    """One model's results on one task, item by item."""

    task: str  # as it was asked for: a task or a group of tasks
    metric: str
    version: str  # of the task's definition
    kind: Kind
    ids: tuple[str, ...]  # [n] of the items, unique
    values: tuple[float, ...]  # [n] scores, greater is better; of a likelihood task the log-likelihoods in nats
    weights: tuple[float, ...] = ()  # [n] words or bytes of each item of a likelihood task; empty otherwise
    clusters: tuple[str, ...] = ()  # [n] names of the parts of a group of tasks; empty if it is one task
    spent: Spent | None = None  # None: each item was run once
    streamed: bool = False  # one layer in memory at a time


def item_scores(task: EvaluationTask, samples: Mapping[str, Rows]) -> ItemScores:
    """The results of one model on one task; of a group, with all parts under one metric and the parts as clusters."""
    # of a task that reads its answers in several ways, the results of the first
    rows = {part: [row for row in samples[part] if row["filter"] == samples[part][0]["filter"]] for part in task.parts}
    metric, kind = choose_metric(task, rows)
    first = next(iter(task.parts.values()))
    negated = kind == "score" and not first.higher_is_better().get(metric, True)
    scored = []
    for part, row in ((name, row) for name in task.parts for row in rows[name]):
        value, weight = map(float, row[metric] if isinstance(row[metric], tuple) else (row[metric], 1))
        number = row["doc_id"]
        if not math.isfinite(value):
            raise CompressionError(
                f"task {part!r} gives item {number} a {metric} of {value}; check the model, or name another task"
            )
        name = f"{part}/{number}" if task.grouped else str(number)
        scored.append((name, part, -value if negated else value, weight))
    ids, parts, values, weights = zip(*scored, strict=True)
    return ItemScores(
        task=task.name,
        metric=f"negated {metric}" if negated else PER_BYTE.get(metric, metric),
        version=task.version,
        kind=kind,
        ids=ids,
        values=values,
        weights=weights if kind == "likelihood" else (),
        clusters=parts if task.grouped else (),
    )


def choose_metric(task: EvaluationTask, rows: Mapping[str, Rows]) -> tuple[str, Kind]:
    """The first metric that gives every item of every part a number, and what sort of number that is."""
    first = next(iter(task.parts))
    names = dict.fromkeys((*task.parts[first].aggregation(), *rows[first][0]["metrics"]))
    for name in names:
        kind, *others = {_kind(task.parts[part], name, row) for part in task.parts for row in rows[part]}
        if kind is not None and not others:
            return name, kind
    what = "no metric that every item of each of its parts has" if task.grouped else "no metric of single items"
    told = ", ".join(names) or "none"
    raise CompressionError(
        f"task {task.name!r} has {what} (it has {told}), so models cannot be compared item by item; name another task"
    )


def _kind(task: Any, metric: str, row: Mapping[str, Any]) -> Kind | None:
    """What an item's value is: a score, a log-likelihood, or nothing that belongs to the item alone."""
    value, aggregation = row.get(metric), getattr(task.aggregation().get(metric), "__name__", "")
    if isinstance(value, tuple) and len(value) == 2:
        return "likelihood" if aggregation in ("weighted_perplexity", "bits_per_byte") else None
    if not hasattr(value, "__float__"):  # NumPy's numbers have it, text has not
        return None
    return "likelihood" if aggregation == "perplexity" else "score"


def identity(source: ModelSource) -> dict[str, Any]:
    """What a model's answers depend on, wherever it lies: a commit on the Hub, or the files of a folder."""
    if source.revision is not None:
        return {"repository": source.name, "commit": source.revision}
    beside = (path for path in source.folder.iterdir() if path.suffix in READ_WHOLE and path.name != REPORT)
    others = sorted(path for path in beside if path.is_file())
    return {
        "weights": [list(entry) for entry in Checkpoint(source.folder).stamp()],
        "files": {path.name: file_digest(path) for path in others},
    }


def judged_identity(source: ModelSource) -> dict[str, Any]:
    """The same with the SHA-256 of a folder's weight files, by which a copy is known for the model that was judged."""
    found = identity(source)
    if source.revision is None:
        found["digests"] = {str(entry[0]): file_digest(source.folder / entry[0]) for entry in found["weights"]}
    return found


@dataclass(frozen=True, slots=True)
class ResultStore:
    """A folder with a JSON file for each model, task and set of options."""

    folder: Path

    def path(self, key: Mapping[str, Any]) -> Path:
        """The file of a key."""
        digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
        return self.folder / f"{digest[:32]}.json"

    def load(self, key: Mapping[str, Any]) -> ItemScores | None:
        """What was stored; None if nothing was, nothing that can be read, or other numbers of values than of items."""
        content = read_cached(self.path(key))
        try:
            if content is None or content["key"] != json.loads(json.dumps(key)):
                return None
            scores = read_as(ItemScores, content["scores"])
        except (KeyError, CompressionError) as error:
            logger.debug("the stored result %s is ignored: %s", self.path(key), error)
            return None
        sizes = {len(each) for each in (scores.values, scores.weights or scores.ids, scores.clusters or scores.ids)}
        return scores if sizes == {len(scores.ids)} else None

    def save(self, key: Mapping[str, Any], scores: ItemScores) -> None:
        """Store a result; the file is there whole or not at all. Where that fails, the run goes on with a warning."""
        if error := write_cached(self.path(key), {"key": key, "scores": asdict(scores)}):
            logger.warning("the results on %s could not be stored in %s: %s", scores.task, self.folder, error)
