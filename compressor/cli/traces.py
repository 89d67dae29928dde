"""`traces`: a model's own complete answers, to calibrate on."""

from typing import Annotated, Any

import typer

import compressor
from compressor.cli.options import BEHAVIOUR_OPTIONS, SERVER_OPTIONS, Out, Writing, flag
from compressor.cli.terminal import print_report, progress_bars
from compressor.document.blocks import Block, Facts, Text
from compressor.errors import CompressionError
from compressor.evaluation.options import ServerOptions
from compressor.recipe.recipe import BehaviourOptions, validated
from compressor.records import plain_json

ASKED = ("prompts", "max_new_tokens", "temperature", "top_p", "seeds", "chat", "strict")


def traces(
    options: Annotated[dict[str, Any], [option for option in BEHAVIOUR_OPTIONS if option[0] in ASKED]],
    servers: Annotated[dict[str, Any], [option for option in SERVER_OPTIONS if not option[0].startswith("base_")]],
    running: Writing,
    model: Annotated[str, typer.Argument(help="A checkpoint folder or a Hub id; with --server its tokenizer.")],
    output: Out,
    limit: Annotated[int | None, flag("Prompts of each source, at most (default: all, of a data set 1,000).")] = None,
    batch_size: Annotated[int | None, flag("Answers written together (default: 32, on a GPU 64).", min=1)] = None,
    seed: Annotated[int, flag("The first of the seeds.", min=0)] = 0,
) -> None:
    """Write a model's own complete answers to prompts into a JSONL file that --calibration reads."""
    from compressor.pipeline.gate import answering_of

    answering = answering_of(validated(BehaviourOptions, options, "the command line"), limit)
    if answering is None:
        raise CompressionError("nothing is asked; name --prompts, such as a JSONL file with chats, or demo")
    with progress_bars(running.as_json) as progress:
        written = compressor.traces(
            model,
            answering,
            output,
            seed=seed,
            server=ServerOptions(**servers),
            batch_size=batch_size,
            overwrite=running.overwrite,
            **running.reading(progress),
        )
    dropped = "".join(f", {count:,} {reason}" for reason, count in written.dropped.items())
    blocks: list[Block] = [
        Facts((("Model", written.model), ("Answers", f"{written.asked:,} asked, {written.kept:,} kept{dropped}"))),
        Text(f"Written: {written.file}, {written.manifest}"),
        Text(f"Next: moe-compress compress {model} --calibration {written.file}"),
    ]
    print_report(running.as_json, plain_json(written), blocks)
