"""From a source to documents, and from documents to rows of tokens: no more is tokenised than is asked for."""

import json
import random
import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from io import TextIOWrapper
from itertools import groupby
from os.path import isfile
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from compressor.data.demo import load_documents, load_items
from compressor.data.sources import (
    DEFAULT_SOURCE,
    DEMO_SOURCE,
    GIVEN,
    JSON_SUFFIXES,
    TABLE_SUFFIX,
    TEXT_SUFFIXES,
    Address,
    WeightedSource,
)
from compressor.errors import CompressionError, ItemError, LeftOut, first_line, reason_of, wrap_faults
from compressor.model.tokenizer import first_tokens, has_chat_template, no_token, render_chat, says_something
from compressor.progress import quiet_transformers

Purpose = Literal["calibration", "heldout", "prompts", "text", "answers"]  # which options are called, too
CHATS = ("messages", "conversations")  # which some data sets hold as JSON
PAIRS = (
    *(("prompt", "completion"), ("prompt", "response"), ("instruction", "output"), ("instruction", "response")),
    ("query", "answers"),
)
COLUMNS = (("text",), *((name,) for name in CHATS), *PAIRS)
MEDIA = {
    **{"image": "image", "images": "image", "video": "video", "videos": "video", "audio": "audio", "audios": "audio"},
    "image_url": "image",
}
ROLES = {"human": "user", "gpt": "assistant", "function_call": "assistant", "observation": "tool"}  # ShareGPT's names
PATIENCE = 100_000  # characters without a token, after which a tokenizer counts as one that has none
MOST_LETTERS = 2**27  # of a document, or of the line that holds one
MOST_NAMES = 20  # of splits or configurations in an error
REMEDIES = ("split it up", "restore the tokenizer from its source or mend the text")
SHUFFLE_BUFFER = 10_000  # documents of a streamed data set that are shuffled together


class HasMediaError(CompressionError):
    """A source has pictures, video or sound beside its text, and is to be read as sequences (`data.media`)."""


def _document(row: Any, column: str | None, tokenizer: Any, where: str) -> str:
    """The text of a row: a string, or a mapping with a column of text, or with a chat, which the template renders.

    Raises `ItemError` for a row without text, or with half a character, which JSON can write and no tokenizer takes.
    """
    if isinstance(row, ItemError):
        raise row
    text = row if isinstance(row, str) else _column(row, column, tokenizer, where)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ItemError(f"{where} has {text[error.start]!r}, half a character; mend or remove it") from error
    return text


def _column(row: Any, column: str | None, tokenizer: Any, where: str) -> str:
    if not isinstance(row, Mapping):
        raise ItemError(f"{where}: a row should be an object such as {{'text': ...}}, it is {reprlib.repr(row)}")
    names = columns_of(row, COLUMNS if column is None else ((column,),), where)
    if len(names) == 1 and isinstance(text := turns_of(row, names[0]), str):
        return text
    require_template(tokenizer, f"{where} has a chat in {' and '.join(names)}")
    messages = messages_of(row, names, where)
    try:
        return render_chat(tokenizer, messages, tools=tools_of(row))
    except Exception as error:  # a template raises what it likes
        raise untaken(where, error) from error


def media_beside(row: Any) -> dict[str, Any]:
    """The pictures, video and sound in columns of a row, by their kind."""
    if not isinstance(row, Mapping):
        return {}
    present = {kind: row[name] for name, kind in MEDIA.items() if row.get(name) is not None}
    return {kind: value for kind, value in present.items() if not isinstance(value, list | str) or value}


def with_media(row: Any, column: str | None) -> bool:
    """Whether a row has pictures, video or sound: in columns of their own, or in its messages.

    A column of text that is named is read alone.
    """
    if not isinstance(row, Mapping):
        return False
    names = [name for name in ((column,) if column else CHATS) if row.get(name) is not None]
    if column is not None and (not names or isinstance(turns_of(row, column), str)):
        return False
    turns = [turn for name in names for turn in turns_of(row, name) if isinstance(turn, Mapping)]
    contents = [content for turn in turns if isinstance(content := turn.get("content"), list)]
    parts = (part for content in contents for part in content if isinstance(part, Mapping))
    return bool(media_beside(row)) or any(part.get("type") in MEDIA for part in parts)


def columns_of(row: Mapping[str, Any], choices: Sequence[tuple[str, ...]], where: str) -> tuple[str, ...]:
    """The first of these combinations of columns that a row has; raises `ItemError` where it has none."""
    names = next((names for names in choices if all(row.get(name) is not None for name in names)), None)
    if names is None:
        *others, last = (" with ".join(names) for names in choices)
        sought = f"{', '.join(others)} or {last}" if others else repr(last)
        present = ", ".join(str(name) for name, value in row.items() if value is not None)
        raise ItemError(f"{where} has no {sought}; it has {present or 'nothing'} (SOURCE#column names one of them)")
    return names


def require_template(tokenizer: Any, what: str) -> None:
    """Refuse a chat where the tokenizer has no template; `what` begins the sentence."""
    if not has_chat_template(tokenizer):
        raise CompressionError(
            f"{what}, but the model's tokenizer has no chat template; name a column of text, or put the template of "
            "the instruct version beside the tokenizer"
        )


def untaken(where: str, error: Exception) -> ItemError:
    """What is wrong with a chat that a template cannot take."""
    return ItemError(f"{where}: the chat template cannot take its messages ({reason_of(error)})")


def messages_of(row: Mapping[str, Any], names: Sequence[str], where: str) -> list[dict[str, Any]]:
    """The messages in these columns, one after the other; text is the user's, in the second column the assistant's."""
    messages = list[dict[str, Any]]()
    for name, role in zip(names, ("user", "assistant"), strict=False):
        turns = turns_of(row, name)
        if isinstance(turns, str) and turns.strip():
            calls = _calls(turns) if role == "assistant" and row.get("tools") else None
            turns = [{"role": role, "content": "", "tool_calls": calls} if calls else {"role": role, "content": turns}]
        if not turns or not isinstance(turns, list) or not all(isinstance(turn, Mapping) for turn in turns):
            raise ItemError(f"{where}: {name} is {reprlib.repr(turns)}, it should hold messages with role and content")
        messages += [_message(turn) for turn in turns]
    return messages


def turns_of(row: Mapping[str, Any], name: str) -> Any:
    """What a column holds; of a chat as JSON, its messages."""
    value = row[name]
    if name in CHATS and isinstance(value, str) and value.lstrip().startswith("["):
        with suppress(ValueError, RecursionError):
            return json.loads(value)
    return value


def _calls(text: str) -> list[dict[str, Any]] | None:
    """Calls of tools that a data set holds as a JSON list of names and arguments; None if it is no such list."""
    with suppress(ValueError, RecursionError):
        found = json.loads(text)
        if isinstance(found, list) and all(isinstance(call, Mapping) and "name" in call for call in found):
            return [{"type": "function", "function": call} for call in found]
    return None


def tools_of(row: Mapping[str, Any]) -> Any:
    """The tools that a chat may call, which some data sets hold as JSON; None without any."""
    tools = row.get("tools")
    tools = json.loads(tools) if isinstance(tools, str) and tools.strip() else tools
    return _without_none(tools) or None


def _message(turn: Mapping[str, Any]) -> dict[str, Any]:
    """A message with role and content, as ShareGPT's from and value are called, too."""
    if "from" in turn and "role" not in turn:
        return {"role": ROLES.get(turn["from"], turn["from"]), "content": turn.get("value")}
    return {"content": None, **_without_none(turn)}


def _without_none(value: Any) -> Any:
    """The value without the None that a table has where other rows have a field."""
    if isinstance(value, Mapping):
        return {name: _without_none(inner) for name, inner in value.items() if inner is not None}
    return [_without_none(inner) for inner in value] if isinstance(value, list) else value


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


def _file_rows(path: Path, purpose: str) -> Iterator[tuple[str, Any]]:
    """Each row of a parquet or JSONL file, or document of a text file, after its place; blank lines separate those."""
    if path.suffix == TABLE_SUFFIX:
        from pyarrow.parquet import ParquetFile

        with wrap_faults(f"{purpose} file {path} cannot be read", *REMEDIES), ParquetFile(path) as table:
            rows = (row for batch in table.iter_batches() for row in batch.to_pylist())
            yield from ((f"{path}, row {number}", row) for number, row in enumerate(rows, 1))
        return
    lines = _lines(path, purpose)
    if path.suffix not in JSON_SUFFIXES:
        for blank, paragraph in groupby(lines, lambda numbered: numbered[1] == "\n"):
            if not blank:
                (number, first), *more = paragraph
                where, text = f"{path}: the document at line {number}", "".join([first, *(line for _, line in more)])
                yield where, _bounded(text, where).removesuffix("\n") + "\n"
        return
    for number, line in lines:
        where = f"{path}, line {number}"
        if line.strip():
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                row = ItemError(f"{where} is not valid JSON ({error}); mend or remove it")
            yield where, row


def _data_set_rows(address: Address, seed: int, purpose: str) -> Iterator[tuple[str, Any]]:
    """Rows of a data set, streamed in the order of the seed.

    Raises `CompressionError` for a configuration or split that it does not have, naming those that there are.
    """
    import datasets

    name, split = address.name, address.split or "train"
    config = address.config or ("en" if name == DEFAULT_SOURCE else None)
    try:
        stream = datasets.load_dataset(name, config, split=split, streaming=True)
        for number, row in enumerate(stream.shuffle(seed=seed, buffer_size=SHUFFLE_BUFFER), 1):
            yield f"data set {address}, row {number} as shuffled", row
    except Exception as error:
        fault = f"{purpose} data {str(address)!r} is no file, and cannot be read as a data set ({first_line(error)})"
        remedy = f"pass --{purpose} with a text or JSONL file, a data set id, or 'demo'"
        with suppress(Exception):  # what keeps the data set from being read may keep these from being listed
            configs = datasets.get_dataset_config_names(name)
            chosen = config or datasets.get_dataset_default_config_name(name)
            if chosen not in configs:
                fault = f"data set {name} has no {f'configuration {config!r}' if config else 'default configuration'}"
                remedy = f"its configurations are {_shown(configs)}; write {replace(address, config=configs[0])}"
            elif split not in (splits := datasets.get_dataset_split_names(name, chosen)):
                fault = f"data set {name} has no split {split!r}"
                remedy = f"its splits are {_shown(splits)}; write {replace(address, split=splits[0])}"
        raise CompressionError(f"{fault}; {remedy}") from error


def _shown(names: Sequence[str]) -> str:
    return ", ".join(names[:MOST_NAMES]) + (f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else "")


def documents(
    source: WeightedSource, seed: int, tokenizer: Any, purpose: Purpose = "calibration", left_out: LeftOut | None = None
) -> Iterable[str]:
    """Documents of a source in the order of the seed; a data set is read as they are taken, anything else at once."""
    left_out = LeftOut(f"rows of {source.source}") if left_out is None else left_out
    address = Address.parse(source.source)

    def texts(rows: Iterable[tuple[str, Any]]) -> Iterator[str]:
        for where, row in rows:
            text = ""
            with left_out.each():
                if purpose in ("calibration", "heldout") and with_media(row, address.column):
                    raise HasMediaError(f"{where} has pictures, video or sound, which are not read as text")
                text = _document(row, address.column, tokenizer, where)
            if text.strip():
                yield text

    rows, is_streamed = source_rows(source, seed, purpose)
    if is_streamed:
        return texts(rows)
    ordered = list(texts(rows))
    if not ordered:
        left_out.report()
        raise CompressionError(f"{purpose} file {address} is empty; give it some text")
    random.Random(seed).shuffle(ordered)
    return ordered


def source_rows(source: WeightedSource, seed: int, purpose: Purpose) -> tuple[Iterator[tuple[str, Any]], bool]:
    """Each row of a source after its place, and whether they are a data set's, streamed in the order of the seed."""
    address = Address.parse(source.source)
    path = Path(address.name)
    if source.rows is not None:
        return ((f"{address}, row {number}", row) for number, row in enumerate(source.rows, 1)), False
    if address.name == GIVEN:
        raise CompressionError(f"the text {address} was given in Python and is in no file; name one with --{purpose}")
    if address.name == DEMO_SOURCE and not path.exists():
        if purpose == "prompts":
            return ((f"{DEMO_SOURCE}, {item.skill}", item.question) for item in load_items()), False
        part = "calibration" if purpose == "calibration" else "heldout"
        return ((DEMO_SOURCE, text) for text, _ in load_documents(part)), False
    if isfile(path):
        if address.config or address.split:
            plain = replace(address, config=None, split=None)
            raise CompressionError(f"{purpose} file {path} has no configurations and splits; write {plain}")
        return _file_rows(path, purpose), False
    if path.suffix in TEXT_SUFFIXES and not path.exists():
        raise CompressionError(
            f"{purpose} file {path} does not exist; name a text or JSONL file, a data set id, or 'demo'"
        )
    return _data_set_rows(address, seed, purpose), True


def pack(documents: Iterable[str], tokenizer: Any, wanted: int) -> Tensor:
    """Token ids of the documents, an end-of-text token after each, at most `wanted`; refuses text without any token.

    A chat that ends with that token gets no second one.
    """
    separator = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
    end = getattr(tokenizer, "eos_token", None) or "\0"
    ids, heard, silent = list[int](), False, 0  # characters before the first token that stands for some
    for document in documents:
        own = first_tokens(tokenizer, document, wanted - len(ids))
        heard, silent = heard or says_something(tokenizer, own), silent + len(document.strip())
        ids += own if document.rstrip().endswith(end) else own + separator
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
    source: WeightedSource,
    tokenizer: Any,
    wanted: int,
    seed: int,
    vocab: int,
    purpose: Purpose = "calibration",
    strict: bool = False,
) -> Tensor:
    """Token ids [T] of a source: as many as are wanted, or as there are.

    Rows that cannot be read are left out with one warning, or refused if `strict`.
    """
    name = source.source
    left_out = LeftOut(f"rows of {purpose} data {name}", strict)
    with quiet_transformers(), wrap_faults(f"the tokenizer cannot take {purpose} data {name}", *REMEDIES):
        ids = pack(documents(source, seed, tokenizer, purpose, left_out), tokenizer, wanted)
    left_out.report()
    if ids.numel() < 2:
        raise CompressionError(f"{purpose} data {name} gives {ids.numel()} tokens; give it more text")
    if int(ids.max()) >= vocab:
        raise CompressionError(
            f"the tokenizer makes token {int(ids.max())}, the model knows {vocab}; they do not belong together"
        )
    return ids
