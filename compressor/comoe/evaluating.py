"""What a model with LoRA experts answers right, and which experts work on what (CoMoE, figures 4 and 5).

Letters: T tokens, E experts, K of them activated, L layers with experts.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from compressor.comoe.layer import comoe_layers, watching
from compressor.evaluation.items import Item, Row, is_greedy, likelihoods, positions, rows_of
from compressor.progress import Progress, Silent
from compressor.steps.distill.contrastive import unit

IGNORED = -100  # the label of tokens that have no loss
Example = dict[str, list[int]]


def examples(items: Sequence[Item], tokenizer: Any, vocabulary: int, most: int | None) -> list[Example]:
    """For each item its prompt with the right answer; only the answer's tokens have labels."""
    rows = list[Example]()
    for item in items:
        (row,) = rows_of(Item(item.prompt, item.answer), tokenizer, vocabulary, most and most - 1)
        labels = [IGNORED] * row.start + list(row.tokens[row.start :])
        rows.append({"input_ids": list(row.tokens), "labels": labels})
    return rows


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

    @property
    def mean_cosine(self) -> float:
        """The mean of the cosines between different experts; 0 of a single one."""
        count = len(self.similarity)
        off = sum(sum(row) - row[place] for place, row in enumerate(self.similarity))
        return off / (count * (count - 1)) if count > 1 else 0.0


def ask(
    model: Any, tokenizer: Any, items: Sequence[Item], *, batch_size: int = 16, progress: Progress | None = None
) -> tuple[TaskResult, ...]:
    """A result for each task, in the order of the items; raises `CompressionError` for an item that is too long.

    The right choice must be the most likely one; without choices, greedy decoding must give the answer. A model
    without experts has no workload and no similarity.
    """
    listener = progress or Silent()
    most, vocabulary = positions(model.config), model.get_input_embeddings().weight.shape[0]
    # the last token of a row is an input, too, though no logits after it are needed
    by_task: dict[str, list[tuple[Item, tuple[Row, ...]]]] = {}
    for item in items:
        by_task.setdefault(item.task, []).append((item, rows_of(item, tokenizer, vocabulary, most and most - 1)))
    was_training, pad = model.training, pad_token(tokenizer)
    listener.start("Asking", len(items))
    model.eval()
    try:
        with torch.no_grad():
            return tuple(_task(model, task, own, pad, batch_size, listener) for task, own in by_task.items())
    finally:
        model.train(was_training)


def _task(
    model: Any,
    task: str,
    questions: Sequence[tuple[Item, tuple[Row, ...]]],
    pad: int,
    batch_size: int,
    listener: Progress,
) -> TaskResult:
    layers = comoe_layers(model)
    experts = max((len(layer.router) for layer in layers.values()), default=0)
    activations = torch.zeros(len(layers), experts, dtype=torch.float64)  # [L, E], summed over tokens, as are cosines
    cosines, seen_tokens = torch.zeros(len(layers), experts, experts, dtype=torch.float64), [0] * len(layers)
    right, nats, tokens = 0, 0.0, 0
    for start in range(0, len(questions), batch_size):
        part = questions[start : start + batch_size]
        rows = [row for _, own in part for row in own]
        firsts = list(accumulate((len(own) for _, own in part), initial=0))[:-1]  # each item's first row
        batch = collate([{"input_ids": list(row.tokens), "labels": list(row.tokens)} for row in rows], pad)
        token_ids, padding = (batch[name].to(model.device) for name in ("input_ids", "attention_mask"))
        best = [first + item.right for (item, _), first in zip(part, firsts, strict=True)]
        mask = torch.zeros_like(padding)  # of the right answers and their prompts
        mask[best] = padding[best]
        with watching(layers):
            logits = model(input_ids=token_ids, attention_mask=padding, use_cache=False).logits
            for number, layer in enumerate(layers.values()):
                for seen in layer.watched or ():
                    places = seen.places(mask).to(seen.inner.device)
                    outputs = unit(layer.outputs(seen.inner[places]))
                    cosines[number] += torch.einsum("tid,tjd->ij", outputs, outputs).double().cpu()
                    activations[number] += seen.chosen[places].flatten().bincount(minlength=experts).cpu()
                    seen_tokens[number] += len(places)
        scores = likelihoods(logits, rows)
        for (item, own), first, answer in zip(part, firsts, best, strict=True):
            if item.choices:
                right += int(scores[first : first + len(own)].argmax()) == item.right
            else:
                right += is_greedy(logits[answer : answer + 1], own[0])
            nats -= float(scores[answer])
            tokens += len(rows[answer].tokens) - rows[answer].start
            listener.advance(task)
    workload = activations / activations.sum(1, keepdim=True).clamp_min(1)
    similarity = cosines / torch.tensor(seen_tokens).clamp_min(1).reshape(-1, 1, 1)
    matrices = (tuple(map(tuple, each.tolist())) for each in (workload, similarity.mean(0)))
    return TaskResult(task, len(questions), right, nats / tokens, *matrices)
