"""Documents of a source, and their tokens in rows; no more text is tokenised than requested."""

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any, NamedTuple

import torch
from torch import Tensor

from compressor.data.chats import (
    CHAT_FIRST,
    CHATS,
    COLUMNS,
    MEDIA,
    TRACE,
    media_beside,
    note_columns,
    plain_chat,
    read_row,
    require_template,
    untaken,
)
from compressor.data.rows import REMEDIES, Purpose, source_rows
from compressor.data.sources import SourceSpec, WeightedSource
from compressor.errors import CompressionError, LeftOut, wrap_faults
from compressor.frozen import frozen
from compressor.model.tokenizer import (
    check_vocabulary,
    first_part,
    has_chat_template,
    no_token,
    render_chat,
    says_something,
)
from compressor.progress import quiet_transformers

MOST_CHARACTERS = 2**27  # of a document
PATIENCE = 100_000  # characters without a known token after which the tokenizer is refused


class HasMediaError(CompressionError):
    """Raised for a source with pictures, video or sound, which is read as sequences
    (`data.media`)."""


class Document(NamedTuple):
    """One text of a source; that of a chat is rendered by the template, with the opening that the
    model knows."""

    text: str
    is_chat: bool = False


@frozen
class TokenStream:
    """The tokens of a source's documents, one after the other."""

    ids: Tensor  # [T]
    opening: tuple[int, ...] = ()  # tokens that every sequence begins with

    def rows(self, length: int) -> Tensor:
        """Return full sequences [n, length]; [1, T] if the tokens do not fill one."""
        return with_opening(as_rows(self.ids, length), self.opening)


def documents(
    source: WeightedSource,
    seed: int,
    tokenizer: Any,
    purpose: Purpose = "calibration",
    left_out: LeftOut | None = None,
) -> Iterable[Document]:
    """Return the documents of a source in the order of the seed; a data set is streamed, other
    sources are read now.

    A chat in a named column is plain text where the model has no template.
    """
    left_out = LeftOut(f"rows of {source.source}") if left_out is None else left_out
    address = SourceSpec.parse(source.source)
    source_of_rows = source_rows(source, seed, purpose)

    def read() -> Iterator[Document]:
        for where, row in source_of_rows.rows:
            document = Document("")
            with left_out.each():
                document = _document(where, row, address.column, tokenizer, purpose, left_out)
            yield document

    if source_of_rows.is_streamed:
        return (document for document in read() if document.text.strip())
    ordered = list(read())
    # rows that are left out have their places, as in data sets, which are shuffled before they are
    # read
    random.Random(seed).shuffle(ordered)
    ordered = [document for document in ordered if document.text.strip()]
    if not ordered:
        left_out.report()
        raise CompressionError(f"{purpose} file {address} is empty; give it some text")
    return ordered


def _document(
    where: str, row: Any, column: str | None, tokenizer: Any, purpose: Purpose, left_out: LeftOut
) -> Document:
    """Return the document in a row, with its chat rendered."""
    has_template = has_chat_template(tokenizer)
    columns = row if isinstance(row, Mapping) else {}
    is_trace = columns.keys() >= TRACE
    choices = CHAT_FIRST if has_template and not is_trace else COLUMNS
    conversation = read_row(row, column, where, choices)
    messages = conversation.messages
    text = conversation.text
    if purpose in ("calibration", "heldout") and (column is None or text is None):
        has_media = bool(media_beside(row))
        for message in messages:
            content = message["content"]
            for part in content if isinstance(content, list) else ():
                has_media |= isinstance(part, dict) and part.get("type") in MEDIA
        if has_media:
            raise HasMediaError(f"{where} has pictures, video or sound, which are not read as text")
    if column is None:
        note_columns(row, conversation, left_out)
    if text is not None:
        return Document(text, any(columns.get(name) for name in CHATS))
    if column is None:
        named = " and ".join(conversation.columns)
        require_template(tokenizer, f"{where} has a chat in {named}")
    try:
        if has_template:
            return Document(render_chat(tokenizer, messages, conversation.tools), is_chat=True)
        return Document(plain_chat(messages))
    except Exception as error:  # templates raise anything
        raise untaken(where, error) from error


def pack(documents: Iterable[Document], tokenizer: Any, wanted: int) -> TokenStream:
    """Return at most `wanted` tokens of the documents, each with the tokenizer's opening and an
    end-of-text token.

    Text without a known token is refused. A chat gets no opening but its template's, and text that
    ends with the end-of-text token no second one. If the first document has no opening, no sequence
    gets one."""
    separator = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
    end = getattr(tokenizer, "eos_token", None) or "\0"
    # the tokens that the tokenizer adds before a text by default, such as <s>, if any
    added = tokenizer("0", return_special_tokens_mask=True)
    pairs = zip(added["input_ids"], added["special_tokens_mask"], strict=True)
    opening = tuple(int(token) for token, _ in takewhile(lambda pair: pair[1], pairs))
    sequence_opening: tuple[int, ...] = ()
    ids = list[int]()
    characters = 0
    is_known = False  # whether any token stands for some text
    for document in documents:
        text = document.text
        if len(text) > MOST_CHARACTERS:
            raise CompressionError(
                f"a document has {len(text):,} characters, over {MOST_CHARACTERS:,}; split it"
            )
        _, tokens = first_part(tokenizer, text, wanted - len(ids))
        is_known = is_known or says_something(tokenizer, tokens)
        characters += len(text.strip())
        is_opened = tuple(tokens[: len(opening)]) == opening
        if not is_opened and not document.is_chat:
            tokens = [*opening, *tokens]
            is_opened = True
        if not ids and is_opened:
            sequence_opening = opening
        ids += tokens
        if not text.rstrip().endswith(end):
            ids += separator
        if len(ids) >= wanted or (not is_known and characters > PATIENCE):
            break
    if characters and not is_known:
        raise no_token("the text")
    return TokenStream(torch.tensor(ids[:wanted], dtype=torch.long), sequence_opening)


def with_opening(rows: Tensor, opening: Sequence[int]) -> Tensor:
    """Replace the first tokens of each sequence [n, L] by the opening that the model knows from the
    start of texts.

    A sequence with an opening right after them is moved up instead, so that it has only one.
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
    """Return full sequences of tokens: [T] -> [n, length]; [1, T] if they do not fill one."""
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
    """Return the tokens of a source, at most `wanted`.

    Rows that cannot be read are left out with one warning, or refused if `strict`.
    """
    name = source.source
    left_out = LeftOut(f"rows of {purpose} data {name}", strict)
    with (
        quiet_transformers(),
        wrap_faults(f"the tokenizer cannot take {purpose} data {name}", *REMEDIES),
    ):
        stream = pack(documents(source, seed, tokenizer, purpose, left_out), tokenizer, wanted)
    ids = stream.ids
    left_out.report()
    if ids.numel() < 2:
        raise CompressionError(
            f"{purpose} data {name} gives {ids.numel()} tokens; give it more text"
        )
    check_vocabulary(int(ids.max()), vocab)
    return stream
