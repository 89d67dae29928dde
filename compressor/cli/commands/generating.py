"""`generate`: the command that shows at once what a model says."""

import sys
from collections.abc import Iterable
from typing import Annotated, Any

import typer

from compressor.cli.options import Computing, Model, Running
from compressor.cli.terminal import print_json, progress_bars
from compressor.words import readable

INTERRUPTED = 130


def generate(
    model: Model,
    prompt: Annotated[str, typer.Argument(help="The text to continue; - reads it from standard input.")],
    computing: Computing,
    running: Annotated[Running, ("revision", "as_json")],
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to generate, at most.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token; more samples.")] = 0.0,
    top_p: Annotated[
        float | None, typer.Option(help="Sample from the fewest tokens that hold this probability.")
    ] = None,
    top_k: Annotated[int | None, typer.Option(help="Sample from this many of the likeliest tokens.")] = None,
    seed: Annotated[int, typer.Option(help="For sampling.")] = 0,
    chat: Annotated[
        bool, typer.Option("--chat", help="Put the prompt into the chat template, as a user's message.")
    ] = False,
) -> None:
    """Continue a prompt with a safetensors or an ONNX checkpoint, showing the text as it comes."""
    from compressor.generation.generate import GenerationOptions, prepare

    options = GenerationOptions(
        max_new_tokens,
        temperature,
        top_p,
        top_k,
        seed,
        chat,
        device=computing.device,
        dtype=computing.dtype,
        revision=running.revision,
    )
    text = read_stdin() if prompt == "-" else prompt
    with progress_bars(running.as_json) as progress:
        continued = prepare(model, text, options, progress)
    pieces, interrupted = collect(continued, show=not running.as_json)
    if running.as_json:
        print_json(
            {
                "prompt": text,
                "text": "".join(pieces),
                "prompt_tokens": len(continued.prompt),
                "tokens": len(continued.tokens),
                "stopped": continued.stopped,
                "seconds_to_first_token": rounded(continued.first_seconds),
                "tokens_per_second": rounded(continued.tokens_per_second),
            }
        )
    if interrupted:
        raise SystemExit(INTERRUPTED)  # there is nothing to go on with, as main() would say of other commands


def collect(running: Iterable[str], show: bool) -> tuple[list[str], bool]:
    """The pieces, each printed as it comes if asked for; also whether Ctrl-C cut them short.

    A terminal gets no character that it would obey, as a model may say what a stranger wants to be obeyed.
    """
    pieces, interrupted, obeyed = list[str](), False, sys.stdout.isatty()
    try:
        for piece in running:
            pieces.append(piece)
            if show:
                print(readable(piece).replace("\r", "") if obeyed else piece, end="", flush=True)
    except KeyboardInterrupt:
        interrupted = True
    finally:
        if show:
            print(flush=True)
    return pieces, interrupted


def read_stdin() -> str:
    """All of standard input but the line break that ends it."""
    return sys.stdin.read().removesuffix("\n").removesuffix("\r")


def rounded(value: Any) -> float | None:
    """Three significant digits; None stays."""
    return None if value is None else float(f"{value:.3g}")
