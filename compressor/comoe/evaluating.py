"""Scores of a model with LoRA experts, which experts work on which task, and what they answer to
the same tokens, as points in two dimensions (CoMoE, figures 4 to 7).

Letters: T tokens, E experts, K of them activated, D features of an expert's output, L layers with
experts.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from compressor.answers.asking import Question, TaskScore, ask, forward, padded
from compressor.answers.items import Item
from compressor.answers.tasks import items_of
from compressor.checkpoint.reader import Checkpoint
from compressor.checkpoint.source import ModelSource, locate
from compressor.comoe.contrastive import unit
from compressor.comoe.cost import Cost, answering_cost
from compressor.comoe.layer import LoraExperts, comoe_layers, load_adapters, read_facts, watching
from compressor.comoe.options import Projection
from compressor.devices import pick_device
from compressor.errors import CompressionError
from compressor.formatting import label
from compressor.frozen import frozen
from compressor.model.architecture import load_config
from compressor.model.opened import load_whole, pick_dtype
from compressor.model.tokenizer import load_tokenizer
from compressor.progress import Progress, quiet_transformers

IGNORED = -100  # the label of tokens that have no loss
SAMPLED = 128  # tokens of each task
PERPLEXITY = 30.0  # of t-SNE, where there are enough points
Example = dict[str, list[int]]


def load(source: ModelSource, dtype: str) -> tuple[Any, Any]:
    """The tokenizer of a model, and all of it in memory."""
    tokenizer = load_tokenizer(source.folder)
    computed = pick_dtype(dtype, load_config(source.folder), Checkpoint(source.folder))
    with quiet_transformers():
        return tokenizer, load_whole(source.folder, dtype=computed)


def examples(questions: Sequence[Question]) -> list[Example]:
    """Return each item's prompt with the right answer; only the answer's tokens have labels."""
    examples = []
    for item, rows in questions:
        row = rows[item.right]
        labels = [IGNORED] * row.start + list(row.tokens[row.start :])
        examples.append({"input_ids": list(row.tokens), "labels": labels})
    return examples


def collate(batch: Sequence[Example], pad: int) -> dict[str, Tensor]:
    """Return examples as a batch, padded on the right: tokens, mask and labels, [B, S] each."""
    tokens, mask = padded([example["input_ids"] for example in batch], pad)
    labels, _ = padded([example["labels"] for example in batch], IGNORED)
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


@frozen
class Representations:
    """Points of each expert, [E, T, 2], and the silhouette of all unprojected outputs grouped by
    expert, -1 to 1."""

    points: tuple[tuple[tuple[float, float], ...], ...]
    silhouette: float


def project(outputs: Tensor, projection: Projection) -> Representations | None:
    """Project outputs [T, E, D] by scikit-learn; None for fewer than two tokens or experts, or all
    zeros."""
    from sklearn.decomposition import PCA
    from sklearn.manifold import TSNE
    from sklearn.metrics import silhouette_score

    if min(outputs.shape) < 2 or not outputs.any():
        return None
    tokens, experts, features = outputs.shape
    rows = outputs.transpose(0, 1).reshape(-1, features).double().numpy()
    if projection == "tsne":
        method = TSNE(
            2, perplexity=min(PERPLEXITY, (len(rows) - 1) / 3), init="pca", random_state=0
        )
    else:
        method = PCA(2, svd_solver="full")
    experts_of_rows = np.repeat(np.arange(experts), tokens)
    silhouette = float(silhouette_score(rows, experts_of_rows))
    by_expert = method.fit_transform(rows).reshape(experts, tokens, 2).tolist()
    return Representations(tuple(tuple(map(tuple, pairs)) for pairs in by_expert), silhouette)


Matrix = tuple[tuple[float, ...], ...]


@frozen
class TaskResult(TaskScore):
    """The score of one task, and the experts' workload and similarity on its prompts and right
    answers."""

    # [L, E], share of the activations that an expert of a layer has; each row adds up to 1
    workload: Matrix = ()
    similarity: Matrix = ()  # [E, E], mean cosine of two experts' outputs over tokens and layers
    representations: Representations | None = None  # of one layer

    @property
    def shares(self) -> tuple[float, ...]:
        """The workload as a mean over layers, [E]."""
        return tuple(np.mean(self.workload, axis=0).tolist())

    @property
    def mean_cosine(self) -> float:
        """The mean of the cosines between different experts; 0 of a single one."""
        cosines = np.array(self.similarity)
        count = len(cosines)
        return float(cosines.sum() - cosines.trace()) / (count * (count - 1)) if count > 1 else 0.0


class ExpertUse:
    """Sums over the tokens of one task, for workload and similarity, and a sample of one layer's
    outputs."""

    def __init__(self, layers: int, experts: int, sampled_layer: int) -> None:
        self.sampled_layer = sampled_layer
        self.outputs = torch.zeros(0)  # of that layer's experts for the sampled tokens
        self._ranks = torch.zeros(0)
        self._generator = torch.Generator().manual_seed(0)
        self.tokens = torch.zeros(layers, dtype=torch.float64)
        self.activations = torch.zeros(layers, experts, dtype=torch.float64)  # [L, E]
        self.cosines = torch.zeros(layers, experts, experts, dtype=torch.float64)

    def add(self, layers: Iterable[LoraExperts], mask: Tensor) -> None:
        """Add the tokens of a mask [B, S] that watched layers have just seen."""
        for number, layer in enumerate(layers):
            for call in layer.watched or ():
                indices = call.counted(mask).to(call.inner.device)
                outputs = unit(layer.outputs(call, indices))
                chosen = call.chosen[indices].flatten().bincount(minlength=outputs.shape[1])
                self.cosines[number] += torch.einsum("tid,tjd->ij", outputs, outputs).cpu().double()
                self.activations[number] += chosen.cpu()
                self.tokens[number] += len(indices)
                if number == self.sampled_layer:
                    self.sample(outputs)

    def sample(self, outputs: Tensor) -> None:
        """Add tokens' outputs, [T, E, D], at unit length, of which each token is as likely to be
        kept as any other."""
        ranks = torch.rand(len(outputs), generator=self._generator)
        ranks, chosen = ranks.topk(min(SAMPLED, len(ranks)), largest=False)
        together = outputs[chosen.to(outputs.device)].cpu()
        if len(self._ranks):
            together = torch.cat((self.outputs, together))
            ranks = torch.cat((self._ranks, ranks))
        self._ranks, kept = ranks.topk(min(SAMPLED, len(ranks)), largest=False)
        self.outputs = together[kept]


def evaluate(
    model: Any,
    tokenizer: Any,
    items: Sequence[Item],
    *,
    projection: Projection = "pca",
    scatter_layer: str | None = None,
    **options: Any,
) -> tuple[TaskResult, ...]:
    """Ask items as `compressor.answers.asking.ask` does; a model without experts has no workload,
    no similarity.

    The outputs of the experts of one layer, the last by default, are projected.
    """
    layers = comoe_layers(model)
    experts = max((len(layer.router) for layer in layers.values()), default=0)
    sampled_layer = len(layers) - 1 if scatter_layer is None else [*layers].index(scatter_layer)
    uses = defaultdict[str, ExpertUse](partial(ExpertUse, len(layers), experts, sampled_layer))

    def run(task: str, tokens: Tensor, mask: Tensor, answered: Tensor) -> Tensor:
        with watching(layers):
            logits = forward(model, tokens, mask)
            uses[task].add(layers.values(), answered)
        return logits

    results = []
    for score in ask(model, tokenizer, items, run=run, **options):
        use = uses[score.task]
        workload = use.activations / use.activations.sum(1, keepdim=True).clamp_min(1)
        similarity = (use.cosines / use.tokens.clamp_min(1).reshape(-1, 1, 1)).mean(0)
        result = TaskResult(
            **asdict(score),
            workload=tuple(map(tuple, workload.tolist())),
            similarity=tuple(map(tuple, similarity.tolist())),
            representations=project(use.outputs, projection),
        )
        results.append(result)
    return tuple(results)


@frozen
class ComoeEvaluation:
    """The results of a model with adapters by task; `base` are those of the model alone, if it was
    asked."""

    model: str
    adapters: str
    experts: int
    top_k: int
    layers: tuple[str, ...]  # with experts beside them
    tasks: tuple[TaskResult, ...]
    base: tuple[TaskResult, ...] = ()
    scatter_layer: str = ""  # whose experts' outputs are projected
    projection: Projection = "pca"
    device: str = ""
    answering: Cost | None = None  # of a batch of generated answers
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
    timed_tokens: int = 0,
    projection: Projection = "pca",
    scatter_layer: str | None = None,
    device: str = "auto",
    dtype: str = "auto",
    revision: str | None = None,
    progress: Progress | None = None,
) -> ComoeEvaluation:
    """Ask a model with adapters the items of lm-eval `tasks` or of the JSONL file `heldout`.

    `with_base` asks the model without adapters, too; `timed_tokens` measures how long a batch of
    answers of so many tokens takes. Raises `CompressionError` for adapters of another model."""
    facts = read_facts(Path(adapters))
    if scatter_layer is not None and scatter_layer not in facts.layers:
        raise CompressionError(
            f"--scatter-layer {scatter_layer} has no experts; name one of {', '.join(facts.layers)}"
        )
    items = items_of(tasks, heldout, limit, include_path, strict, "--heldout")
    source = locate(model, revision, progress)
    target = pick_device(device)
    tokenizer, loaded = load(source, dtype)
    asking = partial(
        evaluate,
        tokenizer=tokenizer,
        items=items,
        batch_size=batch_size,
        strict=strict,
        progress=progress,
    )
    base = asking(loaded.to(target)) if with_base else ()
    tuned = load_adapters(loaded, adapters).to(target)
    results = asking(tuned, projection=projection, scatter_layer=scatter_layer)
    return ComoeEvaluation(
        model=source.label,
        adapters=label(str(adapters)),
        experts=facts.config.experts,
        top_k=facts.config.top_k,
        layers=tuple(facts.layers),
        tasks=results,
        base=base,
        scatter_layer=scatter_layer or [*facts.layers][-1],
        projection=projection,
        device=str(target),
        answering=answering_cost(tuned, tokenizer, items, batch_size, timed_tokens)
        if timed_tokens
        else None,
    )
