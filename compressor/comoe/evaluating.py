"""What a model with LoRA experts answers right, and which experts work on what (CoMoE, figures 4 and 5).

Letters: T tokens, E experts, K of them activated, L layers with experts.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from compressor.checkpoint.reader import Checkpoint
from compressor.checkpoint.source import ModelSource, locate
from compressor.comoe.contrastive import unit
from compressor.comoe.layer import comoe_layers, load_adapters, read_facts, watching
from compressor.devices import pick_device
from compressor.evaluation.items import Item, Row, is_greedy, likelihoods, positions, tokenised
from compressor.evaluation.tasks import items_of
from compressor.formatting import label
from compressor.model.architecture import load_config
from compressor.model.opened import load_whole, pick_dtype
from compressor.model.tokenizer import load_tokenizer
from compressor.progress import Progress, Silent, quiet_transformers

IGNORED = -100  # the label of tokens that have no loss
Example = dict[str, list[int]]
Question = tuple[Item, tuple[Row, ...]]  # with a row for each answer


def load(source: ModelSource, dtype: str) -> tuple[Any, Any]:
    """The tokenizer of a model, and all of it in memory."""
    tokenizer = load_tokenizer(source.folder)
    computed = pick_dtype(dtype, load_config(source.folder), Checkpoint(source.folder))
    with quiet_transformers():
        return tokenizer, load_whole(source.folder, dtype=computed)


def with_rows(items: Sequence[Item], model: Any, tokenizer: Any, strict: bool = False) -> list[Question]:
    """Items and their rows for a model of transformers; those without tokens are left out, or refused if `strict`."""
    most, vocabulary = positions(model.config), model.get_input_embeddings().weight.shape[0]
    # the last token of a row is an input, too, though no logits after it are needed
    return tokenised(items, tokenizer, vocabulary, most and most - 1, strict)


def examples(questions: Sequence[Question]) -> list[Example]:
    """For each item its prompt with the right answer; only the answer's tokens have labels."""
    rows = [rows[item.right] for item, rows in questions]
    return [
        {"input_ids": list(row.tokens), "labels": [IGNORED] * row.start + list(row.tokens[row.start :])} for row in rows
    ]


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
    model: Any,
    tokenizer: Any,
    items: Sequence[Item],
    *,
    batch_size: int = 16,
    strict: bool = False,
    progress: Progress | None = None,
) -> tuple[TaskResult, ...]:
    """A result for each task, in the order of the items; those without tokens are left out, or refused if `strict`.

    The right choice must be the most likely one; without choices, greedy decoding must give the answer. A model
    without experts has no workload and no similarity.
    """
    listener, questions = progress or Silent(), with_rows(items, model, tokenizer, strict)
    by_task: dict[str, list[Question]] = {}
    for item, rows in questions:
        by_task.setdefault(item.task, []).append((item, rows))
    was_training, pad = model.training, pad_token(tokenizer)
    listener.start("Asking", len(questions))
    model.eval()
    try:
        with torch.no_grad():
            return tuple(_task(model, task, own, pad, batch_size, listener) for task, own in by_task.items())
    finally:
        model.train(was_training)


def _task(
    model: Any,
    task: str,
    questions: Sequence[Question],
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
                    cosines[number] += torch.einsum("tid,tjd->ij", outputs, outputs).cpu().double()
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


def evaluate_comoe(
    model: str,
    adapters: str | Path,
    *,
    tasks: Sequence[str] = (),
    heldout: str | Path | None = None,
    limit: int | None = None,
    include_path: str | Path | None = None,
    strict: bool = False,
    with_base: bool = False,
    batch_size: int = 16,
    device: str = "auto",
    dtype: str = "auto",
    revision: str | None = None,
    progress: Progress | None = None,
) -> ComoeEvaluation:
    """Ask a model with adapters the items of lm-eval `tasks` or of the JSONL file `heldout`.

    `with_base` asks the model without adapters, too. Raises `CompressionError` for adapters of another model.
    """
    facts = read_facts(Path(adapters))
    items = items_of(tasks, heldout, limit, include_path, strict, "--heldout")
    source, place = locate(model, revision, progress), pick_device(device)
    tokenizer, loaded = load(source, dtype)
    how: dict[str, Any] = {"batch_size": batch_size, "strict": strict, "progress": progress}
    before = ask(loaded.to(place), tokenizer, items, **how) if with_base else ()
    load_adapters(loaded, adapters).to(place)
    after = ask(loaded, tokenizer, items, **how)
    experts, layers = facts.config, tuple(facts.layers)
    names = source.label, label(str(adapters))
    return ComoeEvaluation(*names, experts.experts, experts.top_k, layers, after, before)
