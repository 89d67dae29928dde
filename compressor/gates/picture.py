"""The gate's figure: each task's drop between its bounds, over the drop allowed."""

import math
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from compressor.document.blocks import Figure
from compressor.drawing.dots import Dots, draw_dots
from compressor.drawing.picture import Drawing
from compressor.gates.document import SIGNS, change, margin, verdict_line
from compressor.gates.verdict import GateResult, Verdict
from compressor.words import one_line

if TYPE_CHECKING:
    from matplotlib.figure import FigureBase

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
    drawing = Drawing("Drops and the drop allowed", gate_alt(result), size, partial(_draw, result=result))
    return Figure("gate", "Drops of the gate's tasks with their bounds", CAPTION, (drawing,))


def gate_alt(result: GateResult) -> str:
    """Each task's drop, bounds and verdict."""
    said = [
        f"{task.task}: drop {change(task.drop, task.kind)}, at least {change(task.lower, task.kind)}, at most "
        f"{change(task.upper, task.kind)}, {task.verdict}"
        for task in result.tasks
    ]
    return f"{verdict_line(result)} {'; '.join(said)}."


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
