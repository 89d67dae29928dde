"""An evaluation of LoRA experts as blocks and pictures (CoMoE, figures 4 and 5), and as a folder of
reports."""

from collections.abc import Sequence
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from compressor.comoe.evaluating import ComoeEvaluation, Matrix, Representations, TaskResult
from compressor.comoe.training import Trained
from compressor.document import html
from compressor.document.blocks import (
    Block,
    Facts,
    Figure,
    Heading,
    Strong,
    Table,
    Text,
    Words,
    plain_words,
)
from compressor.document.drawing import MARKERS, colour, draw_bars, draw_heat, ink_on
from compressor.document.markdown import markdown
from compressor.document.picture import FONT, Drawing, png
from compressor.files import write_files
from compressor.formatting import counted, human_bytes, human_count, share
from compressor.records import plain_json, report_json

if TYPE_CHECKING:
    from matplotlib.figure import FigureBase

NAMES = (
    "evaluation.json",
    "evaluation.md",
    "evaluation.html",
    "workload.png",
    "similarity.png",
    "scatter.png",
)
# inches
BAR = 0.3
CELL = 0.42
MOST_NUMBERED = 12  # experts whose cosines are written into their cells, or that a key names
DIVERGING = "RdBu_r"  # white at 0


def training_blocks(trained: Trained) -> tuple[Block, ...]:
    """The blocks that a terminal shows of a training: its size, and the last figures of the log."""
    last = trained.log[-1]
    parts = ("cross_entropy", "contrastive", "information_gap")
    figures = tuple((name.replace("_", " "), f"{last[name]:.4f}") for name in parts if name in last)
    size = (
        f"{human_count(trained.parameters)} parameters of "
        f"{counted(trained.config.experts, 'LoRA expert')} a layer ({100 * trained.share:.2f}% of "
        f"the model's) were trained on {counted(trained.items, 'item')} for "
        f"{counted(trained.steps, 'step')}."
    )
    cost = f"{trained.cost.seconds:.1f} s, {human_bytes(trained.cost.peak_memory)} beside the model"
    return Text(size), Facts((*figures, ("time and memory", cost)))


def evaluation_blocks(evaluation: ComoeEvaluation) -> tuple[Table, Table, Text]:
    """The blocks that a terminal shows: the scores, the workload of the experts in numbers, and a
    sentence on the experts, the unit of losses, and how long answers take, if that was measured."""
    columns = ["task", "items", "right", "loss"]
    rows = list[list[Words]]()
    for result in _with_total(evaluation.tasks):
        right = share(result.right, result.items)
        rows.append([result.task or "-", f"{result.items:,}", right, f"{result.loss:.4f}"])
    if evaluation.base:
        columns += ["right before", "loss before"]
        for row, result in zip(rows, _with_total(evaluation.base), strict=True):
            row += [share(result.right, result.items), f"{result.loss:.4f}"]
    if len(evaluation.tasks) > 1:
        rows[-1] = [*map(Strong, rows[-1])]
    title = f"{evaluation.model} with {evaluation.adapters}"
    scores = Table(title, tuple(columns), tuple(map(tuple, rows)))
    shares = []
    for result in evaluation.tasks:
        shares.append((result.task or "-", *(f"{100 * share:.1f}%" for share in result.shares)))
    experts = ("task", *(str(number + 1) for number in range(evaluation.experts)))
    workload = Table("Share of activations by expert, mean over layers", experts, shares)
    summary = (
        f"{counted(len(evaluation.layers), 'linear layer')} with "
        f"{counted(evaluation.experts, 'LoRA expert')} each, of which {evaluation.top_k} are "
        "activated. Loss is in nats per token of the right answers."
    )
    cost = evaluation.answering
    if cost is not None:
        summary += (
            f" A batch of answers takes {1000 * cost.seconds:,.0f} ms, and "
            f"{human_bytes(cost.peak_memory)} beside the model."
        )
    return scores, workload, Text(summary)


def _with_total(tasks: Sequence[TaskResult]) -> list[TaskResult]:
    """The tasks, and all in one where there are several; its loss is the mean of theirs."""
    if len(tasks) < 2:
        return [*tasks]
    items = sum(result.items for result in tasks)
    right = sum(result.right for result in tasks)
    return [*tasks, TaskResult("all", items, right, fmean(result.loss for result in tasks))]


def write_evaluation(
    evaluation: ComoeEvaluation, folder: Path, overwrite: bool = False
) -> list[Path]:
    """Write JSON, Markdown, a page and the pictures into a new folder, all of it or, when anything
    fails, nothing."""
    tasks = evaluation.tasks
    scores, workload, summary = evaluation_blocks(evaluation)
    pictures = figures(evaluation)
    rows = []
    for result in tasks:
        shown = result.representations
        silhouette = "-" if shown is None else f"{shown.silhouette:.3f}"
        rows.append((result.task or "-", f"{result.mean_cosine:.3f}", silhouette))
    items = sum(result.items for result in tasks)
    blocks: tuple[Block, ...] = (
        Heading("Scores", 2, "scores"),
        scores,
        summary,
        Heading("Workload", 2, "workload"),
        pictures[0],
        workload,
        Heading("Similarity", 2, "similarity"),
        *pictures[1:],
        Table(
            "Mean cosine of the outputs of different experts, and silhouette of the outputs by "
            "expert",
            ("task", "mean cosine", "silhouette"),
            tuple(rows),
        ),
    )
    tiles = (
        ("Answered right", share(sum(result.right for result in tasks), items)),
        ("Items", f"{items:,}"),
        ("Experts", f"{evaluation.experts}, top {evaluation.top_k}"),
        ("Layers with experts", str(len(evaluation.layers))),
    )
    title = f"{evaluation.model} with {evaluation.adapters}"
    lead = plain_words(summary.words)
    footer = "Made by moe-compress comoe evaluate."
    images = {figure.name: f"{figure.name}.png" for figure in pictures}
    contents: dict[str, Any] = {
        NAMES[0]: report_json(plain_json(evaluation)),
        NAMES[1]: markdown((Heading(title, 1), *blocks), images),
        NAMES[2]: html.page(title, "CoMoE evaluation", lead, Facts(tiles), blocks, footer),
    }
    for figure in pictures:
        contents[images[figure.name]] = png(figure.title, figure.drawings)
    return write_files(folder, contents, NAMES, overwrite)


def figures(evaluation: ComoeEvaluation) -> tuple[Figure, ...]:
    """Workload and similarity of the experts, and outputs of one layer's, if there are any but
    zeros; a drawing for each task."""
    count = evaluation.experts
    top = max(max(result.shares) for result in evaluation.tasks)
    side = max(1.5, min(5.0, CELL * count))
    workload = list[Drawing]()
    similarity = list[Drawing]()
    scatter = list[Drawing]()
    for result in evaluation.tasks:
        name = result.task or "all items"
        alt = f"Experts from 1 on: {', '.join(f'{100 * share:.1f}%' for share in result.shares)}."
        draw = partial(_draw_workload, name, result.shares, top)
        workload.append(Drawing(name, alt, (max(2.2, 0.8 + BAR * count), 1.9), draw))
        pairs = []
        for second in range(min(count, MOST_NUMBERED)):
            for first in range(second):
                pairs.append(f"{second + 1} and {first + 1} {result.similarity[second][first]:.2f}")
        alt = f"Mean cosine of different experts {result.mean_cosine:.3f}: {', '.join(pairs)}."
        draw = partial(_draw_similarity, name, result.similarity)
        similarity.append(Drawing(name, alt, (side + 1.3, side + 0.8), draw))
        shown = result.representations
        if shown is not None:
            tokens = f"{len(shown.points[0])} tokens of {counted(count, 'expert')}"
            alt = f"{tokens}; silhouette {shown.silhouette:.3f}."
            draw = partial(_draw_outputs, name, shown)
            scatter.append(Drawing(name, alt, (3.6, 2.8), draw))
    method = {"pca": "principal components", "tsne": "t-SNE"}[evaluation.projection]
    made = [
        Figure(
            "workload",
            "Workload of the experts by task",
            "Share of the activations of a task's tokens that each expert has, as a mean over the "
            "layers with experts; dashed: the same for all.",
            workload,
        ),
        Figure(
            "similarity",
            "Similarity of the experts by task",
            "Mean cosine of what two experts answer to the same token, over a task's tokens and "
            "the layers with experts: 1 where both always answer the same, 0 where they have "
            "nothing in common.",
            similarity,
        ),
        Figure(
            "scatter",
            "Outputs of the experts by task",
            f"What the experts of {evaluation.scatter_layer} answer to the same tokens, at unit "
            f"length, by {method}. The silhouette says how far the experts are apart before they "
            "are projected: 1 at the most, about 0 where they answer alike.",
            scatter,
        ),
    ]
    return tuple(figure for figure in made if figure.drawings)


def _draw_workload(name: str, shares: Sequence[float], top: float, canvas: "FigureBase") -> None:
    """Draw the share of a task's activations that each expert has, as a mean over layers."""
    axes = canvas.add_subplot()
    draw_bars(axes, shares, ["after"] * len(shares), even=1 / len(shares))
    ticks = range(0, len(shares), max(1, len(shares) // 8))
    axes.set_xticks(ticks, labels=[str(tick + 1) for tick in ticks])
    axes.set_ylim(0, 1.05 * top)
    axes.set_title(name, loc="left", fontsize=FONT)
    axes.set(xlabel="expert", ylabel="share of activations")


def _draw_similarity(name: str, cosines: Matrix, canvas: "FigureBase") -> None:
    """Draw the mean cosine of the outputs of two experts for the same token."""
    from matplotlib.colors import to_hex

    axes = canvas.add_subplot()
    count = len(cosines)
    image = draw_heat(axes, cosines, -1.0, 1.0, cmap=DIVERGING, aspect="equal")
    ticks = range(0, count, max(1, count // 12))
    for set_ticks in (axes.set_xticks, axes.set_yticks):
        set_ticks(ticks, labels=[str(tick + 1) for tick in ticks])
    for row, column in product(range(count), repeat=2) if count <= MOST_NUMBERED else ():
        value = cosines[row][column]
        axes.text(
            column,
            row,
            f"{value:.2f}",
            ha="center",
            va="center",
            color=ink_on(to_hex(image.cmap(image.norm(value)))),
            fontsize=FONT - 2,
        )
    axes.set_title(name, loc="left", fontsize=FONT)
    axes.set(xlabel="expert", ylabel="expert")
    canvas.colorbar(image, ax=axes, shrink=0.8)


def _draw_outputs(name: str, shown: Representations, canvas: "FigureBase") -> None:
    """Draw the outputs of each expert of one layer for a sample of a task's tokens."""
    axes = canvas.add_subplot()
    for expert, points in enumerate(shown.points):
        axes.plot(
            *zip(*points, strict=True),
            alpha=0.6,
            color=colour(expert),
            label=str(expert + 1),
            linestyle="none",
            marker=MARKERS[expert % len(MARKERS)],
            markeredgewidth=0,
            markersize=3,
        )
    axes.set_title(name, loc="left", fontsize=FONT)
    axes.set(xticks=[], yticks=[])
    if len(shown.points) <= MOST_NUMBERED:
        canvas.legend(loc="outside right upper", title="expert", handlelength=1.2)
