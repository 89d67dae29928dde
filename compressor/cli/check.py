"""`check`: whether a model anywhere computes what its golden answers say."""

from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

import compressor
from compressor.answers.options import ServerOptions
from compressor.cli.options import RUNNING, SERVERS, Running, flag, options_of
from compressor.cli.terminal import print_report, progress_bars, written_line
from compressor.document.blocks import Block
from compressor.entry_points import kind_of_file
from compressor.errors import CompressionError
from compressor.files import GOLDEN, lock_output, refuse_absent, write_file
from compressor.records import plain_json

Checking = Annotated[
    Running, options_of(Running, RUNNING, ("revision", "device", "overwrite", "as_json"))
]
Serving = Annotated[
    dict[str, Any], options_of(ServerOptions, SERVERS, ("server", "served_model", "timeout"))
]


def check(
    model: Annotated[
        str, typer.Argument(help="A checkpoint or ONNX folder, a Hub id, or a GGUF file.")
    ],
    running: Checking,
    servers: Serving,
    answers: Annotated[
        Path | None,
        flag("The golden answers, or their folder (default: beside the model).", metavar="FILE"),
    ] = None,
    bits: Annotated[
        Literal["16", "8", "4"] | None,
        flag(
            "Bits of the weights: how much rounding passes (default: as stored).", metavar="16|8|4"
        ),
    ] = None,
    write: Annotated[bool, flag("Write the model's golden answers instead.")] = False,
    base: Annotated[
        str | None, flag("Model it was made from: compare digests, and each tensor with it.")
    ] = None,
    receipt: Annotated[
        bool, flag("Repeat the figures of receipt.json with --base instead of that.")
    ] = False,
    output: Annotated[
        Path | None, flag("Where to write them (default: golden_answers.json in the folder).")
    ] = None,
) -> None:
    """Say if this computes the model of the golden answers: the same, the same up to rounding, or a
    different one.

    Exit status 1 if it is different.
    """
    refuse_absent(base)
    if kind_of_file(model) is None:
        refuse_absent(model)
    from compressor.checkpoint.source import locate

    content: Mapping[str, Any]
    blocks: Iterable[Block]
    with progress_bars(running.as_json) as progress:
        if receipt:
            from compressor.pipeline.receipt import repeat_receipt

            if base is None:
                raise CompressionError("--receipt compares an output with its base: add --base")
            folder = locate(model, running.revision, progress).folder
            repeated = repeat_receipt(folder, base, running.device, progress)
            content, blocks = repeated.to_dict(), repeated.blocks()
            status = int(repeated.verdict == "different")
        elif base is not None:
            from compressor.pipeline.verify import verify_against_base

            folder = locate(model, running.revision, progress).folder
            verified = verify_against_base(folder, base)
            content, blocks = verified.to_dict(), verified.blocks()
            status = 0 if verified.passed else 1
        elif write:
            from compressor.golden.answers import check_target, golden_json
            from compressor.golden.measure import make_golden

            source = locate(model, running.revision, progress)
            usual = source.folder if source.revision is None else Path.cwd()
            target = output or answers or usual
            target = target / GOLDEN if target.is_dir() else target
            check_target(target, running.overwrite)
            with lock_output(target):
                golden = golden_json(make_golden(source, running.device, progress))
                write_file(target, golden, partial(check_target, target, running.overwrite))
            content, blocks, status = {"written": target}, written_line([target]), 0
        else:
            verdict = compressor.check(
                model,
                answers=answers,
                bits=bits,
                servers=ServerOptions(**servers),
                revision=running.revision,
                device=running.device,
                progress=progress,
            )
            content = {**plain_json(verdict), "sentence": verdict.sentence}
            blocks, status = verdict.blocks, int(verdict.verdict == "different")
    print_report(running.as_json, content, blocks)
    if status:
        raise typer.Exit(status)
