"""An evaluation of LoRA experts as blocks, and as a folder of reports that appears complete or not at all."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from compressor.comoe.evaluating import TaskResult
from compressor.comoe.pictures import mean_cosine, pictures
from compressor.comoe.training import Trained
from compressor.document import html
from compressor.document.blocks import Block, Facts, Heading, Strong, Table, Text, Words
from compressor.document.markdown import markdown
from compressor.drawing.picture import png
from compressor.files import whole_folder
from compressor.records import plain_json
from compressor.words import counted, human_count, share

NAMES = ("evaluation.json", "evaluation.md", "evaluation.html", "workload.png", "similarity.png")


@dataclass(frozen=True, slots=True)
class ComoeEvaluation:
    """What a model with adapters answers, by task; `base` is the same of the model alone, if it was asked."""

    model: str
    adapters: str
    experts: int
    top_k: int
    layers: tuple[str, ...]  # with experts beside them
    tasks: tuple[TaskResult, ...]
    base: tuple[TaskResult, ...] = ()
    format: Literal["moe-compressor-comoe-evaluation/1"] = "moe-compressor-comoe-evaluation/1"


def training_blocks(made: Trained) -> tuple[Block, ...]:
    """What a terminal shows of a training: the last figures of the log."""
    last = made.log[-1] if made.log else {}
    parts = ("cross_entropy", "contrastive", "information_gap")
    figures = tuple((name.replace("_", " "), f"{last[name]:.4f}") for name in parts if name in last)
    return (
        Text(
            f"{human_count(made.parameters)} parameters of {counted(made.config.experts, 'LoRA expert')} a layer were "
            f"trained on {counted(made.items, 'item')} for {counted(made.steps, 'step')}."
        ),
        *([Facts(figures)] if figures else []),
    )


def evaluation_blocks(evaluation: ComoeEvaluation) -> tuple[Block, ...]:
    """What a terminal shows: the scores, and the workload of the experts in numbers."""
    return _scores(evaluation), _workload(evaluation), Text(_said(evaluation))


def write_evaluation(evaluation: ComoeEvaluation, folder: Path, overwrite: bool = False) -> list[Path]:
    """Write JSON, Markdown, a page and both pictures into a new folder, all of it or, when anything fails, nothing."""
    workload, similarity = pictures(evaluation.tasks)
    title = f"{evaluation.model} with {evaluation.adapters}"
    blocks: tuple[Block, ...] = (
        Heading("Scores", 2, "scores"),
        _scores(evaluation),
        Text(_said(evaluation)),
        Heading("Workload", 2, "workload"),
        workload,
        _workload(evaluation),
        Heading("Similarity", 2, "similarity"),
        similarity,
        _cosines(evaluation.tasks),
    )
    with whole_folder(folder, NAMES, overwrite) as made:
        content = json.dumps(plain_json(evaluation), indent=2)
        (made / NAMES[0]).write_text(content + "\n", encoding="utf-8")
        images = {"workload": NAMES[3], "similarity": NAMES[4]}
        text = markdown((Heading(title, 1), *blocks), images)
        (made / NAMES[1]).write_text(text, encoding="utf-8")
        page = html.page(
            title,
            "CoMoE evaluation",
            _said(evaluation),
            Facts(_tiles(evaluation)),
            blocks,
            "Made by moe-compress comoe evaluate.",
        )
        (made / NAMES[2]).write_text(page, encoding="utf-8")
        for name, figure in zip(NAMES[3:], (workload, similarity), strict=True):
            (made / name).write_bytes(png(figure.title, figure.drawings))
    return [folder / name for name in NAMES]


def _tiles(evaluation: ComoeEvaluation) -> tuple[tuple[str, Words], ...]:
    right, items = sum(each.right for each in evaluation.tasks), sum(each.items for each in evaluation.tasks)
    return (
        ("Answered right", share(right, items)),
        ("Items", f"{items:,}"),
        ("Experts", f"{evaluation.experts}, top {evaluation.top_k}"),
        ("Layers with experts", str(len(evaluation.layers))),
    )


def _said(evaluation: ComoeEvaluation) -> str:
    return (
        f"{counted(len(evaluation.layers), 'linear layer')} with {counted(evaluation.experts, 'LoRA expert')} each, "
        f"of which {evaluation.top_k} are activated. Loss is in nats per token of the right answers."
    )


def _scores(evaluation: ComoeEvaluation) -> Table:
    before = {each.task: each for each in evaluation.base}
    rows = list[tuple[Words, ...]]()
    for each in (*evaluation.tasks, *_total(evaluation.tasks)):
        base = before.get(each.task) or next(iter(_total(evaluation.base)), None)
        cells = (each.task or "-", f"{each.items:,}", share(each.right, each.items), f"{each.loss:.4f}")
        more = (share(base.right, base.items), f"{base.loss:.4f}") if base else ()
        rows.append((*cells, *more))
    if len(evaluation.tasks) > 1:
        rows[-1] = tuple(map(Strong, rows[-1]))
    columns = ("task", "items", "right", "loss", *(("right before", "loss before") if before else ()))
    return Table(f"{evaluation.model} with {evaluation.adapters}", columns, tuple(rows))


def _total(tasks: Sequence[TaskResult]) -> tuple[TaskResult, ...]:
    """All tasks in one, where there are several; its loss is the mean of theirs."""
    if len(tasks) < 2:
        return ()
    loss = sum(each.loss for each in tasks) / len(tasks)
    return (TaskResult("all", sum(each.items for each in tasks), sum(each.right for each in tasks), loss),)


def _workload(evaluation: ComoeEvaluation) -> Table:
    columns = ("task", *(str(number + 1) for number in range(evaluation.experts)))
    rows = tuple((each.task or "-", *(f"{100 * part:.1f}%" for part in each.shares)) for each in evaluation.tasks)
    return Table("Share of activations by expert, mean over layers", columns, rows)


def _cosines(tasks: Sequence[TaskResult]) -> Table:
    rows = tuple((each.task or "-", f"{mean_cosine(each):.3f}") for each in tasks)
    return Table("Mean cosine of the outputs of different experts", ("task", "mean cosine"), rows)
