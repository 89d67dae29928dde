"""From a source to documents, and from documents to rows of tokens: no more is tokenised than is asked for."""

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from compressor.data.chats import CHATS, note_columns, read_row, require_template, untaken, with_media
from compressor.data.rows import REMEDIES, Purpose, source_rows
from compressor.data.sources import SourceSpec, WeightedSource
from compressor.errors import CompressionError, LeftOut, wrap_faults
from compressor.model.tokenizer import check_vocabulary, first_part, no_token, opening_of, render_chat, says_something
from compressor.progress import quiet_transformers

PATIENCE = 100_000  # characters without a token, after which a tokenizer counts as one that has none


class HasMediaError(CompressionError):
    """A source has pictures, video or sound beside its text, and is to be read as sequences (`data.media`)."""


class Document(NamedTuple):
    """One text of a source; a chat's is rendered by the template, which opens it as the model knows it."""

    text: str
    is_chat: bool = False


@dataclass(frozen=True, slots=True)
class TokenStream:
    """Documents of a source one after the other."""

    ids: Tensor  # [T]
    opening: tuple[int, ...] = ()  # tokens that every sequence begins with

    def rows(self, length: int) -> Tensor:
        """Cut into sequences [n, length], leaving out what does not fill one; [1, T] if there is nothing else."""
        return opened(as_rows(self.ids, length), self.opening)


def _document(
    row: Any, column: str | None, tokenizer: Any, where: str, left_out: LeftOut, purpose: Purpose
) -> Document:
    """Return a row's text, or its chat as the template renders it; raises `ItemError` for a row without text."""
    conversation = read_row(row, column, where)
    is_plain = column is not None and conversation.text is not None
    if purpose in ("calibration", "heldout") and not is_plain and with_media(row, conversation):
        raise HasMediaError(f"{where} has pictures, video or sound, which are not read as text")
    if column is None:
        note_columns(row, conversation, left_out)
    text = conversation.text
    is_rendered = isinstance(row, Mapping) and any(row.get(name) for name in CHATS)
    if text is None:
        require_template(tokenizer, f"{where} has a chat in {' and '.join(conversation.columns)}")
        try:
            text = render_chat(tokenizer, conversation.messages, tools=conversation.tools)
        except Exception as error:  # a template raises what it likes
            raise untaken(where, error) from error
        is_rendered = True
    return Document(text, is_rendered)


def documents(
    source: WeightedSource, seed: int, tokenizer: Any, purpose: Purpose = "calibration", left_out: LeftOut | None = None
) -> Iterable[Document]:
    """Documents of a source in the order of the seed; a data set is read as they are taken, anything else at once."""
    left_out = LeftOut(f"rows of {source.source}") if left_out is None else left_out
    address = SourceSpec.parse(source.source)
    source_of_rows = source_rows(source, seed, purpose)

    def read() -> Iterator[Document]:
        for where, row in source_of_rows.rows:
            document = Document("")
            with left_out.each():
                document = _document(row, address.column, tokenizer, where, left_out, purpose)
            if document.text.strip():
                yield document

    if source_of_rows.is_streamed:
        return read()
    ordered = list(read())
    if not ordered:
        left_out.report()
        raise CompressionError(f"{purpose} file {address} is empty; give it some text")
    random.Random(seed).shuffle(ordered)
    return ordered


def pack(documents: Iterable[Document], tokenizer: Any, wanted: int) -> TokenStream:
    """Return the tokens of the documents, each opened as the tokenizer opens texts and ended by an end-of-text token.

    At most `wanted` are taken; text without any token is refused. A chat that ends with that token gets no second one,
    and is opened by its template alone: where the first document is one that has no opening, no sequence gets one.
    """
    separator = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
    end = getattr(tokenizer, "eos_token", None) or "\0"
    opening = opening_of(tokenizer)
    sequence_opening: tuple[int, ...] = ()
    ids = list[int]()
    heard, silent = False, 0  # characters before the first token that stands for some
    for document in documents:
        text = document.text
        _, tokens = first_part(tokenizer, text, wanted - len(ids))
        heard = heard or says_something(tokenizer, tokens)
        silent += len(text.strip())
        is_opened = tuple(tokens[: len(opening)]) == opening
        if not is_opened and not document.is_chat:
            tokens = [*opening, *tokens]
            is_opened = True
        if not ids and is_opened:
            sequence_opening = opening
        ids += tokens if text.rstrip().endswith(end) else tokens + separator
        if len(ids) >= wanted or (not heard and silent > PATIENCE):
            break
    if silent and not heard:
        raise no_token("the text")
    return TokenStream(torch.tensor(ids[:wanted], dtype=torch.long), sequence_opening)


def opened(rows: Tensor, opening: Sequence[int]) -> Tensor:
    """Begin each sequence [n, L] with the opening, as the model saw texts begin, in place of its first tokens.

    A document that begins right behind that place is moved up, so that nothing is opened twice.
    """
    length = len(opening)
    if not length or rows.shape[1] <= length:
        return rows
    start = torch.tensor(opening)
    rows = rows.clone()
    if rows.shape[1] >= 2 * length:
        is_behind = (rows[:, length : 2 * length] == start).all(1)
        rows[is_behind] = rows[is_behind].roll(-length, 1)
    rows[:, :length] = start
    return rows


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
) -> TokenStream:
    """Return the tokens of a source: as many as are wanted, or as there are.

    Rows that cannot be read are left out with one warning, or refused if `strict`.
    """
    name = source.source
    left_out = LeftOut(f"rows of {purpose} data {name}", strict)
    with quiet_transformers(), wrap_faults(f"the tokenizer cannot take {purpose} data {name}", *REMEDIES):
        stream = pack(documents(source, seed, tokenizer, purpose, left_out), tokenizer, wanted)
    ids = stream.ids
    left_out.report()
    if ids.numel() < 2:
        raise CompressionError(f"{purpose} data {name} gives {ids.numel()} tokens; give it more text")
    check_vocabulary(int(ids.max()), vocab)
    return stream
