"""Pictures of a model card: what became of each expert, and what the gate found. Colour is never the only sign."""

import math
import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING

from compressor.drawing.palette import COLOURS, DPI, axes_at
from compressor.gates.content import change
from compressor.gates.verdict import GateResult
from compressor.plans.layer import LayerPlan
from compressor.plans.plan import CompressionPlan
from compressor.publishing.card.layers import Fates, experts_before
from compressor.words import counted, label, one_line

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MARKS = "osD^vP<>"  # one fewer than colours, so that a row's first 72 groups differ in one or the other
KEPT_COLOUR, DROPPED_COLOUR = "#e6e6e6", "#ffffff"
WIDTH, HEIGHT = 9.6, 8.0  # inches of a grid at the most, as far as the least cell allows
LEAST_CELL, MOST_CELL = 0.05, 0.26
NUMBERED_CELL = 0.17  # from this size on a cell holds the number of the expert that its group is called by
MOST_NUMBERS = 1_500  # which take longer to draw than marks
MARGIN_LEFT, MARGIN_TOP, MARGIN_BELOW, MARGIN_RIGHT = 0.6, 0.45, 0.65, 0.2
FONT = 7
ROW, GATE_WIDTH = 0.32, 7.0  # inches of a task's row, and of the picture
VERDICTS = {"pass": ("#117733", "o"), "inconclusive": ("#999933", "D"), "fail": ("#882255", "X")}


@dataclass(frozen=True, slots=True)
class Cell:
    """One expert of the original in the grid: what it is drawn with, and the number in it if it was merged."""

    colour: str
    mark: str  # of matplotlib's; "" for an expert that was kept
    number: int | None = None


def cells(layer: LayerPlan) -> list[Cell]:
    """A layer's experts in their order. A merged group has one colour and mark, and its least member's number."""
    found = [Cell(DROPPED_COLOUR, "x")] * layer.experts
    changed = [group for group in layer.groups if not group.untouched]
    for group in layer.groups:
        cell = Cell(KEPT_COLOUR, "")
        if not group.untouched:
            place = changed.index(group)
            cell = Cell(COLOURS[place % len(COLOURS)], MARKS[place % len(MARKS)], min(group.members))
        for member in group.members:
            found[member] = cell
    return found


def grid_text(plan: CompressionPlan) -> str:
    """The grid for who does not see it."""
    return (
        f"Grid of {counted(len(plan.layers), 'MoE layer')} by {experts_before(plan)} experts: {Fates.of(plan)}. "
        "The table below says the same in numbers."
    )


def grid_figure(plan: CompressionPlan) -> "Figure":
    """The grid, not saved yet: a row for each layer, a column for each expert of the original."""
    from matplotlib.colors import to_rgb
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    rows, columns = len(plan.layers), max(layer.experts for layer in plan.layers)
    cell = max(LEAST_CELL, min(MOST_CELL, WIDTH / columns, HEIGHT / rows))
    width, height = max(cell * columns, 3.2), cell * rows
    across, up = width + MARGIN_LEFT + MARGIN_RIGHT, height + MARGIN_TOP + MARGIN_BELOW
    figure = Figure(figsize=(across, up), dpi=DPI)
    axes = axes_at(figure, MARGIN_LEFT, MARGIN_BELOW, cell * columns, height)
    grid = [cells(layer) for layer in plan.layers]
    blank = to_rgb("white")
    shades = [[*(to_rgb(each.colour) for each in row), *[blank] * (columns - len(row))] for row in grid]
    axes.imshow(shades, aspect="auto", interpolation="nearest")
    numbered = cell >= NUMBERED_CELL and rows * columns <= MOST_NUMBERS
    _draw_marks(axes, grid, cell, numbered)
    for row, layer in enumerate(plan.layers):
        for expert in plan.protected.get(layer.module, ()):
            axes.add_patch(Rectangle((expert - 0.5, row - 0.5), 1, 1, fill=False, linewidth=max(0.6, 5 * cell)))
    _label(axes, plan, cell)
    title = f"{label(plan.source.model)}: {Fates.of(plan)}"
    title = textwrap.fill(title, int(across / 0.085))
    figure.text(0.1 / across, 1 - 0.08 / up, title, va="top", fontsize=9, parse_math=False)
    figure.text(0.1 / across, 0.06 / up, textwrap.fill(_key(plan, numbered), int(across / 0.06)), fontsize=FONT)
    return figure


def _key(plan: CompressionPlan, numbered: bool) -> str:
    fates = Fates.of(plan)
    parts = ["grey: kept", *(["white with a cross: dropped"] if fates.dropped else [])]
    if fates.merged or fates.rescaled:
        sign = "number (its least member)" if numbered else "mark"
        most = max(sum(not group.untouched for group in layer.groups) for layer in plan.layers)  # in a row
        repeat = " (signs repeat)" if not numbered and most > len(MARKS) * len(COLOURS) else ""
        parts.append(f"same colour and {sign} within a row: merged into one expert{repeat}")
    return "; ".join([*parts, *(["black frame: protected"] if plan.protected else [])])


def _draw_marks(axes: "Axes", grid: list[list[Cell]], cell: float, numbered: bool) -> None:
    places: dict[tuple[str, str], list[tuple[int, int]]] = {}
    for row, line in enumerate(grid):
        for column, entry in enumerate(line):
            if numbered and entry.number is not None:
                colour = _ink(entry.colour)
                axes.text(column, row, str(entry.number), ha="center", va="center", fontsize=FONT - 1, color=colour)
            elif entry.mark:
                places.setdefault((entry.mark, _ink(entry.colour)), []).append((column, row))
    for (mark, colour), found in places.items():
        size = (0.5 * cell * 72) ** 2  # in square points
        xs, ys = zip(*found, strict=True)
        axes.scatter(xs, ys, s=size, marker=mark, color=colour, linewidths=max(0.4, 3 * cell))


def _ink(background: str) -> str:
    """Black or white, whichever is seen on a colour."""
    from matplotlib.colors import to_rgb

    red, green, blue = to_rgb(background)
    return "white" if 0.299 * red + 0.587 * green + 0.114 * blue < 0.5 else "#333333"


def _label(axes: "Axes", plan: CompressionPlan, cell: float) -> None:
    rows, columns = len(plan.layers), max(layer.experts for layer in plan.layers)
    step = math.ceil(0.13 / cell)
    axes.set_yticks(range(0, rows, step), labels=[str(layer.layer) for layer in plan.layers][::step], fontsize=FONT)
    step = math.ceil(0.07 * (len(str(columns)) + 1) / cell)
    axes.set_xticks(range(0, columns, step), labels=list(map(str, range(0, columns, step))), fontsize=FONT)
    axes.set_xlim(-0.5, columns - 0.5)
    axes.set_ylim(rows - 0.5, -0.5)
    axes.tick_params(length=2, pad=1.5)
    axes.set_ylabel("layer", fontsize=FONT, labelpad=2)
    axes.set_xlabel("expert of the original", fontsize=FONT, labelpad=2)
    axes.spines[:].set_color("#999999")


def gate_text(gate: GateResult) -> str:
    """The gate's picture for who does not see it."""
    drops = [
        f"{task.task} {change(task.drop, task.kind)} ({change(task.lower, task.kind)} to "
        f"{change(task.upper, task.kind)}), {task.verdict}"
        for task in gate.tasks
    ]
    return (
        f"Drop of each task with its one-sided bounds; {change(gate.max_drop, 'score')} is allowed: {'; '.join(drops)}"
    )


def gate_figure(gate: GateResult) -> "Figure":
    """Each task's drop with its bounds and verdict against the drop allowed, not saved yet."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(GATE_WIDTH, 1.2 + ROW * max(1, len(gate.tasks))), dpi=DPI, layout="constrained")
    axes = figure.add_subplot()
    low, high = _reach(gate)
    for row, task in enumerate(gate.tasks):
        colour, mark = VERDICTS[task.verdict]
        drawn = (0.0 if math.isnan(value) else value for value in (task.lower, task.drop, task.upper))
        lower, drop, upper = (max(low, min(high, value)) for value in drawn)
        axes.plot([lower, upper], [row, row], color=colour, linewidth=2, solid_capstyle="butt")
        axes.plot([lower, upper], [row, row], color=colour, linestyle="none", marker="|", markersize=9)
        axes.plot([drop], [row], color=colour, marker=mark, markersize=7, markeredgecolor="black", markeredgewidth=0.6)
    axes.axvline(gate.max_drop, color="black", linestyle="dashed", linewidth=1)
    axes.axvline(0, color="#999999", linewidth=0.8)
    axes.set_xlim(low, high)
    axes.set_ylim(max(1, len(gate.tasks)) - 0.5, -0.5)
    kinds = {"score": "", "likelihood": " (perplexity, relative)"}
    names = [f"{one_line(task.task, 40)}{kinds[task.kind]}: {task.verdict}" for task in gate.tasks]
    axes.set_yticks(range(len(names)), labels=names, fontsize=8, parse_math=False)
    axes.set_xlabel(
        f"drop with one-sided bounds (confidence {100 * gate.confidence:g}%); dashed: {gate.max_drop:g} allowed\n"
        "circle: pass, diamond: inconclusive, cross: fail",
        fontsize=8,
    )
    axes.tick_params(axis="x", labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def _reach(gate: GateResult) -> tuple[float, float]:
    """How far the axis goes to both sides: beyond 0, the drop allowed and all finite bounds."""
    values = [value for task in gate.tasks for value in (task.lower, task.drop, task.upper) if abs(value) < 1e9]
    low, high = min([0.0, *values]), max([gate.max_drop, 0.0, *values])
    beyond = 0.08 * (high - low) or 1.0
    return low - beyond, high + beyond
