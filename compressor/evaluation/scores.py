"""From lm-eval's samples to item scores: one metric, one number an item, greater is better."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from compressor.errors import CompressionError
from compressor.evaluation.tasks import EvaluationTask

Rows = Sequence[Mapping[str, Any]]  # a task's samples under its first filter
Kind = Literal["score", "likelihood"]
PER_BYTE = {"bits_per_byte": "byte_perplexity"}  # the same items, told in nats as the other perplexities are


@dataclass(frozen=True, slots=True)
class ItemScores:
    """One model's results on one task, item by item."""

    task: str  # as it was asked for: a task or a group of tasks
    metric: str
    version: str  # of the task's definition
    kind: Literal["score", "likelihood"]
    ids: tuple[str, ...]  # [n] of the items, unique
    values: tuple[float, ...]  # [n] scores, greater is better; of a likelihood task the log-likelihoods in nats
    weights: tuple[float, ...] = ()  # [n] words or bytes of each item of a likelihood task; empty otherwise
    clusters: tuple[str, ...] = ()  # [n] names of the parts of a group of tasks; empty if it is one task


def item_scores(task: EvaluationTask, samples: Mapping[str, Rows]) -> ItemScores:
    """The results of one model on one task; of a group, with all parts under one metric and the parts as clusters."""
    rows = {part: first_filter(samples[part]) for part in task.parts}
    metric, kind = choose_metric(task, rows)
    found = [
        (f"{part}/{row['doc_id']}" if task.grouped else str(row["doc_id"]), part, *_value(task, part, metric, row))
        for part in task.parts
        for row in rows[part]
    ]
    ids, parts, values, weights = zip(*found, strict=True)
    return ItemScores(
        task=task.name,
        metric=f"negated {metric}" if kind == "score" and _negated(task, metric) else PER_BYTE.get(metric, metric),
        version=task.version,
        kind=kind,
        ids=ids,
        values=values,
        weights=weights if kind == "likelihood" else (),
        clusters=parts if task.grouped else (),
    )


def first_filter(rows: Rows) -> Rows:
    """Of a task that reads its answers in several ways, the results of the first."""
    return [row for row in rows if row["filter"] == rows[0]["filter"]]


def choose_metric(task: EvaluationTask, rows: Mapping[str, Rows]) -> tuple[str, Kind]:
    """The first metric that gives every item of every part a number, and what sort of number that is."""
    first = next(iter(task.parts))
    names = dict.fromkeys((*task.parts[first].aggregation(), *rows[first][0]["metrics"]))
    for name in names:
        kinds = {_kind(task.parts[part], name, row) for part in task.parts for row in rows[part]}
        if kinds == {"score"}:
            return name, "score"
        if kinds == {"likelihood"}:
            return name, "likelihood"
    what = "no metric that every item of each of its parts has" if task.grouped else "no metric of single items"
    told = ", ".join(names) or "none"
    raise CompressionError(
        f"task {task.name!r} has {what} (it has {told}), so models cannot be compared item by item; name another task"
    )


def _kind(task: Any, metric: str, row: Mapping[str, Any]) -> Kind | None:
    """What an item's value is: a score, a log-likelihood, or nothing that belongs to the item alone."""
    value = row.get(metric)
    if isinstance(value, tuple) and len(value) == 2:
        return "likelihood" if _aggregation(task, metric) in ("weighted_perplexity", "bits_per_byte") else None
    if not hasattr(value, "__float__"):  # NumPy's numbers have it, text has not
        return None
    return "likelihood" if _aggregation(task, metric) == "perplexity" else "score"


def _aggregation(task: Any, metric: str) -> str:
    return str(getattr(task.aggregation().get(metric), "__name__", ""))


def _negated(task: EvaluationTask, metric: str) -> bool:
    """Whether less is better, so that the sign is turned."""
    return not next(iter(task.parts.values())).higher_is_better().get(metric, True)


def _value(task: EvaluationTask, part: str, metric: str, row: Mapping[str, Any]) -> tuple[float, float]:
    """An item's value, greater is better, and its weight: words, bytes, or one."""
    made = task.parts[part]
    if isinstance(row[metric], tuple):
        value, weight = float(row[metric][0]), float(row[metric][1])
    else:
        value, weight = float(row[metric]), 1.0
        if _kind(made, metric, row) == "score" and _negated(task, metric):
            value = -value
    if not math.isfinite(value):
        raise CompressionError(
            f"task {part!r} gives item {row['doc_id']} a {metric} of {value}; check the model, or name another task"
        )
    return value, weight
