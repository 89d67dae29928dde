"""The gate's result as blocks: the verdict, a row for each task, what would decide it, and how it was tested."""

from collections.abc import Mapping
from typing import Any

from compressor.document.blocks import Block, Facts, Heading, Items, Strong, Table, Text, Toned
from compressor.gates.content import COLUMNS, SIGNS, TEXTS, advice, cells, level, method, streamed_line, verdict_line
from compressor.gates.statistics import POWER
from compressor.gates.verdict import GateResult, TaskGate, Verdict

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
