"""The pictures of LoRA experts: how alike they answer, and which work on which task (CoMoE, figures 4 and 5)."""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from compressor.comoe.evaluating import TaskResult
from compressor.document.blocks import Figure
from compressor.drawing.bars import draw_bars
from compressor.drawing.heatmaps import draw_heat
from compressor.drawing.palette import FONT, ink_on
from compressor.drawing.picture import Drawing

if TYPE_CHECKING:
    from matplotlib.figure import FigureBase

NAMES = ("workload", "similarity")
BAR, CELL = 0.3, 0.42  # inches
MOST_NUMBERED = 12  # experts whose cosines are written into their cells
DIVERGING = "RdBu_r"  # white at 0


def pictures(tasks: Sequence[TaskResult]) -> tuple[Figure, ...]:
    """Both figures by their `NAMES`, a drawing for each task."""
    return workload_figure(tasks), similarity_figure(tasks)


def workload_figure(tasks: Sequence[TaskResult]) -> Figure:
    """Share of a task's activations that each expert has, as a mean over layers."""
    top = max(max(each.shares) for each in tasks)
    drawings = tuple(
        Drawing(
            _named(each),
            _shares_said(each),
            (max(2.2, 0.8 + BAR * len(each.shares)), 1.9),
            partial(_draw_workload, result=each, top=top),
        )
        for each in tasks
    )
    caption = (
        "Share of the activations of a task's tokens that each expert has, as a mean over the layers with experts; "
        "dashed: the same for all."
    )
    return Figure(NAMES[0], "Workload of the experts by task", caption, drawings)


def similarity_figure(tasks: Sequence[TaskResult]) -> Figure:
    """Mean cosine of the outputs of two experts for the same token."""
    drawings = tuple(
        Drawing(_named(each), _cosines_said(each), _heat_size(each), partial(_draw_similarity, result=each))
        for each in tasks
    )
    caption = (
        "Mean cosine of what two experts answer to the same token, over a task's tokens and the layers with experts: "
        "1 where both always answer the same, 0 where they have nothing in common."
    )
    return Figure(NAMES[1], "Similarity of the experts by task", caption, drawings)


def mean_cosine(result: TaskResult) -> float:
    """The mean of the cosines between different experts; 0 of a single one."""
    count = len(result.similarity)
    off = sum(sum(row) - row[place] for place, row in enumerate(result.similarity))
    return off / (count * (count - 1)) if count > 1 else 0.0


def _named(result: TaskResult) -> str:
    return result.task or "all items"


def _shares_said(result: TaskResult) -> str:
    return f"Experts from 1 on: {', '.join(f'{100 * share:.1f}%' for share in result.shares)}."


def _cosines_said(result: TaskResult) -> str:
    count = len(result.similarity)
    pairs = [
        f"{one + 1} and {other + 1} {result.similarity[one][other]:.2f}"
        for one in range(min(count, MOST_NUMBERED))
        for other in range(one)
    ]
    return f"Mean cosine of different experts {mean_cosine(result):.3f}: {', '.join(pairs)}."


def _heat_size(result: TaskResult) -> tuple[float, float]:
    side = max(1.5, min(5.0, CELL * len(result.similarity)))
    return side + 1.3, side + 0.8


def _draw_workload(canvas: "FigureBase", result: TaskResult, top: float) -> None:
    axes, shares = canvas.add_subplot(), result.shares
    draw_bars(axes, shares, ["after"] * len(shares), even=1 / len(shares))
    step = max(1, len(shares) // 8)
    axes.set_xticks(range(0, len(shares), step), labels=[str(number + 1) for number in range(0, len(shares), step)])
    axes.set_ylim(0, 1.05 * top)
    axes.set_title(_named(result), loc="left", fontsize=FONT)
    axes.set_xlabel("expert")
    axes.set_ylabel("share of activations")


def _draw_similarity(canvas: "FigureBase", result: TaskResult) -> None:
    from matplotlib import colormaps
    from matplotlib.colors import Normalize, to_hex

    axes, count = canvas.add_subplot(), len(result.similarity)
    image = draw_heat(axes, result.similarity, -1.0, 1.0, cmap=DIVERGING, aspect="equal")
    numbers = [str(number + 1) for number in range(count)]
    step = max(1, count // 12)
    axes.set_xticks(range(0, count, step), labels=numbers[::step])
    axes.set_yticks(range(0, count, step), labels=numbers[::step])
    if count <= MOST_NUMBERED:
        colours, scale = colormaps[DIVERGING], Normalize(-1, 1)
        for row, line in enumerate(result.similarity):
            for column, value in enumerate(line):
                shade = ink_on(to_hex(colours(scale(value))))
                axes.text(column, row, f"{value:.2f}", ha="center", va="center", color=shade, fontsize=FONT - 2)
    axes.set_title(_named(result), loc="left", fontsize=FONT)
    axes.set_xlabel("expert")
    axes.set_ylabel("expert")
    canvas.colorbar(image, ax=axes, shrink=0.8)
