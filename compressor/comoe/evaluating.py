"""Asking a model with LoRA experts: what it answers right, and which experts work on what (CoMoE, figures 4 and 5).

Letters: T tokens, E experts, K of them activated, L layers with experts.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from compressor.comoe.layer import LoraExperts, comoe_layers, watching
from compressor.evaluation.items import Item, Row, is_greedy, likelihoods, positions, rows_of
from compressor.progress import Progress, Silent
from compressor.steps.distill.contrastive import unit

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

    def padded(rows: Iterable[Sequence[int]], filler: int) -> Tensor:
        return pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=filler)

    return {
        "input_ids": padded((each["input_ids"] for each in batch), pad),
        "attention_mask": padded(([1] * len(each["input_ids"]) for each in batch), 0),
        "labels": padded((each["labels"] for each in batch), IGNORED),
    }


def pad_token(tokenizer: Any) -> int:
    """A token to pad with; it is masked, so any will do."""
    return int(tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id or 0)


Matrix = tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True)
class TaskResult:
    """One task: its score, and what its prompts and right answers show of the experts."""

    task: str
    items: int
    right: int
    loss: float  # nats per token of the right answers
    workload: Matrix = ()  # [L, E], share of the activations that an expert of a layer has; each row adds up to 1
    similarity: Matrix = ()  # [E, E], mean cosine of two experts' outputs over tokens and layers

    @property
    def shares(self) -> tuple[float, ...]:
        """The workload as a mean over layers, [E]."""
        return tuple(sum(column) / len(self.workload) for column in zip(*self.workload, strict=True))

    @property
    def accuracy(self) -> float:
        """Share of the items that are answered right."""
        return self.right / self.items


def ask(
    model: Any, tokenizer: Any, items: Sequence[Item], *, batch_size: int = 16, progress: Progress | None = None
) -> tuple[TaskResult, ...]:
    """A result for each task, in the order of the items.

    Of choices the likeliest must be the answer; without choices, the answer must be what the model writes by itself.
    A model without experts has no workload and no similarity. Raises `CompressionError` for an item that is too long.
    """
    listener = progress or Silent()
    most, vocabulary = positions(model.config), model.get_input_embeddings().weight.shape[0]
    # the last token of a row is given, too, though nothing is asked after it
    by_task: dict[str, list[tuple[Item, tuple[Row, ...]]]] = {}
    for item in items:
        by_task.setdefault(item.task, []).append((item, rows_of(item, tokenizer, vocabulary, most and most - 1)))
    was_training, pad = model.training, pad_token(tokenizer)
    listener.start("Asking", len(items))
    model.eval()
    try:
        with torch.no_grad():
            return tuple(_task(model, task, asked, pad, batch_size, listener) for task, asked in by_task.items())
    finally:
        model.train(was_training)


def _task(
    model: Any, task: str, asked: Sequence[tuple[Item, tuple[Row, ...]]], pad: int, batch_size: int, listener: Progress
) -> TaskResult:
    layers = comoe_layers(model)
    counted = {name: _Counted(layer) for name, layer in layers.items()}
    right, nats, tokens = 0, 0.0, 0
    for start in range(0, len(asked), batch_size):
        part = asked[start : start + batch_size]
        rows = [row for _, own in part for row in own]
        firsts = list(accumulate((len(own) for _, own in part), initial=0))[:-1]  # each item's first row
        batch = collate([{"input_ids": list(row.tokens), "labels": list(row.tokens)} for row in rows], pad)
        tokens_of, padding = (batch[name].to(model.device) for name in ("input_ids", "attention_mask"))
        with watching(layers):
            logits = model(input_ids=tokens_of, attention_mask=padding, use_cache=False).logits
            mask = torch.zeros_like(padding)
            for (item, _), first in zip(part, firsts, strict=True):
                mask[first + item.right] = padding[first + item.right]
            for each in counted.values():
                each.count(mask)
        found = likelihoods(logits, rows)
        for (item, own), first in zip(part, firsts, strict=True):
            best = first + item.right
            greedy = not item.choices and is_greedy(logits[best : best + 1], own[0])
            right += greedy if not item.choices else int(found[first : first + len(own)].argmax()) == item.right
            nats -= float(found[best])
            tokens += len(own[item.right].tokens) - own[item.right].start
            listener.advance(task)
    workload = tuple(each.workload for each in counted.values())
    similarity = torch.stack([each.similarity for each in counted.values()]).mean(0).tolist() if counted else []
    return TaskResult(task, len(asked), int(right), nats / tokens, workload, tuple(map(tuple, similarity)))


class _Counted:
    """Activations and cosines of one layer's experts, summed over tokens."""

    def __init__(self, layer: LoraExperts) -> None:
        experts = layer.router.shape[0]
        self.layer, self.tokens = layer, 0
        self.activations = torch.zeros(experts, dtype=torch.float64)
        self.cosines = torch.zeros(experts, experts, dtype=torch.float64)

    def count(self, mask: Tensor) -> None:
        """Add what the layer has just seen, of the tokens that count; [B, S]."""
        for seen in self.layer.watched or ():
            places = seen.places(mask).to(seen.inner.device)
            outputs = unit(self.layer.outputs(seen.inner[places]))
            self.cosines += torch.einsum("tid,tjd->ij", outputs, outputs).double().cpu()
            self.activations += seen.chosen[places].flatten().bincount(minlength=len(self.activations)).cpu()
            self.tokens += len(places)

    @property
    def workload(self) -> tuple[float, ...]:
        return tuple((self.activations / self.activations.sum().clamp_min(1)).tolist())

    @property
    def similarity(self) -> Tensor:
        return self.cosines / max(1, self.tokens)
