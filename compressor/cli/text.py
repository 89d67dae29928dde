"""The command `text`: what calibration will read, before any model is."""

from dataclasses import asdict
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer

from compressor.cli.options import TEXT, Printing, Seed, flag
from compressor.cli.terminal import print_report
from compressor.document.blocks import Block, Facts, Heading, Listing

if TYPE_CHECKING:
    from compressor.report.preview import Piece, Preview

MOST_PIECES = 64  # of a document that is shown
SHOWN = [option for option in TEXT if option[0] in ("samples", "sequence_length", "strict")]


def text(
    sources: Annotated[
        list[str], typer.Argument(metavar="SOURCE...", help="Text, JSONL, CSV or parquet file, data set or 'demo'.")
    ],
    options: Annotated[dict[str, Any], SHOWN],
    running: Printing,
    model: Annotated[str | None, flag("Model whose tokenizer and chat template read it; none is downloaded.")] = None,
    documents: Annotated[int, flag("Documents to show.", min=0)] = 3,
    seed: Seed = 0,
) -> None:
    """Show what calibration will read: rows, columns, the first documents as tokens, and the digest of all tokens."""
    from compressor.checkpoint.source import locate_tokenizer
    from compressor.data.batches import TextSpec, load_tokenizer
    from compressor.data.sources import parse_sources
    from compressor.recipe.step import TextOptions
    from compressor.report.preview import preview

    chosen = TextOptions(**options)
    spec = TextSpec(parse_sources(sources), chosen.samples, chosen.sequence_length, seed, strict=chosen.strict)
    tokenizer = None if model is None else load_tokenizer(locate_tokenizer(model).folder)
    previews = preview(spec, tokenizer, documents)
    blocks = (block for shown in previews for block in preview_blocks(shown, tokenizer is not None))
    print_report(running.as_json, [asdict(shown) for shown in previews], blocks)


def preview_blocks(read: "Preview", is_tokens: bool) -> list[Block]:
    """Return a source's preview for people."""
    facts = {"rows": f"{read.rows:,} read, {read.left_out:,} left out"}
    named = {"columns read": read.columns, "columns of text not read": read.unread, "left out": read.reasons}
    facts |= {name: "; ".join(values) for name, values in named.items() if values}
    unit = "tokens" if is_tokens else "words"
    if read.lengths:
        bounds = f"{min(read.lengths):,} to {max(read.lengths):,} {unit}, median {median(read.lengths):,.0f}"
        facts["first documents"] = f"{len(read.lengths):,} of {bounds}"
    if is_tokens:
        facts["a sequence begins with"] = " ".join(read.opening) or "no special token"
        facts["digest of the tokens"] = read.sha256
    return [Heading(read.source), Facts(tuple(facts.items())), *(Listing(shown(pieces)) for pieces in read.shown)]


def shown(pieces: "tuple[Piece, ...]") -> str:
    """Return the first tokens of a document, special ones in brackets, with what would break the line escaped."""
    parts = [f"⟦{text}⟧" if is_special else text for text, is_special in pieces[:MOST_PIECES]]
    more = f" ... ({len(pieces) - MOST_PIECES:,} more)" if len(pieces) > MOST_PIECES else ""
    return "|".join(parts).replace("\n", "⏎").replace("\r", "␍").replace("\t", "⇥") + more
