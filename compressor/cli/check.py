"""`check`: whether a model anywhere computes what its golden answers say."""

import os
from pathlib import Path
from typing import Annotated

import typer

from compressor.cli.options import RUNNING, Model, Running, flag, options_of
from compressor.cli.terminal import print_report, progress_bars, written_line
from compressor.errors import CompressionError
from compressor.records import plain_json

Checking = Annotated[Running, options_of(Running, RUNNING, ("revision", "device", "overwrite", "as_json"))]


def check(
    model: Model,
    running: Checking,
    answers: Annotated[
        Path | None, flag("The golden answers, or their folder (default: beside the model).", metavar="FILE")
    ] = None,
    write: Annotated[bool, flag("Write the model's golden answers instead.")] = False,
    base: Annotated[str | None, flag("Model it was made from: compare digests, and each tensor with it.")] = None,
    output: Annotated[Path | None, flag("Where to write them (default: golden_answers.json in the folder).")] = None,
) -> None:
    """Say whether this computes the model whose golden answers were kept: the same, up to rounding, or different.

    Exit status 1 if it is different.
    """
    from compressor.checkpoint.source import locate
    from compressor.golden.answers import NAME, find_golden, read_golden, write_golden
    from compressor.golden.compare import compare
    from compressor.golden.measure import make_golden
    from compressor.golden.things import ask_folder

    with progress_bars(running.as_json) as progress:
        source = locate(model, running.revision, progress)
        if base is not None:
            return _verify(source.folder, base, running.as_json)
        if write:
            target = output or answers or source.folder / NAME
            target = target / NAME if target.is_dir() else target
            if target.exists() and not running.overwrite:
                raise CompressionError(f"{target} exists; pass --overwrite to replace it")
            if not os.access(target.parent, os.W_OK):
                raise CompressionError(f"nothing can be written to {target.parent}; name a file with --output")
            write_golden(target, make_golden(source, running.device, progress))
            print_report(running.as_json, {"written": str(target)}, written_line([target]))
            return
        golden = read_golden(find_golden([answers] if answers else [source.folder]))
        verdict = compare(golden, ask_folder(golden, source, running.device, progress))
    # the likeliest cause of a difference is looked for here
    content = {**plain_json(verdict), "sentence": verdict.sentence}
    print_report(running.as_json, content, verdict.blocks(golden))
    if verdict.exit_status:
        raise typer.Exit(verdict.exit_status)


def _verify(folder: Path, base: str, as_json: bool) -> None:
    """Compare a folder with the model it was made from, and print the result."""
    from compressor.pipeline.verify import verify_against_base

    result = verify_against_base(folder, base)
    print_report(as_json, result.to_dict(), result.blocks())
    if not result.passed:
        raise typer.Exit(1)
