"""The gate's result in words, as blocks and as a figure.

What each task lost, the verdict, what would decide it, and how it was tested.
"""

import math
from collections.abc import Callable, Mapping, Set
from functools import partial
from statistics import NormalDist
from typing import TYPE_CHECKING, Any, Literal

from compressor.document.blocks import Block, Facts, Figure, Heading, Items, Strong, Table, Text, Tone, Toned
from compressor.drawing.marks import Dots, draw_dots
from compressor.drawing.picture import Drawing
from compressor.gates.statistics import POWER
from compressor.gates.verdict import GateResult, TaskGate, Verdict
from compressor.words import counted, one_line

if TYPE_CHECKING:
    from matplotlib.figure import FigureBase

MOST_ITEMS = 10_000_000  # beyond which an estimate of the items needed helps nobody
DIGITS = 12  # shown of a digest
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


COLUMNS: Mapping[str, Callable[[TaskGate], str]] = {
    "task": lambda task: task.task,
    "metric": lambda task: task.metric,
    "items": lambda task: f"{task.items:,}",
    "base": lambda task: level(task.base),
    "compressed": lambda task: level(task.compressed),
    "drop": lambda task: change(task.drop, task.kind),
    "at least": lambda task: change(task.lower, task.kind),
    "at most": lambda task: change(task.upper, task.kind),
    "detectable": lambda task: change(task.detectable, task.kind),
    "lost / gained": lambda task: f"{task.lost:,} / {task.gained:,}",
    "verdict": lambda task: task.verdict,
}
TEXTS: Set[str] = frozenset({"task", "metric", "verdict"})
OPTIONAL = ("metric", "detectable", "lost / gained", "at least", "items")  # columns, the least important first


def cells(task: TaskGate) -> dict[str, str]:
    """A task's figures by column, names as they are."""
    return {name: show(task) for name, show in COLUMNS.items()}


def verdict_line(result: GateResult) -> str:
    """The verdict as a sentence, with the tasks it is due to; and one more where the compressed model was routed."""
    sure, most = f"with confidence {100 * result.confidence:g}%", margin(result)
    tasks = ", ".join(task.task for task in result.tasks if task.verdict == result.verdict)
    sentences: Mapping[Verdict, str] = {
        "pass": f"Pass: {sure}, no task lost more than {most}.",
        "fail": f"Fail: {sure}, more than {most} was lost on {tasks or 'a task'}.",
        "inconclusive": (
            f"Inconclusive: {sure}, it cannot be said whether more than {most} was lost on {tasks or 'any task'}."
        ),
    }
    if (routing := result.routing) is None:
        return sentences[result.verdict]
    options = routing.options
    near = f"{options.get('neighbours')} neighbours" if options.get("radius") is None else "neighbours within reach"
    left = f"; left as they are, being too long: {counted(routing.left_plain, 'item')}" if routing.left_plain else ""
    return (
        f"{sentences[result.verdict]} The compressed model answered on pathways optimised by {routing.method} "
        f"({options.get('optimizer')}, {near} of the reference set {routing.reference[:DIGITS]}), which cost "
        f"{routing.cost:.3g} plain forwards of the same items{left}."
    )


def margin(result: GateResult, *tasks: TaskGate) -> str:
    """The drop allowed, in the terms of what was measured: by these tasks, or all."""
    kinds = {task.kind for task in tasks or result.tasks}
    score, rise = f"{result.max_drop:g}", f"{100 * result.max_drop:g}% of perplexity"
    return rise if kinds == {"likelihood"} else f"{score} ({rise})" if "likelihood" in kinds else score


def items_needed(task: TaskGate, max_drop: float, confidence: float, tasks: int = 1) -> int | None:
    """Roughly how many items would decide one of so many tasks with probability `POWER`; None if they are too many.

    If the drop stays what it is, its bound has to come nearer than the margin, and it does so by the root of the number
    of items: n * (now / needed)^2. With perplexities this holds of logarithms.
    """
    scores = [task.drop, task.lower, task.upper, max_drop]
    if task.kind == "likelihood":
        scores = [math.log1p(rise) if rise > -1 else -math.inf for rise in scores]
    drop, lower, upper, allowed = scores
    normal, alpha = NormalDist(), 1 - confidence
    wider = (normal.inv_cdf(1 - alpha / tasks) + normal.inv_cdf(POWER)) / normal.inv_cdf(1 - alpha)
    now, needed = wider * (upper - drop if drop < allowed else drop - lower), abs(allowed - drop)
    if not (needed > 0 and 0 < now / needed < MOST_ITEMS):
        return None
    estimate = math.ceil(task.items * (now / needed) ** 2)
    return estimate if estimate <= MOST_ITEMS else None


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


def gate_blocks(result: GateResult) -> tuple[Block, ...]:
    """The whole document."""
    ratios = tuple(
        "{}: the perplexity is {} times the base's, at least {}, at most {}.".format(
            task.task, *map(level, task.perplexity_ratio)
        )
        for task in result.tasks
        if task.perplexity_ratio is not None
    )
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
    names = {"base": "the base", "compressed": "the compressed model"}
    models = " and ".join(names[name] for name in result.streamed)
    streamed = [Text(f"With one layer in memory at a time: {models}.")] if models else []
    return task_table(result), verdict_block(result), *advice_blocks(result), *stored, *streamed


def verdict_block(result: GateResult) -> Text:
    """The verdict as a sentence."""
    return Text(Strong(Toned(verdict_line(result), *SIGNS[result.verdict])))


def task_table(result: GateResult) -> Table:
    """A row for each task."""
    caption = (
        f"{result.compressed} compared with {result.base}, bounds one-sided, each with confidence "
        f"{100 * result.confidence:g}%"
    )
    rows = tuple(
        tuple(Toned(said, *SIGNS[task.verdict]) if name == "verdict" else said for name, said in cells(task).items())
        for task in result.tasks
    )
    return Table(caption, tuple(COLUMNS), rows, TEXTS, OPTIONAL)


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


def _commit(identity: Mapping[str, Any]) -> str:
    return f", commit {identity['commit']}" if "commit" in identity else ", files as in gate.json" if identity else ""


def _pairs(entries: Mapping[str, Any]) -> str:
    shown = {
        name: " ".join(map(str, value)) if isinstance(value, list | tuple) else "not set" if value is None else value
        for name, value in entries.items()
    }
    return ", ".join(f"{name} {value}" for name, value in shown.items())


WIDTH, ROW, AROUND = 3.7, 0.4, 0.7  # inches
MOST_LETTERS = 28  # of a task's name
MOST_DRAWN = 200  # tasks: a figure of more is longer than anybody looks at
FARTHEST = 10.0  # drops beyond it are drawn there
MARKERS: Mapping[Verdict, str] = {"pass": "o", "fail": "X", "inconclusive": "D"}
CAPTION = (
    "Each line runs from the lower to the upper confidence bound of a task's drop. Left of the dashed line is a pass "
    "(circle), right of it a fail (cross), across it inconclusive (hollow diamond)."
)


def gate_figure(result: GateResult) -> Figure | None:
    """A line for each task from the drop's lower to its upper bound; None without tasks, or with too many."""
    if not 0 < len(result.tasks) <= MOST_DRAWN:
        return None
    size = (WIDTH, ROW * len(result.tasks) + AROUND)
    drops = [
        f"{task.task}: drop {change(task.drop, task.kind)}, at least {change(task.lower, task.kind)}, at most "
        f"{change(task.upper, task.kind)}, {task.verdict}"
        for task in result.tasks
    ]
    alt = f"{verdict_line(result)} {'; '.join(drops)}."
    drawing = Drawing("Drops and the drop allowed", alt, size, partial(_draw, result=result))
    return Figure("gate", "Drops of the gate's tasks with their bounds", CAPTION, (drawing,))


def placed(value: float) -> float:
    """Where a drop is drawn; those out of all proportion, and no numbers, at the edge."""
    return FARTHEST if math.isnan(value) else min(max(value, -FARTHEST), FARTHEST)


def _draw(canvas: "FigureBase", result: GateResult) -> None:
    names = [f"{SIGNS[task.verdict][1]} {one_line(task.task, MOST_LETTERS)}\n{task.verdict}" for task in result.tasks]
    kinds = []
    for verdict, marker in MARKERS.items():
        own = [task if task.verdict == verdict else None for task in result.tasks]
        drops = [None if task is None else placed(task.drop) for task in own]
        bounds = [None if task is None else (placed(task.lower), placed(task.upper)) for task in own]
        kinds.append(Dots(verdict, drops, SIGNS[verdict][0], marker, verdict != "inconclusive", bounds))
    rises = "; of a perplexity its rise" if any(task.kind == "likelihood" for task in result.tasks) else ""
    label = f"drop, worse to the right{rises}\ndashed: the drop allowed, {margin(result)}"
    draw_dots(canvas.add_subplot(), names, kinds, label, placed(result.max_drop), scaled=False)
