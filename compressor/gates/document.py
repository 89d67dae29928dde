"""The gate's result in words and as blocks: what a task lost, the verdict, what would decide it, how it was tested."""

import math
from collections.abc import Mapping, Set
from statistics import NormalDist
from typing import Any, Literal

from compressor.document.blocks import Block, Facts, Heading, Items, Strong, Table, Text, Tone, Toned
from compressor.gates.statistics import POWER
from compressor.gates.verdict import GateResult, RoutedBy, TaskGate, Verdict
from compressor.words import counted

MOST_ITEMS = 10_000_000  # beyond which an estimate of the items needed helps nobody
DIGITS = 12  # shown of a digest
COLUMNS = (
    "task",
    "metric",
    "items",
    "base",
    "compressed",
    "drop",
    "at least",
    "at most",
    "detectable",
    "lost / gained",
    "verdict",
)
TEXTS: Set[str] = frozenset({"task", "metric", "verdict"})
SIGNS: Mapping[Verdict, tuple[Tone, str]] = {
    "pass": ("good", "✓"),
    "fail": ("bad", "✗"),
    "inconclusive": ("unsure", "?"),
}


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
    """The verdict as a sentence, with the tasks it is due to; and one more where the compressed model was routed."""
    return _verdict(result) + (f" {routing_line(result.routing)}" if result.routing is not None else "")


def routing_line(routing: RoutedBy) -> str:
    """What the compressed model was routed by and what that cost, as a sentence."""
    options = routing.options
    near = f"{options.get('neighbours')} neighbours" if options.get("radius") is None else "neighbours within reach"
    left = f"; left as they are, being too long: {counted(routing.left_plain, 'item')}" if routing.left_plain else ""
    return (
        f"The compressed model answered on pathways optimised by {routing.method} ({options.get('optimizer')}, {near} "
        f"of the reference set {routing.reference[:DIGITS]}), which cost {routing.cost:.3g} plain forwards of the same "
        f"items{left}."
    )


def streamed_line(result: GateResult) -> str:
    """Which models answered with one layer in memory at a time, as a sentence."""
    names = {"base": "the base", "compressed": "the compressed model"}
    told = " and ".join(names[name] for name in result.streamed)
    return f"With one layer in memory at a time: {told}."


def _verdict(result: GateResult) -> str:
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


OPTIONAL = ("metric", "detectable", "lost / gained", "at least", "items")  # columns, the least important first


def gate_blocks(result: GateResult) -> tuple[Block, ...]:
    """The whole document."""
    ratios = tuple(_perplexity(task) for task in result.tasks if task.perplexity_ratio is not None)
    return (
        Heading(f"Accuracy gate: {result.verdict}", level=1),
        verdict_block(result),
        task_table(result),
        Text(
            "Drop: base less compressed, of a perplexity its rise; at least and at most: its one-sided bounds, each "
            f"with confidence {100 * result.confidence:g}%. Detectable: the smallest true drop that so many items show "
            f"with probability {POWER:g}. Lost and gained: items answered worse and better than by the base."
        ),
        *([Items(ratios)] if ratios else []),
        *advice_blocks(result, level=2),
        Heading("How it was tested"),
        *tested_blocks(result),
    )


def gate_brief(result: GateResult) -> tuple[Block, ...]:
    """What a terminal shows: the tasks, the verdict and what would decide it."""
    stored = [Text("The base's results were stored by an earlier run.")] if result.reused_base else []
    streamed = [Text(streamed_line(result))] if result.streamed else []
    return task_table(result), verdict_block(result), *advice_blocks(result), *stored, *streamed


def verdict_block(result: GateResult) -> Text:
    """The verdict as a sentence."""
    return Text(Strong(_toned(result.verdict, verdict_line(result))))


def task_table(result: GateResult) -> Table:
    """A row for each task."""
    caption = (
        f"{result.compressed} compared with {result.base}, bounds one-sided, each with confidence "
        f"{100 * result.confidence:g}%"
    )
    rows = tuple(
        tuple(_toned(task.verdict, said) if name == "verdict" else said for name, said in cells(task).items())
        for task in result.tasks
    )
    return Table(caption, COLUMNS, rows, TEXTS, OPTIONAL)


def advice_blocks(result: GateResult, level: int = 3) -> tuple[Block, ...]:
    """For each inconclusive task, what would decide it, under a heading of this level; nothing without such a task."""
    told = advice(result)
    return (Heading("What would decide it", level), Items(tuple(told))) if told else ()


def tested_blocks(result: GateResult) -> tuple[Block, ...]:
    """The method, and what was compared and with what, exactly."""
    stored = " (results stored by an earlier run)" if result.reused_base else ""
    facts = {
        "Base": f"{result.base}{_commit(result.base_identity)}{stored}",
        "Compressed": f"{result.compressed}{_commit(result.compressed_identity)}",
        "Tasks": _pairs({task.task: f"version {task.version}" for task in result.tasks}),
        "Options": _pairs(result.options),
        "Streamed": " and ".join(result.streamed),
        "Routing": _pairs(result.routing.options) if result.routing is not None else "",
        "Versions": _pairs(result.versions),
        "Seconds": _pairs({name: f"{value:.1f}" for name, value in result.seconds.items()}),
    }
    return Text(method(result)), Facts(tuple((name, said) for name, said in facts.items() if said))


def _toned(verdict: Verdict, text: str) -> Toned:
    return Toned(text, *SIGNS[verdict])


def _perplexity(task: TaskGate) -> str:
    ratio, lower, upper = map(level, task.perplexity_ratio or ())
    return f"{task.task}: the perplexity is {ratio} times the base's, at least {lower}, at most {upper}."


def _commit(identity: Mapping[str, Any]) -> str:
    return f", commit {identity['commit']}" if "commit" in identity else ", files as in gate.json" if identity else ""


def _pairs(entries: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {_shown(value)}" for name, value in entries.items())


def _shown(value: Any) -> str:
    return "not set" if value is None else " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
