"""The demo's model, and its text and questions by skill."""

import json
from contextlib import AbstractContextManager
from importlib.resources import as_file, files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compressor.frozen import frozen

if TYPE_CHECKING:
    from datasets import Dataset


@frozen
class DemoItem:
    """A multiple-choice question, answered correctly by `choices[answer]` alone."""

    skill: str
    question: str
    choices: tuple[str, ...]
    answer: int


def load_items() -> tuple[DemoItem, ...]:
    """Return the shipped held-out multiple-choice items of all skills."""
    return tuple(DemoItem(**{**row, "choices": tuple(row["choices"])}) for row in _read("items"))


def load_documents(name: str) -> tuple[tuple[str, str], ...]:
    """Return the shipped documents of `calibration` or `heldout`, as pairs of text and skill."""
    return tuple((row["text"], row["skill"]) for row in _read(name))


def skill_items(skill: str, **_: Any) -> dict[str, "Dataset"]:
    """Return the held-out items of one skill; lm-eval passes the task's metadata as well."""
    from datasets import Dataset

    rows = [
        {"question": item.question, "choices": list(item.choices), "answer": item.answer}
        for item in load_items()
        if item.skill == skill
    ]
    return {"test": Dataset.from_list(rows)}


def heldout_text(**_: Any) -> dict[str, "Dataset"]:
    """Return the held-out documents of all skills."""
    from datasets import Dataset

    return {"test": Dataset.from_list(_read("heldout"))}


def _read(name: str) -> list[dict[str, Any]]:
    file = files("compressor") / "demo" / "data" / f"{name}.jsonl"
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def demo_checkpoint() -> AbstractContextManager[Path]:
    """Return a context in which the embedded checkpoint is a folder."""
    return as_file(files("compressor") / "demo" / "checkpoint")
