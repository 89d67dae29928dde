"""A preview of the text that calibration reads of a source: rows, columns, and the first documents
token by token."""

import logging
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from statistics import median
from typing import Any

from compressor.data.batches import TextSpec, read_text
from compressor.data.chats import plain_chat
from compressor.data.documents import HasMediaError, documents, pack
from compressor.data.media import read_sequences
from compressor.data.rows import hub_answers
from compressor.document.blocks import Block, Facts, Heading, Listing
from compressor.errors import CompressionError, LeftOut
from compressor.frozen import frozen
from compressor.progress import quiet_transformers

logger = logging.getLogger(__name__)

ANY_VOCABULARY = 2**63
MOST_PIECES = 64  # of a document that is shown
Piece = tuple[str, bool]  # a token or a word, and whether it is a special token


@frozen
class Preview:
    """A preview of one source; a piece is a token, or a word where no tokenizer is named."""

    source: str
    rows: int
    left_out: int
    reasons: Sequence[str]
    columns: Sequence[str]
    unread: Sequence[str]
    lengths: Sequence[int]  # of the first documents in the order of the seed, in pieces
    shown: Sequence[Sequence[Piece]]  # some of these documents
    opening: Sequence[str] = ()  # special tokens that every sequence begins with
    sha256: str = ""  # of the tokens that calibration reads


class _Plain:
    """A stand-in for the tokenizer of an unknown model, which shows a chat as roles and
    contents."""

    chat_template = "role: content"

    @staticmethod
    def apply_chat_template(messages: Sequence[Any], **_: Any) -> str:
        return plain_chat(messages)


def preview(spec: TextSpec, tokenizer: Any, most: int) -> list[Preview]:
    """Read each source as calibration would, and show its first `most` documents; the tokenizer may
    be None."""
    previews = []
    for entry in spec.sources:
        try:
            previews.append(_read(replace(spec, sources=(entry,)), tokenizer, most))
        except CompressionError as error:
            is_last = entry is spec.sources[-1] and not previews
            if spec.strict or is_last or not entry.is_optional or not hub_answers():
                raise
            logger.warning("source %s of the blend cannot be read: %s", entry.source, error)
    return previews


def _read(spec: TextSpec, tokenizer: Any, most: int) -> Preview:
    """Read the one source of a text."""
    (entry,) = spec.sources
    left_out = LeftOut(f"rows of {entry.source}", spec.strict)
    known = _Plain() if tokenizer is None else tokenizer
    opening = tuple[int, ...]()
    read = list[Sequence[Any]]()  # of each document its words or tokens
    lengths = []
    try:
        with quiet_transformers():
            texts = documents(entry, spec.seed, known, "calibration", left_out)
            for document in islice(texts, spec.samples):
                if tokenizer is None:
                    pieces: Sequence[Any] = document.text.split()
                else:
                    stream = pack([document], tokenizer, sys.maxsize)
                    pieces = stream.ids.tolist()
                    opening = opening or stream.opening
                lengths.append(len(pieces))
                if len(read) < most:
                    read.append(pieces)
    except HasMediaError:
        if tokenizer is None:
            raise
        rows = read_sequences(
            entry, tokenizer, spec.samples, spec.sequence_length, spec.seed, ANY_VOCABULARY
        )
        left_out.used = len(rows)
        lengths = [row.shape[1] for row in rows]
        read = [row[0].tolist() for row in rows[:most]]
    shown = list[list[Piece]]()
    digest = ""
    if tokenizer is None:
        for words in read:
            shown.append([(word, False) for word in words])
    else:
        digest = read_text(spec, tokenizer, ANY_VOCABULARY).fit.identity["sha256"]
        added = getattr(tokenizer, "added_tokens_decoder", {})
        special = {token for token, entry in added.items() if entry.special}
        special.update(tokenizer.all_special_ids)
        for tokens in read:
            shown.append([(str(tokenizer.decode([token])), token in special) for token in tokens])
    return Preview(
        entry.source,
        left_out.used,
        left_out.faults,
        [str(reason) for reason in left_out.first],
        sorted(left_out.columns),
        sorted(left_out.unread),
        lengths,
        shown,
        [tokenizer.decode([token]) for token in opening],
        digest,
    )


def preview_blocks(read: Preview, is_tokens: bool) -> list[Block]:
    """Return a source's preview for people."""
    facts = {"rows": f"{read.rows:,} read, {read.left_out:,} left out"}
    named = {
        "columns read": read.columns,
        "columns of text not read": read.unread,
        "left out": read.reasons,
    }
    facts |= {name: "; ".join(values) for name, values in named.items() if values}
    unit = "tokens" if is_tokens else "words"
    if read.lengths:
        bounds = (
            f"{min(read.lengths):,} to {max(read.lengths):,} {unit}, median "
            f"{median(read.lengths):,.0f}"
        )
        facts["first documents"] = f"{len(read.lengths):,} of {bounds}"
    if is_tokens:
        facts["a sequence begins with"] = " ".join(read.opening) or "no special token"
        facts["digest of the tokens"] = read.sha256
    blocks: list[Block] = [Heading(read.source), Facts(facts.items())]
    for pieces in read.shown:
        # special tokens in brackets, and what would break the line escaped
        parts = [f"⟦{text}⟧" if is_special else text for text, is_special in pieces[:MOST_PIECES]]
        line = "|".join(parts).replace("\n", "⏎").replace("\r", "␍").replace("\t", "⇥")
        if len(pieces) > MOST_PIECES:
            line += f" ... ({len(pieces) - MOST_PIECES:,} more)"
        blocks.append(Listing(line))
    return blocks
