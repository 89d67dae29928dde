"""Sources of calibration text: their weights, names, documents and tokens.

A source is a text or JSONL file, a `datasets` id, which is streamed, or the demo.
"""

import json
import math
import os
import random
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compressor.demo.evaluation import load_documents
from compressor.errors import CompressionError, faults_told, first_line, reason_of
from compressor.model.tokenizer import no_token, says_something
from compressor.words import distinct

DEFAULT_SOURCE = "allenai/c4"  # the papers' choice; its config "en" is used
DEMO_SOURCE = "demo"
OPTIONS = {"calibration": "--calibration", "evaluation": "--evaluate"}  # by what a source is for
DATA_SET_ID = re.compile(r"\w[\w.-]*/[\w.-]+(:[\w.-]+)?")
TEXT_SUFFIXES = (".jsonl", ".json", ".txt", ".text", ".md")
PATIENCE = 100_000  # characters without a token, after which a tokenizer counts as one that has none
REMEDIES = ("split it up", "restore the tokenizer from its source or mend the text")
SHUFFLE_BUFFER = 10_000  # documents of a streamed data set that are shuffled together


@dataclass(frozen=True, slots=True)
class WeightedSource:
    """A text or JSONL file, a data set id or the demo, and its share of the sequences (relative to the others')."""

    source: str
    weight: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.weight) and self.weight > 0):
            raise CompressionError(
                f"calibration source {self.source!r} has weight {self.weight}; give a positive number"
            )


def is_file(source: str) -> bool:
    """Whether a source is a file here, whatever its name; a name too long for one is a data set's, if anything's."""
    return os.path.isfile(source)


def parse_sources(arguments: Sequence[str]) -> tuple[WeightedSource, ...]:
    """`SOURCE` or `SOURCE=WEIGHT` each: the sources with weights that sum to 1, equal ones if none is given."""
    if not arguments:
        raise CompressionError("no calibration source is given; name a text or JSONL file, a data set id, or 'demo'")
    pairs = [_split_weight(argument) for argument in arguments]
    bare = [source for source, weight in pairs if weight is None]
    if bare and len(bare) < len(pairs):
        raise CompressionError(
            f"calibration source {bare[0]!r} has no weight but others have; write SOURCE=WEIGHT for all or for none"
        )
    places = [Path(source).resolve() if is_file(source) else source for source, _ in pairs]
    for number, (source, _) in enumerate(pairs):
        if places[number] in places[:number]:
            raise CompressionError(f"calibration source {source!r} is given twice; name it once, with a larger weight")
    weighted = [WeightedSource(source, 1.0 if weight is None else weight) for source, weight in pairs]
    return tuple(WeightedSource(entry.source, share) for entry, share in zip(weighted, shares(weighted), strict=True))


def _split_weight(argument: str) -> tuple[str, float | None]:
    source, sign, number = argument.rpartition("=")
    try:
        weight = float(number)
    except ValueError:
        return argument, None
    if not sign or is_file(argument):
        return argument, None
    if not source:
        raise CompressionError(f"calibration {argument!r} names no source before its weight; write SOURCE=WEIGHT")
    return source, weight


def shares(sources: Sequence[WeightedSource]) -> tuple[float, ...]:
    """The weights, made to sum to 1."""
    whole = sum(Fraction(entry.weight) for entry in sources)  # exact: huge weights do not overflow
    return tuple(float(Fraction(entry.weight) / whole) for entry in sources)


def divide(total: int, weights: Sequence[float]) -> tuple[int, ...]:
    """Whole numbers in proportion to the weights that sum to `total`, each at least 1: largest remainders.

    What is due less than 1 gets 1, and the others share the rest; ties go to the lower index. Needs total >= number.
    """
    exact = [Fraction(weight) for weight in weights]
    due, raised = [Fraction(0)] * len(exact), set[int]()
    while True:
        free = [number for number in range(len(exact)) if number not in raised]
        rest, whole = total - len(raised), sum(exact[number] for number in free)
        for number in free:
            due[number] = rest * exact[number] / whole
        small = {number for number in free if due[number] < 1}
        if not small:
            break
        raised |= small
    counts = [1 if number in raised else math.floor(share) for number, share in enumerate(due)]
    for number in sorted(free, key=lambda number: counts[number] - due[number])[: total - sum(counts)]:
        counts[number] += 1
    return tuple(counts)


def short_names(sources: Sequence[str]) -> tuple[str, ...]:
    """A file's name without folder and suffix, or the source itself; numbered where two would be equal."""
    return tuple(distinct(Path(source).stem if is_file(source) else source for source in sources))


def without_folders(identity: Mapping[str, Any]) -> dict[str, Any]:
    """The identity with file names in place of paths; it may be a hand-edited one."""
    stored = identity.get("sources")
    entries = [dict(entry) for entry in stored if isinstance(entry, dict)] if isinstance(stored, list) else []
    for entry in entries:
        entry["source"] = _plain_name(str(entry.get("source")))
    joined = " + ".join(entry["source"] for entry in entries) or Path(identity["source"]).name
    return {**identity, "source": joined, **({"sources": entries} if "sources" in identity else {})}


def _plain_name(source: str) -> str:
    """A file's name without its folders; the id of a data set has none. A file that is gone is known by its suffix."""
    is_id = DATA_SET_ID.fullmatch(source) and not is_file(source) and Path(source).suffix not in TEXT_SUFFIXES
    return source if is_id else Path(source).name


def _document(entry: Any, tokenizer: Any, where: str) -> str:
    if not isinstance(entry, dict):
        raise CompressionError(f"{where}: each line should be a JSON object with 'text' or 'messages'")
    if isinstance(entry.get("text"), str):
        return _whole(entry["text"], where)
    if isinstance(entry.get("messages"), list):
        if not getattr(tokenizer, "chat_template", None):
            raise CompressionError(
                f"{where} has 'messages', but the tokenizer has no chat template; give it lines with 'text'"
            )
        try:
            templated = str(tokenizer.apply_chat_template(entry["messages"], tokenize=False))
        except Exception as error:  # a template raises what it likes
            raise CompressionError(
                f"{where}: the chat template cannot take these messages ({reason_of(error)}); mend or remove them"
            ) from error
        return _whole(templated, where)
    raise CompressionError(f"{where} has neither 'text' nor 'messages'; rename the field that holds the text")


def _whole(text: str, where: str) -> str:
    """The text, refused if it holds half of a character, which JSON can write and no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise CompressionError(f"{where} has {text[error.start]!r}, half a character; mend or remove it") from error
    return text


def _file_documents(path: Path, tokenizer: Any, purpose: str) -> list[str]:
    """Documents of a JSONL file, or of a text file whose documents are separated by blank lines."""
    try:
        content = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise CompressionError(
            f"{path} is not UTF-8 text ({error.reason} at byte {error.start}); convert it first"
        ) from error
    except OSError as error:
        raise CompressionError(f"{purpose} file {path} cannot be read: {error.strerror}") from error
    if path.suffix not in (".jsonl", ".json"):
        return [part.strip("\n") + "\n" for part in content.split("\n\n") if part.strip()]
    documents = []
    for number, line in enumerate(content.split("\n"), start=1):  # not splitlines: JSON text may hold U+2028
        if line.strip():
            try:
                entry = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise CompressionError(
                    f"{path}, line {number} is not valid JSON ({error}); mend or remove it"
                ) from error
            documents.append(_document(entry, tokenizer, f"{path}, line {number}"))
    return [document for document in documents if document.strip()]


def _dataset_documents(source: str, seed: int, tokenizer: Any, purpose: str) -> Iterator[str]:
    """Documents of a `datasets` id, streamed; `id:config` names a configuration."""
    import datasets

    name, _, config = source.partition(":")
    if source == DEFAULT_SOURCE:
        config = "en"
    try:
        stream = datasets.load_dataset(name, config or None, split="train", streaming=True)
        for entry in stream.shuffle(seed=seed, buffer_size=SHUFFLE_BUFFER):
            yield _document(entry, tokenizer, f"data set {source}")
    except CompressionError:
        raise
    except Exception as error:
        raise CompressionError(
            f"{purpose} data {source!r} is no file, and cannot be read as a data set ({first_line(error)}); "
            f"pass {OPTIONS[purpose]} with a text or JSONL file, a data set id, or 'demo'"
        ) from error


def documents(source: str, seed: int, tokenizer: Any, purpose: str = "calibration") -> Iterable[str]:
    """Documents of a file, a data set or the demo in the order of the seed; a data set is read as they are taken."""
    path = Path(source)
    if source == DEMO_SOURCE and not os.path.exists(source):
        found = [text for text, _ in load_documents("heldout" if purpose == "evaluation" else "calibration")]
    elif is_file(source):
        found = _file_documents(path, tokenizer, purpose)
    elif os.path.isdir(path):
        raise CompressionError(
            f"{purpose} {source or '.'} is a folder; name a text or JSONL file in it, or a data set id"
        )
    elif path.suffix in (".txt", ".jsonl", ".json"):
        raise CompressionError(
            f"{purpose} file {source} does not exist; name a text or JSONL file, a data set id, or 'demo'"
        )
    else:
        return _dataset_documents(source, seed, tokenizer, purpose)
    if not found:
        raise CompressionError(f"{purpose} file {source} is empty; give it some text")
    random.Random(seed).shuffle(found)
    return found


def pack(documents: Iterable[str], tokenizer: Any, samples: int, length: int) -> Tensor:
    """Token ids of the documents, each ended by the end-of-text token, as one row of at most samples * length ids.

    Raises `CompressionError` where the tokenizer has no token for any of the text.
    """
    separator = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
    wanted, ids, silent = samples * length, list[int](), 0  # characters before the first token that stands for some
    heard = False
    for document in documents:
        own = tokenizer(document, add_special_tokens=False)["input_ids"]
        heard, silent = heard or says_something(tokenizer, own), silent + len(document.strip())
        ids += own + separator
        if len(ids) >= wanted or (not heard and silent > PATIENCE):
            break
    if silent and not heard:
        raise no_token("the text")
    return torch.tensor(ids[:wanted], dtype=torch.long)


def as_rows(ids: Tensor, length: int) -> Tensor:
    """[T] -> [n, length], leaving out what does not fill a sequence; [1, T] if there is nothing else."""
    whole = ids.numel() // length
    return ids[: whole * length].view(whole, length) if whole else ids[None]


def read_rows(
    source: str, tokenizer: Any, samples: int, length: int, seed: int, vocab: int, purpose: str = "calibration"
) -> Tensor:
    """Sequences [n, L] of a source: as many as asked for, or as there are, a single shorter one at the least."""
    previous, tokenizer.model_max_length = tokenizer.model_max_length, 10**30  # packed text is long: no warning
    try:
        with faults_told(f"the tokenizer cannot take {purpose} data {source}", *REMEDIES):
            ids = pack(documents(source, seed, tokenizer, purpose), tokenizer, samples, length)
    finally:
        tokenizer.model_max_length = previous
    if ids.numel() < 2:
        raise CompressionError(f"{purpose} data {source} gives {ids.numel()} tokens; give it more text")
    if int(ids.max()) >= vocab:
        raise CompressionError(
            f"the tokenizer makes token {int(ids.max())}, the model knows {vocab}; they do not belong together"
        )
    return as_rows(ids, length)
