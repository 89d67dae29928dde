"""From a source to documents, and from documents to rows of tokens: no more is tokenised than is asked for."""

import json
import os
import random
from collections.abc import Iterable, Iterator
from io import TextIOWrapper
from itertools import groupby
from os.path import isfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compressor.data.demo import load_documents
from compressor.data.sources import DEFAULT_SOURCE, DEMO_SOURCE
from compressor.errors import CompressionError, first_line, reason_of, wrap_faults
from compressor.model.tokenizer import first_tokens, has_chat_template, no_token, render_chat, says_something
from compressor.progress import quiet_transformers

OPTIONS = {"calibration": "--calibration", "evaluation": "--evaluate"}  # by what a source is for
PATIENCE = 100_000  # characters without a token, after which a tokenizer counts as one that has none
MOST_LETTERS = 2**27  # of a document, or of the line that holds one
REMEDIES = ("split it up", "restore the tokenizer from its source or mend the text")
SHUFFLE_BUFFER = 10_000  # documents of a streamed data set that are shuffled together


def _document(entry: Any, tokenizer: Any, where: str) -> str:
    """The text of an entry, refused if it holds half of a character, which JSON can write and no tokenizer takes."""
    if not isinstance(entry, dict):
        raise CompressionError(f"{where}: each line should be a JSON object with 'text' or 'messages'")
    if isinstance(entry.get("text"), str):
        text: str = entry["text"]
    elif not isinstance(entry.get("messages"), list):
        raise CompressionError(f"{where} has neither 'text' nor 'messages'; rename the field that holds the text")
    elif not has_chat_template(tokenizer):
        raise CompressionError(
            f"{where} has 'messages', but the tokenizer has no chat template; give it lines with 'text'"
        )
    else:
        try:
            text = render_chat(tokenizer, entry["messages"])
        except Exception as error:  # a template raises what it likes
            raise CompressionError(
                f"{where}: the chat template cannot take these messages ({reason_of(error)}); mend or remove them, or "
                "give lines with 'text'"
            ) from error
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise CompressionError(f"{where} has {text[error.start]!r}, half a character; mend or remove it") from error
    return text


def _bounded(text: str, where: str) -> str:
    if len(text) > MOST_LETTERS:
        raise CompressionError(f"{where} has more than {MOST_LETTERS:,} letters; {REMEDIES[0]}")
    return text


def _lines(path: Path, purpose: str) -> Iterator[tuple[int, str]]:
    """Each line of a file after its number."""
    try:
        with path.open("rb") as raw, TextIOWrapper(raw, encoding="utf-8-sig") as stream:
            try:
                for number, line in enumerate(iter(lambda: stream.readline(MOST_LETTERS + 1), ""), 1):
                    yield number, _bounded(line, f"{path}, line {number}")
            except UnicodeDecodeError as error:
                place = raw.tell() - len(error.object) + error.start  # in the file: the part read ends there
                raise CompressionError(
                    f"{path} is not UTF-8 text ({error.reason} at byte {place}); convert it first"
                ) from error
    except OSError as error:
        raise CompressionError(f"{purpose} file {path} cannot be read: {error.strerror}") from error


def _file_documents(path: Path, tokenizer: Any, purpose: str) -> Iterator[str]:
    """Documents of a JSONL file, or of a text file whose documents are separated by blank lines."""
    lines = _lines(path, purpose)
    if path.suffix not in (".jsonl", ".json"):
        for blank, paragraph in groupby(lines, lambda numbered: numbered[1] == "\n"):
            if not blank:
                (number, first), *more = paragraph
                text = "".join([first, *(line for _, line in more)])
                yield _bounded(text, f"{path}: the document at line {number}").removesuffix("\n") + "\n"
        return
    for number, line in lines:
        if line.strip():
            where = f"{path}, line {number}"
            try:
                entry = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise CompressionError(f"{where} is not valid JSON ({error}); mend or remove it") from error
            yield _document(entry, tokenizer, where)


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
        texts = [text for text, _ in load_documents("heldout" if purpose == "evaluation" else "calibration")]
    elif isfile(source):
        texts = [text for text in _file_documents(path, tokenizer, purpose) if text.strip()]
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
    if not texts:
        raise CompressionError(f"{purpose} file {source} is empty; give it some text")
    random.Random(seed).shuffle(texts)
    return texts


def pack(documents: Iterable[str], tokenizer: Any, wanted: int) -> Tensor:
    """Token ids of the documents, an end-of-text token after each, at most `wanted`; refuses text without any token."""
    separator = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
    ids, heard, silent = list[int](), False, 0  # characters before the first token that stands for some
    for document in documents:
        own = first_tokens(tokenizer, document, wanted - len(ids))
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


def read_tokens(
    source: str, tokenizer: Any, wanted: int, seed: int, vocab: int, purpose: str = "calibration"
) -> Tensor:
    """Token ids [T] of a source: as many as are wanted, or as there are."""
    with quiet_transformers(), wrap_faults(f"the tokenizer cannot take {purpose} data {source}", *REMEDIES):
        ids = pack(documents(source, seed, tokenizer, purpose), tokenizer, wanted)
    if ids.numel() < 2:
        raise CompressionError(f"{purpose} data {source} gives {ids.numel()} tokens; give it more text")
    if int(ids.max()) >= vocab:
        raise CompressionError(
            f"the tokenizer makes token {int(ids.max())}, the model knows {vocab}; they do not belong together"
        )
    return ids
