"""Scores a causal language model on the demo skills: multiple-choice accuracy and held-out loss."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import as_file, files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

BATCH_TOKENS = 4096
Row = tuple[list[int], int]  # tokens, of which those from a place on are scored, each given all tokens before it


@dataclass(frozen=True, slots=True)
class Item:
    """A multiple-choice question: `question + choices[answer]` is right, every other choice is wrong."""

    skill: str
    question: str
    choices: tuple[str, ...]
    answer: int

    def __post_init__(self) -> None:
        if not 0 <= self.answer < len(self.choices):
            raise ValueError(f"item {self.question!r}: answer {self.answer} of {len(self.choices)} choices")
        if len(set(self.choices)) != len(self.choices):
            raise ValueError(f"item {self.question!r}: repeated choices {self.choices}")


def load_items() -> tuple[Item, ...]:
    """The shipped held-out multiple-choice items of all skills."""
    return tuple(Item(row["skill"], row["question"], tuple(row["choices"]), row["answer"]) for row in _read("items"))


def load_documents(name: str) -> tuple[tuple[str, str], ...]:
    """The shipped documents of `calibration` or `heldout`, as pairs of text and skill."""
    return tuple((row["text"], row["skill"]) for row in _read(name))


def skill_items(skill: str, **_: Any) -> dict[str, "Dataset"]:
    """The held-out items of one skill; lm-eval adds what the task's metadata hold."""
    from datasets import Dataset

    rows = [
        {"question": item.question, "choices": list(item.choices), "answer": item.answer}
        for item in load_items()
        if item.skill == skill
    ]
    return {"test": Dataset.from_list(rows)}


def heldout_text(**_: Any) -> dict[str, "Dataset"]:
    """The held-out documents of all skills."""
    from datasets import Dataset

    return {"test": Dataset.from_list([{"text": text, "skill": skill} for text, skill in load_documents("heldout")])}


def skill_accuracy(
    model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase", items: Sequence[Item]
) -> dict[str, float]:
    """For each skill, the share of items whose right choice has the highest summed log-likelihood."""
    rows = [_row(tokenizer, item.question, choice) for item in items for choice in item.choices]
    scores = iter(_log_likelihoods(model, tokenizer, rows))
    right: dict[str, list[bool]] = {}
    for item in items:
        likelihoods = [next(scores) for _ in item.choices]
        right.setdefault(item.skill, []).append(likelihoods.index(max(likelihoods)) == item.answer)
    return {skill: sum(marks) / len(marks) for skill, marks in right.items()}


def heldout_loss(model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase", documents: Sequence[str]) -> float:
    """Mean negative log-likelihood in nats per token of the documents, each read on its own."""
    rows = [_row(tokenizer, "", text) for text in documents]
    count = sum(len(tokens) - start for tokens, start in rows)
    if count == 0:
        raise ValueError(f"no tokens to score in {len(documents)} documents; pass at least one non-empty text")
    return -sum(_log_likelihoods(model, tokenizer, rows)) / count


def _read(name: str) -> list[dict[str, Any]]:
    file = files("compressor") / "demo" / "data" / f"{name}.jsonl"
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def _row(tokenizer: "PreTrainedTokenizerBase", context: str, scored: str) -> Row:
    """Encodes the two texts apart, so that no token straddles them, after the token that opens a text."""
    opening = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    before = [opening, *tokenizer.encode(context, add_special_tokens=False)]
    return [*before, *tokenizer.encode(scored, add_special_tokens=False)], len(before)


@torch.inference_mode()
def _log_likelihoods(
    model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase", rows: Sequence[Row]
) -> list[float]:
    filler = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
    scores = [0.0] * len(rows)
    for batch in _batches(rows):
        # No mask: attention is causal and padding stands on the right, so no scored token ever sees it.
        encoded = [torch.tensor(rows[index][0]) for index in batch]
        tokens = pad_sequence(encoded, batch_first=True, padding_value=filler)
        logits = model(input_ids=tokens.to(model.device), use_cache=False).logits
        # Position i predicts token i + 1; log_softmax runs on the scored positions only.
        places = torch.arange(1, tokens.shape[1])
        starts, ends = torch.tensor([(rows[index][1], len(rows[index][0])) for index in batch]).T[..., None]
        scored = (places >= starts) & (places < ends)
        predicted = functional.log_softmax(logits[:, :-1].cpu()[scored].float(), dim=-1)
        chosen = predicted.gather(-1, tokens[:, 1:][scored].unsqueeze(-1)).squeeze(-1).double()
        sums = torch.zeros(len(batch), dtype=torch.float64).index_add_(0, scored.nonzero()[:, 0], chosen)
        for index, total in zip(batch, sums.tolist(), strict=True):
            scores[index] = total
    return scores


def _batches(rows: Sequence[Row]) -> Iterator[list[int]]:
    """Indices of rows of similar length, at most BATCH_TOKENS tokens a batch with the padding."""
    batch: list[int] = []
    for index in sorted(range(len(rows)), key=lambda index: len(rows[index][0])):
        if batch and (len(batch) + 1) * len(rows[index][0]) > BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


@contextmanager
def demo_checkpoint() -> Iterator[Path]:
    """The folder of the embedded checkpoint."""
    with as_file(files("compressor") / "demo" / "checkpoint") as folder:
        yield folder
