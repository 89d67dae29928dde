"""The gate's result in words, and as Markdown for a pull request or a job summary."""

import math
from collections.abc import Mapping
from statistics import NormalDist
from typing import Any, Literal

from compressor.gates.statistics import POWER
from compressor.gates.verdict import GateResult, TaskGate, Verdict
from compressor.words import named, table_line

MOST_ITEMS = 10_000_000  # beyond which an estimate of the items needed helps nobody
COLUMNS = (
    "task", "metric", "items", "base", "compressed", "drop", "at least", "at most", "detectable", "lost / gained",
    "verdict",
)  # fmt: skip
TEXTS = ("task", "metric", "verdict")




def level(value: float) -> str:
    """A score or a perplexity."""
    if not math.isfinite(value):
        return "-" if math.isnan(value) else "∞" if value > 0 else "-∞"
    return f"{value:.4f}" if abs(value) < 1e4 else f"{value:.4g}"


def change(value: float, kind: Literal["score", "likelihood"]) -> str:
    """A drop of a score as it is, a rise of a perplexity in percent; always with its sign."""
    scaled, decimals, unit = (100 * value, 2, "%") if kind == "likelihood" else (value, 4, "")
    if not abs(scaled) < 1e4:
        shown, unit = level(scaled), unit if math.isfinite(scaled) else ""
    else:
        shown = f"{round(scaled, decimals) + 0.0:.{decimals}f}"  # of two zeros the one without a minus
    return f"{shown}{unit}" if shown.startswith("-") else f"+{shown}{unit}"


def cells(task: TaskGate) -> dict[str, str]:
    """A task's figures by column, names as they are."""
    drops = {"drop": task.drop, "at least": task.lower, "at most": task.upper, "detectable": task.detectable}
    return {
        "task": task.task,
        "metric": task.metric,
        "items": f"{task.items:,}",
        "base": level(task.base),
        "compressed": level(task.compressed),
        **{name: change(value, task.kind) for name, value in drops.items()},
        "lost / gained": f"{task.lost:,} / {task.gained:,}",
        "verdict": task.verdict,
    }


def verdict_line(result: GateResult) -> str:
    """The verdict as a sentence, with the tasks it is due to."""
    sure = f"with confidence {100 * result.confidence:g}%"
    named_by = {verdict: ", ".join(_names(result, verdict)) for verdict in ("fail", "inconclusive")}
    if result.verdict == "pass":
        return f"Pass: {sure}, no task lost more than {margin(result)}."
    if result.verdict == "fail":
        return f"Fail: {sure}, more than {margin(result)} was lost on {named_by['fail'] or 'a task'}."
    return (
        f"Inconclusive: {sure}, it cannot be said whether more than {margin(result)} was lost on "
        f"{named_by['inconclusive'] or 'any task'}."
    )


def margin(result: GateResult, *tasks: TaskGate) -> str:
    """The drop allowed, in the terms of what was measured: by these tasks, or all."""
    kinds = {task.kind for task in tasks or result.tasks}
    score, rise = f"{result.max_drop:g}", f"{100 * result.max_drop:g}% of perplexity"
    return rise if kinds == {"likelihood"} else f"{score} ({rise})" if "likelihood" in kinds else score


def _names(result: GateResult, verdict: Verdict) -> list[str]:
    return [task.task for task in result.tasks if task.verdict == verdict]


def items_needed(task: TaskGate, max_drop: float, confidence: float, tasks: int = 1) -> int | None:
    """Roughly how many items would decide one of so many tasks with probability `POWER`; None if they are too many.

    If the drop stays what it is, its bound has to come nearer than the margin, and it does so by the root of the number
    of items: n * (now / needed)^2. With perplexities this holds of logarithms.
    """
    scores = task.drop, task.lower, task.upper, max_drop
    drop, lower, upper, allowed = map(_logarithm, scores) if task.kind == "likelihood" else scores
    normal, alpha = NormalDist(), 1 - confidence
    wider = (normal.inv_cdf(1 - alpha / tasks) + normal.inv_cdf(POWER)) / normal.inv_cdf(1 - alpha)
    now, needed = wider * (upper - drop if drop < allowed else drop - lower), abs(allowed - drop)
    if not (needed > 0 and 0 < now / needed < MOST_ITEMS):
        return None
    estimate = math.ceil(task.items * (now / needed) ** 2)
    return estimate if estimate <= MOST_ITEMS else None


def _logarithm(rise: float) -> float:
    return math.log1p(rise) if rise > -1 else -math.inf


def advice(result: GateResult) -> list[str]:
    """For each inconclusive task, what would decide it, as a sentence."""
    found = []
    for task in result.tasks:
        if task.verdict != "inconclusive":
            continue
        count = items_needed(task, result.max_drop, result.confidence, len(result.tasks))
        if count is None:
            found.append(f"{task.task}: its drop lies too near the margin for any practical number of items to decide.")
            continue
        found.append(
            f"{task.task}: about {float(f'{count:.2g}'):,.0f} items would decide it instead of {task.items:,}, "
            f"an estimate for a drop that stays what it is and a probability of {POWER:g}."
        )
    limit = result.options.get("limit")
    if found and limit is not None:
        return [*found, f"Where a task has more items, raise --limit, which is {limit}, or leave it out."]
    return [*found, "The tasks have no more items; --inconclusive settles what that counts as."] if found else []


def method(result: GateResult) -> str:
    """How it was tested, in two sentences."""
    several = ", corrected for the number of tasks (Holm)" if len(result.tasks) > 1 else ""
    return (
        "Both models answered the same items, and the differences were tested item by item: flips of right and wrong "
        "answers exactly, other scores and likelihoods by Student's t, by part where a task is a group (Miller, "
        '"Adding Error Bars to Evals", arXiv:2411.00640). A task passes if the upper confidence bound of its drop is '
        f"within the drop allowed, fails if the lower bound is beyond it, and is inconclusive otherwise{several}."
    )


def markdown(result: GateResult) -> str:
    """Verdict, table, what else is to know, method and versions."""
    lines = [
        f"# Accuracy gate: {result.verdict}",
        "",
        f"**{named(verdict_line(result))}**",
        "",
        f"{named(result.compressed)} compared with {named(result.base)}",
        "",
        table_line(COLUMNS),
        table_line([":---" if column in TEXTS else "---:" for column in COLUMNS]),
        *(table_line([named(cell) for cell in cells(task).values()]) for task in result.tasks),
        "",
        _legend(result),
        "",
        *_list([_perplexity(task) for task in result.tasks if task.perplexity_ratio is not None]),
    ]
    if told := advice(result):
        lines += ["## What would decide it", "", *_list(told)]
    return "\n".join([*lines, "## How it was tested", "", method(result), "", *_list(_versions(result))])


def _legend(result: GateResult) -> str:
    return (
        "Drop: base less compressed, of a perplexity its rise; at least and at most: its one-sided bounds, each with "
        f"confidence {100 * result.confidence:g}%. Detectable: the smallest true drop that so many items show with "
        f"probability {POWER:g}. Lost and gained: items answered worse and better than by the base."
    )


def _perplexity(task: TaskGate) -> str:
    ratio, lower, upper = map(level, task.perplexity_ratio or ())
    return f"{task.task}: the perplexity is {ratio} times the base's, at least {lower}, at most {upper}."


def _list(lines: list[str]) -> list[str]:
    return [*(f"- {named(line)}" for line in lines), ""] if lines else []


def _versions(result: GateResult) -> list[str]:
    """What was compared and with what, exactly."""
    stored = " (results stored by an earlier run)" if result.reused_base else ""
    return [
        f"Base: {result.base}{_commit(result.base_identity)}{stored}",
        f"Compressed: {result.compressed}{_commit(result.compressed_identity)}",
        f"Tasks: {_pairs({task.task: f'version {task.version}' for task in result.tasks})}",
        *([f"Options: {_pairs(result.options)}"] if result.options else []),
        *([f"Versions: {_pairs(result.versions)}"] if result.versions else []),
        *([f"Seconds: {_pairs({k: f'{v:.1f}' for k, v in result.seconds.items()})}"] if result.seconds else []),
    ]


def _commit(identity: Mapping[str, Any]) -> str:
    return f", commit {identity['commit']}" if "commit" in identity else ", files as in gate.json" if identity else ""


def _pairs(entries: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {_shown(value)}" for name, value in entries.items())


def _shown(value: Any) -> str:
    return "not set" if value is None else " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
