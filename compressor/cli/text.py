"""The command `text`: what calibration will read, before any model is."""

from typing import Annotated, Any

import typer

from compressor.cli.options import TEXT, Printing, Seed, flag
from compressor.cli.terminal import print_report

SHOWN = [option for option in TEXT if option[0] in ("samples", "sequence_length", "strict")]


def text(
    options: Annotated[dict[str, Any], SHOWN],
    running: Printing,
    sources: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SOURCE...",
            help="Text, JSONL, CSV or parquet file, data set, 'demo', or a blend (default: blend).",
        ),
    ] = None,
    model: Annotated[
        str | None, flag("Model whose tokenizer and chat template read it; none is downloaded.")
    ] = None,
    documents: Annotated[int, flag("Documents to show.", min=0)] = 3,
    seed: Seed = 0,
) -> None:
    """Show what calibration will read: rows, columns, the first documents as tokens, and the digest
    of all tokens."""
    from compressor.checkpoint.source import locate
    from compressor.data.batches import TextSpec
    from compressor.data.sources import DEFAULT_SOURCE, parse_sources
    from compressor.model.tokenizer import load_tokenizer
    from compressor.recipe.step import TextOptions
    from compressor.report.preview import preview, preview_blocks

    chosen = TextOptions(**options)
    entries = parse_sources(sources or [DEFAULT_SOURCE])
    spec = TextSpec(entries, chosen.samples, chosen.sequence_length, seed, strict=chosen.strict)
    tokenizer = None if model is None else load_tokenizer(locate(model, weights=False).folder)
    previews = preview(spec, tokenizer, documents)
    blocks = (block for shown in previews for block in preview_blocks(shown, tokenizer is not None))
    print_report(running.as_json, previews, blocks)
