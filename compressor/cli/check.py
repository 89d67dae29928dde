"""`check`: whether a model anywhere computes what its golden answers say."""

from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

import compressor
from compressor.answers.options import ServerOptions
from compressor.cli.options import RUNNING, SERVERS, Running, flag, options_of
from compressor.cli.terminal import print_report, progress_bars, written_line
from compressor.entry_points import kind_of_file
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
    with progress_bars(running.as_json) as progress:
        if base is not None:
            return _verify(model, base, running, progress)
        if write:
            target = _write(model, output or answers, running, progress)
            content = {"written": str(target)}
            blocks = list(written_line([target]))
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
            blocks = verdict.blocks
    print_report(running.as_json, content, blocks)
    if not write and verdict.exit_status:
        raise typer.Exit(verdict.exit_status)


def _verify(model: str, base: str, running: Running, progress: Any) -> None:
    """Compare a folder with the model it was made from, and print the result."""
    from compressor.checkpoint.source import locate
    from compressor.pipeline.verify import verify_against_base

    result = verify_against_base(locate(model, running.revision, progress).folder, base)
    print_report(running.as_json, result.to_dict(), result.blocks())
    if not result.passed:
        raise typer.Exit(1)


def _write(model: str, target: Path | None, running: Running, progress: Any) -> Path:
    """Write a model's golden answers, and return their file."""
    from compressor.checkpoint.source import locate
    from compressor.golden.answers import check_target, golden_json
    from compressor.golden.measure import make_golden

    source = locate(model, running.revision, progress)
    if target is None:
        target = source.folder if source.revision is None else Path.cwd()
    target = target / GOLDEN if target.is_dir() else target
    check_target(target, running.overwrite)
    with lock_output(target):
        golden = make_golden(source, running.device, progress)
        write_file(target, golden_json(golden), partial(check_target, target, running.overwrite))
    return target
