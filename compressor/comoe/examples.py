"""Items as what a model is trained on and asked with: tokens with labels, batches with padding."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from compressor.evaluation.items import Item, Row, rows_of

IGNORED = -100  # the label of tokens that have no loss
Example = dict[str, list[int]]


def examples(items: Sequence[Item], tokenizer: Any, vocabulary: int, most: int | None) -> list[Example]:
    """For each item its prompt with the right answer; only the answer's tokens have labels."""
    found = []
    for item in items:
        (row,) = rows_of(Item(item.prompt, item.answer), tokenizer, vocabulary, most and most - 1)
        labels = [IGNORED] * row.start + list(row.tokens[row.start :])
        found.append({"input_ids": list(row.tokens), "labels": labels})
    return found


def collate(batch: Sequence[Example], pad: int = 0) -> dict[str, Tensor]:
    """Examples as a batch, padded on the right: tokens, mask and labels, [B, S] each."""
    longest = max(len(example["input_ids"]) for example in batch)

    def padded(name: str, filler: int) -> Tensor:
        return torch.tensor([[*each[name], *[filler] * (longest - len(each[name]))] for each in batch])

    mask = [[1] * len(each["input_ids"]) + [0] * (longest - len(each["input_ids"])) for each in batch]
    return {
        "input_ids": padded("input_ids", pad),
        "attention_mask": torch.tensor(mask),
        "labels": padded("labels", IGNORED),
    }


def batch_of(rows: Sequence[Row], pad: int = 0) -> dict[str, Tensor]:
    """Rows as a batch without labels."""
    made = collate([{"input_ids": list(row.tokens), "labels": list(row.tokens)} for row in rows], pad)
    return {name: made[name] for name in ("input_ids", "attention_mask")}


def pad_token(tokenizer: Any) -> int:
    """A token to pad with; it is masked, so any will do."""
    return int(tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id or 0)
