"""The shipped demo data as lm-eval data sets, without a copy of them and without a network."""

from typing import Any

from datasets import Dataset

from compressor.demo.evaluation import load_documents, load_items


def skill_items(skill: str, **_: Any) -> dict[str, Dataset]:
    """The held-out items of one skill; lm-eval adds what the task's metadata hold."""
    rows = [
        {"question": item.question, "choices": list(item.choices), "answer": item.answer}
        for item in load_items()
        if item.skill == skill
    ]
    return {"test": Dataset.from_list(rows)}


def heldout_text(**_: Any) -> dict[str, Dataset]:
    """The held-out documents of all skills."""
    return {"test": Dataset.from_list([{"text": text, "skill": skill} for text, skill in load_documents("heldout")])}
