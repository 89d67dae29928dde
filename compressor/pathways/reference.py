"""A reference set: items that a model answers right, each with its embedding and its pathway;
built, and as a folder.

n items, D numbers of an embedding, L MoE layers, E experts (and any rows beyond them that a router
scores)."""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import normalize

from compressor.answers.items import (
    Item,
    TokenRow,
    is_greedy,
    item_lines,
    likelihoods,
    positions,
    read_items,
    tokenised,
)
from compressor.answers.tasks import items_of
from compressor.checkpoint.source import locate
from compressor.document.blocks import Block, Table, Text
from compressor.errors import CompressionError, reason_of
from compressor.files import check_folder, lock_output, whole_folder
from compressor.formatting import counted, share
from compressor.frozen import frozen
from compressor.model.opened import OpenModel, open_model
from compressor.model.router_logits import Score
from compressor.model.tokenizer import load_tokenizer
from compressor.pathways.engine import PathwayModel, PlainForward
from compressor.pathways.options import OWN, selected
from compressor.progress import Progress, Silent
from compressor.records import plain_json, read_as, read_json

NAMES = ("reference.json", "reference.safetensors", "items.jsonl")
COLUMNS = ("task", "items", "right", "share")
# tokenised, it distinguishes tokenizers
PROBE = "The quick brown fox jumps over 13 lazy dogs.\n\tÉß 漢字 {}"
REMEDY = "name a folder that `moe-compress reference` has written"


@frozen
class ReferenceFacts:
    """The model of a reference set, and how the set was built."""

    model: str
    fingerprint: str
    tokenizer: str  # digest of its vocabulary and of how it splits text
    experts: int
    layers: tuple[str, ...]  # names of the MoE layers
    scores: tuple[Score, ...]  # how each one's router makes weights of logits
    embedding: str  # "own", or the name of a model of sentence-transformers
    asked: int  # items that the model was asked, right or wrong
    format: Literal["moe-compressor-reference/1"] = "moe-compressor-reference/1"


@dataclass(frozen=True)
class ReferenceSet:
    """Items that the model answers right, with their embeddings and pathways."""

    facts: ReferenceFacts
    items: tuple[Item, ...]
    embeddings: Tensor  # [n, D] float32
    pathways: Tensor  # [n, L, E] float32, the weights over all experts at the last prompt token

    def neighbours(
        self, embedding: Tensor, count: int, radius: float | None = None, but: str | None = None
    ) -> tuple[list[int], Tensor, Tensor]:
        """Return the indices of the nearest items, nearest first, and the embeddings of query [D]
        and items [k, D].

        Embeddings are brought to length one, so that distances go from 0 to 2. With a `radius` all
        items within it are neighbours, which may be none. Items whose prompt is `but` are left out:
        they would give an answer away."""
        query = normalize(embedding, dim=0)
        points = normalize(self.embeddings)
        # of differences, so that equal embeddings are equally far away, and the first comes first
        distances = torch.linalg.vector_norm(points.double() - query.double(), dim=1)
        nearest = list[int]()
        for index in distances.argsort(stable=True).tolist():
            is_near = len(nearest) < count if radius is None else distances[index] <= radius
            if is_near and self.items[index].prompt != but:
                nearest.append(index)
        return nearest, query, points[nearest]

    def check(self, model: OpenModel, tokenizer: Any) -> None:
        """Refuse another model than this set's, or another tokenizer."""
        label = model.source.label
        digest = tokenizer_digest(tokenizer)
        if self.facts.fingerprint != model.fingerprint or self.facts.tokenizer != digest:
            raise CompressionError(
                f"the reference set is of another model ({self.facts.model}) or tokenizer than "
                f"{label}; make one with `moe-compress reference {label}`"
            )


def tokenizer_digest(tokenizer: Any) -> str:
    """Return the SHA-256 of a tokenizer's vocabulary and of the tokens of a probe."""
    facts = [sorted(tokenizer.get_vocab().items()), list(tokenizer.encode(PROBE))]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def write_reference(reference: ReferenceSet, folder: Path, overwrite: bool) -> list[Path]:
    """Write the set into a new folder, all of it or, when anything fails, nothing."""
    with whole_folder(folder, NAMES, overwrite) as scratch:
        content = json.dumps(plain_json(reference.facts), indent=2)
        (scratch / NAMES[0]).write_text(content + "\n", encoding="utf-8")
        tensors = {
            "embeddings": reference.embeddings.contiguous(),
            "pathways": reference.pathways.contiguous(),
        }
        save_file(tensors, scratch / NAMES[1])
        (scratch / NAMES[2]).write_text(item_lines(reference.items), encoding="utf-8")
    return [folder / name for name in NAMES]


def read_reference(folder: Path, embedding: str = OWN) -> ReferenceSet:
    """Read a reference set; raises `CompressionError` for one that is broken, or embedded by
    another model.

    A file shall not choose what is downloaded, so the `embedding` is named by whoever reads it.
    """
    path = folder / NAMES[0]
    facts = read_as(ReferenceFacts, read_json(path, REMEDY, REMEDY), f"{path}: ")
    if facts.embedding != embedding:
        raise CompressionError(
            f"the prompts of the reference set are embedded by {facts.embedding!r}, not "
            f"{embedding!r}; pass {facts.embedding} as the embedding if you trust that model, or "
            "make the reference set again"
        )
    items = tuple(read_items(folder / NAMES[2], strict=True))
    tensors = load_file(folder / NAMES[1])
    embeddings = tensors["embeddings"]
    pathways = tensors["pathways"]
    fits = len(embeddings) == len(items) and pathways.shape[:2] == (len(items), len(facts.scores))
    if not fits or not bool(embeddings.isfinite().all()):
        raise CompressionError(
            f"{folder / NAMES[1]} does not fit the files beside it; make the reference set again"
        )
    return ReferenceSet(facts, items, embeddings, pathways)


Embedder = Callable[[Item, TokenRow], Tensor]  # an item and its tokens -> [D], float32 on the CPU


def embedder(name: str, model: PathwayModel, trust_remote_code: bool = False) -> Embedder:
    """Embed prompts by the loaded model's own embeddings (their mean [H]), or by a model of
    sentence-transformers.

    The code of that model's repository is run if it is trusted. Raises `CompressionError` where
    that is not installed or knows no such model."""
    if name == OWN:

        @torch.no_grad()
        def mean(item: Item, row: TokenRow) -> Tensor:
            weight: Tensor = model.model.get_input_embeddings().weight
            prompt = torch.tensor(row.tokens[: row.start], device=weight.device)
            return weight[prompt].float().mean(0).cpu()

        return mean
    try:
        from sentence_transformers import SentenceTransformer

        sentences: Any = SentenceTransformer(name, trust_remote_code=trust_remote_code)
    except Exception as error:  # its loaders raise what they like
        raise CompressionError(
            f"--embedding {name} cannot be loaded ({reason_of(error)}); install "
            "sentence-transformers with `pip install sentence-transformers` and name one of its "
            "models, or leave --embedding out; if it brings code that you trust, add "
            "--trust-remote-code"
        ) from error

    def embed(item: Item, row: TokenRow) -> Tensor:
        vector = torch.as_tensor(sentences.encode(item.prompt), dtype=torch.float32)
        return vector.flatten().cpu()

    return embed


@frozen
class TaskAccuracy:
    """Items of a task, and the number that the model answers right."""

    task: str
    items: int
    right: int


@dataclass(frozen=True, slots=True)
class ReferenceSummary:
    """The content of a reference set, and its files."""

    facts: ReferenceFacts
    kept: int  # items that the model answers right
    asked: tuple[TaskAccuracy, ...]  # for each task
    files: tuple[Path, ...]


def answers_right(item: Item, plain: PlainForward) -> bool:
    """Return True if the right answer is the most probable choice; without choices, if it is
    greedy."""
    if not item.choices:
        return is_greedy(plain.logits, plain.rows[0])
    return int(likelihoods(plain.logits, plain.rows).argmax()) == item.right


def build_reference(
    opened: OpenModel,
    items: Sequence[Item],
    embedding: str,
    progress: Progress,
    keep_all: bool = False,
    strict: bool = False,
    trust_remote_code: bool = False,
) -> tuple[ReferenceSet, tuple[TaskAccuracy, ...]]:
    """Keep the items that the model answers right, or all of them, and count those of each task.

    Items without tokens are left out, or refused if `strict`. Raises `CompressionError` where no
    item is kept."""
    tokenizer = load_tokenizer(opened.source.folder)
    questions = tokenised(items, tokenizer, opened.vocabulary, positions(opened.config), strict)
    model = PathwayModel(opened, selected(1, len(opened.architecture.layers)))
    progress.start(f"Loading {opened.source.label}", 1)
    model.load()
    embed = embedder(embedding, model, trust_remote_code)
    progress.advance("")
    progress.start("Asking", len(questions))
    right_items = list[Item]()
    embeddings = list[Tensor]()
    pathways = list[Tensor]()
    results: dict[str, list[bool]] = {}  # by task
    for item, rows in questions:
        plain = model.run(rows)
        is_right = keep_all or answers_right(item, plain)
        results.setdefault(item.task, []).append(is_right)
        if is_right:
            if item.contexts:
                plain = model.run([rows[item.right]])
            right_items.append(item)
            embeddings.append(embed(item, plain.rows[0]))
            pathways.append(plain.pathway)
        progress.advance(item.task)
    if not right_items:
        raise CompressionError(
            f"{opened.source.label} answers none of {len(questions)} items right, so there is "
            "nothing to learn from; give it easier items, or more of them"
        )
    facts = ReferenceFacts(
        model=opened.source.label,
        fingerprint=opened.fingerprint,
        tokenizer=tokenizer_digest(tokenizer),
        experts=opened.architecture.experts,
        layers=tuple(layer.name for layer in opened.architecture.layers),
        scores=model.scores,
        embedding=embedding,
        asked=len(questions),
    )
    tensors = torch.stack(embeddings), torch.stack(pathways)
    asked = tuple(TaskAccuracy(task, len(right), sum(right)) for task, right in results.items())
    return ReferenceSet(facts, tuple(right_items), *tensors), asked


def reference(
    model: str,
    output: str | Path,
    *,
    tasks: Sequence[str] = (),
    calibration: str | Path | None = None,
    limit: int | None = None,
    include_path: str | Path | None = None,
    strict: bool = False,
    embedding: str = OWN,
    trust_remote_code: bool = False,
    device: str = "auto",
    dtype: str = "auto",
    revision: str | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> ReferenceSummary:
    """Write the items that a model answers right, with embeddings and pathways, into the folder
    `output`.

    Items are those of lm-eval `tasks` (multiple choice; the first `limit` of each), or the lines of
    the JSONL file `calibration` with `prompt`, `answer` and, of multiple choice, `choices`. Those
    that can't be asked are left out, or refused if `strict`. Code of the `embedding` model's
    repository is run if `trust_remote_code`. The whole model is read into memory. Raises
    `CompressionError` where no item is answered right, or the model's late layers cannot be run by
    themselves."""
    folder = Path(output)
    check_folder(folder, NAMES, overwrite)
    with lock_output(folder):
        items = items_of(tasks, calibration, limit, include_path, strict)
        opened = open_model(locate(model, revision, progress), dtype, device)
        reference_set, asked = build_reference(
            opened,
            items,
            embedding,
            progress or Silent(),
            strict=strict,
            trust_remote_code=trust_remote_code,
        )
        files = write_reference(reference_set, folder, overwrite)
    return ReferenceSummary(reference_set.facts, len(reference_set.items), asked, tuple(files))


def reference_blocks(facts: ReferenceFacts, asked: Sequence[TaskAccuracy]) -> tuple[Block, ...]:
    """Return a table of the items of each task and of those answered right, and how they are
    kept."""
    rows = []
    for task in asked:
        right = share(task.right, task.items)
        rows.append((task.task or "-", f"{task.items:,}", f"{task.right:,}", right))
    how = facts.embedding
    if how == OWN:
        how = "the mean of the model's own token embeddings"
    sentence = (
        f"Each is kept with its pathway through {counted(len(facts.layers), 'MoE layer')} of "
        f"{facts.experts} experts, and embedded by {how}."
    )
    return Table(f"Items that {facts.model} answers right", COLUMNS, rows), Text(sentence)
