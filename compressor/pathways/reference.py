"""A reference set: items that a model answers right, each with its embedding and its pathway; made, and as a folder.

n items, D numbers of an embedding, L MoE layers, E experts (and any rows beyond them that a router scores).
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import normalize

from compressor.checkpoint.reader import read_header
from compressor.document.blocks import Block, Table, Text
from compressor.errors import CompressionError, reason_of
from compressor.evaluation.items import Item, Row, is_greedy, item_lines, likelihoods, positions, read_items, tokenised
from compressor.files import file_digest, whole_folder
from compressor.formatting import counted, share
from compressor.model.opened import OpenModel
from compressor.model.router_logits import Score
from compressor.model.tokenizer import load_tokenizer
from compressor.pathways.engine import PathwayModel, Plain
from compressor.pathways.options import OWN, Routing
from compressor.progress import Progress
from compressor.records import RESTORE, plain_json, read_as, read_json

NAMES = ("reference.json", "reference.safetensors", "items.jsonl")
COLUMNS = ("task", "items", "right", "share")
PROBE = "The quick brown fox jumps over 13 lazy dogs.\n\tÉß 漢字 {}"  # tokenised, it tells tokenizers apart


@dataclass(frozen=True, slots=True)
class ReferenceFacts:
    """What a reference set is of."""

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
    """Items that the model answers right, with what neighbours are found by and what is learnt of them."""

    facts: ReferenceFacts
    items: tuple[Item, ...]
    embeddings: Tensor  # [n, D] float32
    pathways: Tensor  # [n, L, E] float32, the weights over all experts at the last prompt token

    @cached_property
    def _unit(self) -> Tensor:
        return normalize(self.embeddings)

    def neighbours(
        self, embedding: Tensor, count: int, radius: float | None = None, but: str | None = None
    ) -> tuple[list[int], Tensor, Tensor]:
        """The nearest items, nearest first: their places, and the embeddings of the query [D] and of them [k, D].

        Embeddings are brought to length one, so that distances go from 0 to 2. With a `radius` all items within it
        are neighbours, which may be none. Items whose prompt is `but` are left out: they would give an answer away.
        """
        if embedding.shape != self.embeddings.shape[1:]:
            raise CompressionError(
                f"the item's embedding has {len(embedding)} numbers, those of the reference set {len(self._unit[0])}; "
                f"embed with {self.facts.embedding}"
            )
        query = normalize(embedding, dim=0)
        distances = (self._unit.double() - query).norm(dim=1)
        nearest = [at for at in distances.argsort(stable=True).tolist() if self.items[at].prompt != but]
        found = nearest[:count] if radius is None else [at for at in nearest if distances[at] <= radius]
        return found, query, self._unit[found]

    def check(self, model: OpenModel, tokenizer: Any) -> None:
        facts, label, experts = self.facts, model.source.label, model.architecture.experts
        layers = tuple(layer.name for layer in model.architecture.layers)
        if facts.experts != experts:
            what = f"is of a model with {facts.experts} experts a layer, {label} has {experts}"
        elif facts.fingerprint != model.fingerprint or facts.layers != layers:
            what = f"is of another model ({facts.model}) than {label}"
        elif facts.tokenizer != tokenizer_digest(tokenizer):
            what = f"was made with another tokenizer than that of {label}"
        else:
            return
        raise CompressionError(f"the reference set {what}; make one with `moe-compress reference {label}`")


def tokenizer_digest(tokenizer: Any) -> str:
    """SHA-256 of a tokenizer's vocabulary and of what it makes of a text."""
    facts = [sorted(tokenizer.get_vocab().items()), list(tokenizer.encode(PROBE))]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def write_reference(made: ReferenceSet, folder: Path, overwrite: bool) -> list[Path]:
    """Write the set into a new folder, all of it or, when anything fails, nothing."""
    with whole_folder(folder, NAMES, overwrite) as place:
        content = json.dumps(plain_json(made.facts), indent=2)  # escaped: a name may hold half a character
        (place / NAMES[0]).write_text(content + "\n", encoding="utf-8")
        tensors = {"embeddings": made.embeddings.contiguous(), "pathways": made.pathways.contiguous()}
        save_file(tensors, place / NAMES[1])
        (place / NAMES[2]).write_text(item_lines(made.items), encoding="utf-8")
    return [folder / name for name in NAMES]


def read_reference(folder: Path) -> ReferenceSet:
    """Read a reference set back; raises `CompressionError` naming the file that is no part of one."""
    for name in NAMES:
        if not (folder / name).is_file():
            raise CompressionError(f"{folder} holds no {name}; name a folder that `moe-compress reference` has written")
    where = str(folder / NAMES[0])
    facts = read_as(ReferenceFacts, read_json(folder / NAMES[0], RESTORE, RESTORE), where)
    if facts.experts < 1 or not facts.layers or len(facts.scores) != len(facts.layers):
        raise CompressionError(f"{where} names no layers with experts and scores; {RESTORE}")
    items = tuple(read_items(folder / NAMES[2], strict=True))
    path, layers = folder / NAMES[1], len(facts.layers)
    header = read_header(path)
    shapes = {name: info.shape for name, info in header.items() if info.dtype == "F32"}
    embedded, routed = shapes.get("embeddings", ()), shapes.get("pathways", ())
    fits = len(header) == 2 and len(embedded) == 2 and embedded[0] == len(items) and embedded[1] > 0
    if not (fits and len(routed) == 3 and routed[:2] == (len(items), layers) and routed[2] >= facts.experts):
        raise CompressionError(f"{path} does not fit the files beside it; make the reference set again")
    tensors = load_file(path)
    embeddings, pathways = tensors["embeddings"], tensors["pathways"]
    if not bool(embeddings.isfinite().all() and pathways.isfinite().all() and (pathways >= 0).all()):
        raise CompressionError(f"{path} holds numbers that are no embeddings or weights; make the reference set again")
    return ReferenceSet(facts, items, embeddings, pathways)


def trusted_reference(routing: Routing) -> ReferenceSet:
    """The reference set of a routing, refused if its prompts are embedded by another model than the routing names."""
    reference = read_reference(Path(routing.reference))
    if (embedding := reference.facts.embedding) != routing.embedding:
        raise CompressionError(
            f"the prompts of the reference set are embedded by {embedding!r}, not {routing.embedding!r}; pass "
            f"{embedding} as the embedding if you trust that model, or make the reference set again"
        )
    return reference


def reference_digest(folder: Path) -> str:
    """SHA-256 of all that a reference set's files hold."""
    return hashlib.sha256("".join(file_digest(folder / name) for name in NAMES).encode()).hexdigest()


Embedder = Callable[[Item, Row], Tensor]  # an item and its tokens -> [D], float32 on the CPU


def embedder(name: str, model: PathwayModel) -> Embedder:
    """What embeds prompts: the loaded model's own embeddings (their mean [H]), or a model of sentence-transformers.

    Raises `CompressionError` where that is not installed or knows no such model.
    """
    if name == OWN:

        @torch.no_grad()
        def mean(item: Item, row: Row) -> Tensor:
            weight: Tensor = model.model.get_input_embeddings().weight
            return weight[torch.tensor(row.tokens[: row.start], device=weight.device)].float().mean(0).cpu()

        return mean
    try:
        from sentence_transformers import SentenceTransformer

        sentences: Any = SentenceTransformer(name, trust_remote_code=False)
    except Exception as error:  # its loaders raise what they like
        raise CompressionError(
            f"--embedding {name} cannot be loaded ({reason_of(error)}); install sentence-transformers with "
            "`pip install sentence-transformers` and name one of its models, or leave --embedding out"
        ) from error
    return lambda item, row: torch.as_tensor(sentences.encode(item.prompt), dtype=torch.float32).flatten().cpu()


@dataclass(frozen=True, slots=True)
class Asked:
    """How many items of a task a model was asked, and how many it answered right."""

    task: str
    items: int
    right: int


def answers_right(item: Item, plain: Plain) -> bool:
    """Whether the model, run on an item's rows, finds the answer likeliest; without choices, goes on with it."""
    if not item.choices:
        return is_greedy(plain.logits, plain.rows[0])
    return int(likelihoods(plain.logits, plain.rows).argmax()) == item.right


def build_reference(
    opened: OpenModel,
    items: Sequence[Item],
    embedding: str,
    progress: Progress,
    keep: Callable[[Item, Plain], bool] = answers_right,
    strict: bool = False,
) -> tuple[ReferenceSet, tuple[Asked, ...]]:
    """The items that the model answers right, or those to `keep`, and a count for each task.

    Items without tokens are left out, or refused if `strict`. Raises `CompressionError` where no item is kept.
    """
    tokenizer = load_tokenizer(opened.source.folder)
    questions = tokenised(items, tokenizer, opened.vocabulary, positions(opened.config), strict)
    model = PathwayModel(opened, late=1)
    progress.start(f"Loading {opened.source.label}", 1)
    model.load()
    embed = embedder(embedding, model)
    progress.advance("")
    progress.start("Asking", len(questions))
    kept = list[tuple[Item, Tensor, Tensor]]()
    marks: dict[str, list[bool]] = {}  # by task
    for item, own in questions:
        plain = model.run(own)
        right = keep(item, plain)
        marks.setdefault(item.task, []).append(right)
        if right:
            kept.append((item, embed(item, own[0]), plain.pathway))
        progress.advance(item.task)
    if not kept:
        raise CompressionError(
            f"{opened.source.label} answers none of {len(questions)} items right, so there is nothing to learn from; "
            "give it easier items, or more of them"
        )
    learnt, embeddings, pathways = zip(*kept, strict=True)
    facts = ReferenceFacts(
        opened.source.label,
        opened.fingerprint,
        tokenizer_digest(tokenizer),
        opened.architecture.experts,
        tuple(layer.name for layer in opened.architecture.layers),
        model.scores,
        embedding,
        len(questions),
    )
    reference = ReferenceSet(facts, learnt, torch.stack(embeddings), torch.stack(pathways))
    return reference, tuple(Asked(task, len(each), sum(each)) for task, each in marks.items())


def reference_blocks(facts: ReferenceFacts, asked: Sequence[Asked]) -> tuple[Block, ...]:
    """What the model was asked and answered right, by task, and what is kept of it."""
    rows = tuple(
        (each.task or "-", f"{each.items:,}", f"{each.right:,}", share(each.right, each.items)) for each in asked
    )
    how = "the mean of the model's own token embeddings" if facts.embedding == OWN else facts.embedding
    return (
        Table(f"Items that {facts.model} answers right", COLUMNS, rows),
        Text(
            f"Each is kept with its pathway through {counted(len(facts.layers), 'MoE layer')} of {facts.experts} "
            f"experts, and embedded by {how}."
        ),
    )
