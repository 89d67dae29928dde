"""The demo: compress the embedded checkpoint with several strategies and measure what each costs."""

import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from compressor.api import compress
from compressor.checkpoint.reader import Checkpoint, Size
from compressor.comoe.evaluating import ask
from compressor.data.demo import Item as Question
from compressor.data.demo import demo_checkpoint, load_documents, load_items
from compressor.errors import CompressionError
from compressor.evaluation.items import Item
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
    model: Any, tokenizer: Any, questions: Sequence[Question], texts: Sequence[str]
) -> tuple[dict[str, float], float]:
    """Share of right answers for each skill, and loss in nats per token of the texts (0 without any)."""
    items = [
        Item(f"{tokenizer.bos_token}{each.question}", each.choices[each.answer], each.choices, each.skill)
        for each in questions
    ]
    found = {each.task: each for each in ask(model, tokenizer, [*items, *(Item("", text) for text in texts)])}
    loss = found.pop("").loss if texts else 0.0
    return {skill: each.accuracy for skill, each in found.items()}, loss


def run_demo(experts: int, output: Path | None, progress: Progress, quick: bool = False) -> list[dict[str, Any]]:
    """Measure the demo model, then each strategy's compression of it; `output` keeps the compressed models.

    Loss is in nats per held-out token. With `quick` it is one strategy, on a tenth of the questions and texts.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    trials, every = (STRATEGIES[:1], 10) if quick else (STRATEGIES, 1)
    if output is not None and not is_free(output):
        raise CompressionError(f"{output} exists already; name a new folder")

    def measured(name: str, folder: Path, count: int) -> dict[str, Any]:
        size = Size.of(Checkpoint(folder).tensors.values())
        with quiet_transformers():
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
            tokenizer = AutoTokenizer.from_pretrained(folder)
        texts = [text for text, _ in load_documents("heldout")[::every]]
        accuracy, loss = score(model, tokenizer, load_items()[::every], texts)
        return {"name": name, "experts": count, **asdict(size), "loss": loss, "accuracy": accuracy}

    with demo_checkpoint() as source, tempfile.TemporaryDirectory() as scratch:
        rows = [measured("original", source, inspect(str(source)).experts)]
        folder = Path(scratch) if output is None else output
        for strategy, options in trials:
            label = " ".join([strategy, *(f"({value})" for value in options.values())])
            target = folder / strategy
            target.parent.mkdir(parents=True, exist_ok=True)
            choice: dict[str, Any] = {"experts": experts, "strategy": strategy, "options": options}
            compress(str(source), target, samples=SAMPLES, progress=progress, **TEXT, **choice)
            rows.append(measured(label, target, experts))
    return rows
