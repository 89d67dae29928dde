"""The demo: compress the embedded checkpoint with several strategies and measure what each
costs."""

import multiprocessing
import os
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from compressor.answers.asking import ask
from compressor.answers.items import Item
from compressor.api import compress
from compressor.checkpoint.reader import Checkpoint, Size
from compressor.data.demo import DemoItem, demo_checkpoint, load_documents, load_items
from compressor.errors import CompressionError
from compressor.files import is_free
from compressor.model.inspection import inspect
from compressor.progress import Progress, quiet_transformers

STRATEGIES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("count-guided", {}),
    ("model-centric", {"merge": "learned"}),
    ("data-centric", {"merge": "max"}),
    ("auto", {}),
)
SAMPLES = 128
TEXT: dict[str, Any] = {
    "calibration": "demo",
    "sequence_length": 128,
}  # the demo model was trained on windows of 128 bytes


def score(
    model: Any, tokenizer: Any, questions: Sequence[DemoItem], texts: Sequence[str]
) -> tuple[dict[str, float], float]:
    """Share of right answers for each skill, and loss in nats per token of the texts (0 without
    any)."""
    items = [Item("", text) for text in texts]
    for question in questions:
        prompt = f"{tokenizer.bos_token}{question.question}"
        answer = question.choices[question.answer]
        items.append(Item(prompt, answer, question.choices, question.skill))
    figures = {figure.task: figure for figure in ask(model, tokenizer, items)}
    loss = figures.pop("").loss if texts else 0.0
    return {skill: figure.accuracy for skill, figure in figures.items()}, loss


def measured(
    name: str, folder: Path, source: Path, compression: Mapping[str, Any], every: int
) -> dict[str, Any]:
    """Compress the source into a folder, if it is told how, and measure what lies there; of so many
    questions and texts one is asked.

    One thread computes: the model is so small that two would wait for each other.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    if compression:
        compress(str(source), folder, samples=SAMPLES, evaluate=False, **TEXT, **compression)
    size = Size.of(Checkpoint(folder).tensors.values())
    with quiet_transformers():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = [text for text, _ in load_documents("heldout")[::every]]
    accuracy, loss = score(model, tokenizer, load_items()[::every], texts)
    experts = inspect(str(folder)).experts
    facts = {"name": name, "experts": experts, **asdict(size), "loss": loss}
    return {**facts, "accuracy": accuracy}


def run_demo(
    experts: int, output: Path | None, progress: Progress, quick: bool
) -> list[dict[str, Any]]:
    """Measure the demo model and each strategy's compression of it; `output` keeps the compressed
    models.

    Each core has a process that makes and measures one model after the other. Loss is in nats per
    held-out token. With `quick` it is one strategy, on a tenth of the questions and texts."""
    strategies, every = (STRATEGIES[:1], 10) if quick else (STRATEGIES, 1)
    if output is not None and not is_free(output):
        raise CompressionError(f"{output} exists already; name a new folder")
    with demo_checkpoint() as source, tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) if output is None else output
        folder.mkdir(parents=True, exist_ok=True)
        models: list[tuple[str, Path, dict[str, Any]]] = [("original", source, {})]
        for strategy, options in strategies:
            label = " ".join([strategy, *map("({})".format, options.values())])
            compression = {"experts": experts, "strategy": strategy, "options": options}
            models.append((label, folder / strategy, compression))
        workers = min(os.cpu_count() or 1, len(models))
        progress.start("compress and measure", len(models))
        with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
            futures = [
                pool.submit(measured, label, place, source, compression, every)
                for label, place, compression in reversed(models)  # the longest first
            ]
            for future in as_completed(futures):
                progress.advance(future.result()["name"])
        return [future.result() for future in reversed(futures)]
