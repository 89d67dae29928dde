"""A preview of the text that calibration reads of a source: rows, columns, and the first documents token by token."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from compressor.data.batches import TextSpec, read_text
from compressor.data.documents import HasMediaError, documents, pack
from compressor.data.media import read_sequences
from compressor.data.sources import WeightedSource
from compressor.errors import LeftOut
from compressor.progress import quiet_transformers

ANY_VOCABULARY = 2**63
Piece = tuple[str, bool]  # a token or a word, and whether it is a special token


@dataclass(frozen=True, slots=True)
class Preview:
    """A preview of one source; a piece is a token, or a word where no tokenizer is named."""

    source: str
    rows: int
    left_out: int
    reasons: tuple[str, ...]
    columns: tuple[str, ...]
    unread: tuple[str, ...]
    lengths: tuple[int, ...]  # of the first documents in the order of the seed, in pieces
    shown: tuple[tuple[Piece, ...], ...]  # some of these documents
    opening: tuple[str, ...] = ()  # special tokens that every sequence begins with
    sha256: str = ""  # of the tokens that calibration reads


class _Plain:
    """A stand-in for the tokenizer of an unknown model, which shows a chat as roles and contents."""

    chat_template = "role: content"

    @staticmethod
    def apply_chat_template(messages: Sequence[Any], **_: Any) -> str:
        lines = list[str]()
        for message in messages:
            calls = json.dumps(message["tool_calls"]) if message.get("tool_calls") else ""
            lines.append(f"{message.get('role')}: {message.get('content') or ''}{calls}")
        return "\n".join(lines)


def preview(spec: TextSpec, tokenizer: Any, most: int) -> list[Preview]:
    """Read each source as calibration would, and show its first `most` documents; the tokenizer may be None."""
    return [_preview(replace(spec, sources=(entry,)), entry, tokenizer, most) for entry in spec.sources]


def _preview(spec: TextSpec, entry: WeightedSource, tokenizer: Any, most: int) -> Preview:
    left_out = LeftOut(f"rows of {entry.source}", spec.strict)
    known = _Plain() if tokenizer is None else tokenizer
    opening, lengths, shown = tuple[int, ...](), list[int](), list[tuple[Piece, ...]]()
    try:
        with quiet_transformers():
            for document in islice(documents(entry, spec.seed, known, "calibration", left_out), spec.samples):
                if tokenizer is None:
                    pieces: Sequence[Any] = document.text.split()
                else:
                    stream = pack([document], tokenizer, sys.maxsize)
                    pieces, opening = stream.ids.tolist(), opening or stream.opening
                lengths.append(len(pieces))
                if len(shown) < most:
                    shown.append(_named(pieces, tokenizer))
    except HasMediaError:
        if tokenizer is None:
            raise
        rows = read_sequences(entry, tokenizer, spec.samples, spec.sequence_length, spec.seed, ANY_VOCABULARY)
        left_out.used = len(rows)
        lengths = [row.shape[1] for row in rows]
        shown = [_named(row[0].tolist(), tokenizer) for row in rows[:most]]
    digest = "" if tokenizer is None else read_text(spec, tokenizer, ANY_VOCABULARY).fit.identity["sha256"]
    return Preview(
        entry.source,
        left_out.used,
        left_out.faults,
        tuple(map(str, left_out.first)),
        tuple(sorted(left_out.columns)),
        tuple(sorted(left_out.unread)),
        tuple(lengths),
        tuple(shown),
        tuple(tokenizer.decode([token]) for token in opening),
        digest,
    )


def _named(pieces: Sequence[Any], tokenizer: Any) -> tuple[Piece, ...]:
    """Return the text of each token, and whether it is a special one; words, of no tokenizer, are none."""
    if tokenizer is None:
        return tuple((word, False) for word in pieces)
    added = getattr(tokenizer, "added_tokens_decoder", {})
    special = {*tokenizer.all_special_ids, *(token for token, entry in added.items() if entry.special)}
    return tuple((str(tokenizer.decode([token])), token in special) for token in pieces)
