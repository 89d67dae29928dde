"""Scores of a model with LoRA experts, and which experts work on which task (CoMoE, figures 4 and 5).

Letters: T tokens, E experts, K of them activated, L layers with experts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from compressor.answers.items import Item, TokenRow, is_greedy, likelihoods, positions, tokenised
from compressor.answers.tasks import items_of
from compressor.checkpoint.reader import Checkpoint
from compressor.checkpoint.source import ModelSource, locate
from compressor.comoe.contrastive import unit
from compressor.comoe.layer import comoe_layers, load_adapters, read_facts, watching
from compressor.devices import pick_device
from compressor.formatting import label
from compressor.model.architecture import load_config
from compressor.model.opened import load_whole, pick_dtype
from compressor.model.tokenizer import load_tokenizer
from compressor.progress import Progress, Silent, quiet_transformers

IGNORED = -100  # the label of tokens that have no loss
Example = dict[str, list[int]]
Question = tuple[Item, tuple[TokenRow, ...]]  # with a row for each answer


def load(source: ModelSource, dtype: str) -> tuple[Any, Any]:
    """The tokenizer of a model, and all of it in memory."""
    tokenizer = load_tokenizer(source.folder)
    computed = pick_dtype(dtype, load_config(source.folder), Checkpoint(source.folder))
    with quiet_transformers():
        return tokenizer, load_whole(source.folder, dtype=computed)


def with_rows(items: Sequence[Item], model: Any, tokenizer: Any, strict: bool = False) -> list[Question]:
    """Items and their rows for a model of transformers; those without tokens are left out, or refused if `strict`."""
    most = positions(model.config)
    vocabulary = model.get_input_embeddings().weight.shape[0]
    # the last token of a row is an input, too, though no logits after it are needed
    return tokenised(items, tokenizer, vocabulary, most and most - 1, strict)


def examples(questions: Sequence[Question]) -> list[Example]:
    """For each item its prompt with the right answer; only the answer's tokens have labels."""
    examples = []
    for item, rows in questions:
        row = rows[item.right]
        labels = [IGNORED] * row.start + list(row.tokens[row.start :])
        examples.append({"input_ids": list(row.tokens), "labels": labels})
    return examples


def collate(batch: Sequence[Example], pad: int = 0) -> dict[str, Tensor]:
    """Examples as a batch, padded on the right: tokens, mask and labels, [B, S] each."""
    tokens = [torch.tensor(example["input_ids"]) for example in batch]
    labels = [torch.tensor(example["labels"]) for example in batch]
    return {
        "input_ids": pad_sequence(tokens, batch_first=True, padding_value=pad),
        "attention_mask": pad_sequence([torch.ones_like(row) for row in tokens], batch_first=True),
        "labels": pad_sequence(labels, batch_first=True, padding_value=IGNORED),
    }


def pad_token(tokenizer: Any) -> int:
    """A token to pad with; it is masked, so any will do."""
    return int(tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id or 0)


Matrix = tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True)
class TaskResult:
    """One task: its score, and the experts' workload and similarity on its prompts and right answers."""

    task: str
    items: int
    right: int
    loss: float  # nats per token of the right answers
    workload: Matrix = ()  # [L, E], share of the activations that an expert of a layer has; each row adds up to 1
    similarity: Matrix = ()  # [E, E], mean cosine of two experts' outputs over tokens and layers

    @property
    def shares(self) -> tuple[float, ...]:
        """The workload as a mean over layers, [E]."""
        return tuple(np.mean(self.workload, axis=0).tolist())

    @property
    def accuracy(self) -> float:
        """Share of the items that are answered right."""
        return self.right / self.items

    @property
    def mean_cosine(self) -> float:
        """The mean of the cosines between different experts; 0 of a single one."""
        cosines = np.array(self.similarity)
        count = len(cosines)
        return float(cosines.sum() - cosines.trace()) / (count * (count - 1)) if count > 1 else 0.0


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
    listener = progress or Silent()
    questions = with_rows(items, model, tokenizer, strict)
    by_task: dict[str, list[Question]] = {}
    for item, rows in questions:
        by_task.setdefault(item.task, []).append((item, rows))
    pad = pad_token(tokenizer)
    listener.start("Asking", len(questions))
    model.eval()
    return tuple(_ask_task(model, task, asked, pad, batch_size, listener) for task, asked in by_task.items())


@torch.no_grad()
def _ask_task(
    model: Any,
    task: str,
    questions: Sequence[Question],
    pad: int,
    batch_size: int,
    listener: Progress,
) -> TaskResult:
    layers = comoe_layers(model)
    experts = max((len(layer.router) for layer in layers.values()), default=0)
    counts = torch.zeros(len(layers), dtype=torch.float64)  # of tokens, by layer
    activations = torch.zeros(len(layers), experts, dtype=torch.float64)  # [L, E], summed over tokens, as are cosines
    cosines = torch.zeros(len(layers), experts, experts, dtype=torch.float64)
    right = 0
    nats = 0.0
    tokens = 0
    for start in range(0, len(questions), batch_size):
        part = questions[start : start + batch_size]
        rows = [row for _, answers in part for row in answers]
        batch = collate([{"input_ids": list(row.tokens), "labels": list(row.tokens)} for row in rows], pad)
        token_ids = batch["input_ids"].to(model.device)
        padding = batch["attention_mask"].to(model.device)
        firsts = [0, *accumulate(len(answers) for _, answers in part)]  # each item's first row
        best = [first + item.right for (item, _), first in zip(part, firsts, strict=False)]
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
                    counts[number] += len(places)
        scores = likelihoods(logits, rows)
        for (item, answers), answer in zip(part, best, strict=True):
            first = answer - item.right
            if item.choices:
                right += int(scores[first : first + len(answers)].argmax()) == item.right
            else:
                right += is_greedy(logits[answer : answer + 1], answers[0])
            nats -= float(scores[answer])
            tokens += len(rows[answer].tokens) - rows[answer].start
            listener.advance(task)
    workload = activations / activations.sum(1, keepdim=True).clamp_min(1)
    similarity = (cosines / counts.clamp_min(1).reshape(-1, 1, 1)).mean(0)
    return TaskResult(task, len(questions), right, nats / tokens, _matrix(workload), _matrix(similarity))


def _matrix(values: Tensor) -> Matrix:
    return tuple(map(tuple, values.tolist()))


@dataclass(frozen=True, slots=True)
class ComoeEvaluation:
    """The results of a model with adapters by task; `base` are those of the model alone, if it was asked."""

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
    source = locate(model, revision, progress)
    place = pick_device(device)
    tokenizer, loaded = load(source, dtype)
    asking = partial(ask, tokenizer=tokenizer, items=items, batch_size=batch_size, strict=strict, progress=progress)
    base = asking(loaded.to(place)) if with_base else ()
    results = asking(load_adapters(loaded, adapters).to(place))
    return ComoeEvaluation(
        model=source.label,
        adapters=label(str(adapters)),
        experts=facts.config.experts,
        top_k=facts.config.top_k,
        layers=tuple(facts.layers),
        tasks=results,
        base=base,
    )
