"""The commands `evaluate`, two models' behaviour, and `traces`, complete answers for
calibration."""

from pathlib import Path
from typing import Annotated, Any

import typer

import compressor
from compressor.answers.options import AnswerOptions, ServerOptions
from compressor.cli.options import (
    BEHAVIOUR_OPTIONS,
    SERVER_OPTIONS,
    Out,
    Reading,
    Writing,
    flag,
    options_of,
)
from compressor.cli.terminal import print_report, progress_bars, reporting
from compressor.data.sources import refuse_absent_texts
from compressor.document.blocks import Block, Facts, Text
from compressor.errors import CompressionError
from compressor.extras import require
from compressor.files import refuse_absent
from compressor.quality_gate.options import BehaviourOptions

USUAL_CONFIDENCE = 0.95
Limit = Annotated[
    int | None, flag("Prompts of each source, at most (default: all, of a data set 1,000).")
]
BatchSize = Annotated[
    int | None, flag("Answers written together (default: 32, on a GPU 64).", min=1)
]


def evaluate(
    options: Annotated[BehaviourOptions, BEHAVIOUR_OPTIONS],
    servers: Annotated[dict[str, Any], SERVER_OPTIONS],
    running: Reading,
    base: Annotated[str, typer.Argument(help="The base: a checkpoint folder or a Hub id.")],
    smaller: Annotated[
        str | None,
        typer.Argument(
            help="The smaller model; of one that is served, its tokenizer (default: the base's)."
        ),
    ] = None,
    limit: Limit = None,
    batch_size: BatchSize = None,
    confidence: Annotated[float, flag("Confidence of each bound.")] = USUAL_CONFIDENCE,
    output: Annotated[
        Path | None,
        flag("New folder for behaviour.json, behaviour.md, answers.html and answers.jsonl."),
    ] = None,
    smaller_revision: Annotated[
        str | None, flag("Branch, tag or commit of the smaller model's Hub id.")
    ] = None,
    cache_dir: Annotated[
        Path | None, flag("Folder of answers to reuse (default: the user's cache folder).")
    ] = None,
) -> None:
    """Compare how two models behave: what they write to the same prompts, whether they end, and
    whether they loop."""
    if output is not None:
        require("jinja2")
    refuse_absent_texts(options.prompts, "prompts")
    refuse_absent_texts(options.text, "text")
    for model in (base, smaller):
        refuse_absent(model)
    from compressor.quality_gate.behaviour_report import NAMES, behaviour_blocks, write_behaviour
    from compressor.quality_gate.verdict import check_confidence

    check_confidence(confidence)
    if not options.prompts and not options.reads:
        raise CompressionError(
            "nothing is asked; name --prompts, such as a JSONL file with chats, or demo; or name "
            "--text"
        )
    with reporting(output, NAMES, running.overwrite, running.as_json) as progress:
        behaviour = compressor.evaluate(
            base,
            smaller,
            options,
            limit=limit,
            servers=ServerOptions(**servers),
            confidence=confidence,
            batch_size=batch_size,
            smaller_revision=smaller_revision,
            cache=cache_dir,
            announce=None if running.as_json else typer.echo,
            **running.reading(progress),
        )
        written = [] if output is None else write_behaviour(behaviour, output, running.overwrite)
    content = {**behaviour.to_dict(), "files": [str(path) for path in written]}
    print_report(running.as_json, content, behaviour_blocks(behaviour, written))


def traces(
    options: Annotated[AnswerOptions, options_of(AnswerOptions)],
    servers: Annotated[
        dict[str, Any], [option for option in SERVER_OPTIONS if not option[0].startswith("base_")]
    ],
    running: Writing,
    model: Annotated[
        str, typer.Argument(help="A checkpoint folder or a Hub id; with --server its tokenizer.")
    ],
    output: Out,
    limit: Limit = None,
    batch_size: BatchSize = None,
    seed: Annotated[int, flag("The first of the seeds.", min=0)] = 0,
) -> None:
    """Write a model's own complete answers to prompts into a JSONL file that --calibration
    reads."""
    refuse_absent_texts(options.prompts, "prompts")
    refuse_absent(model)
    with progress_bars(running.as_json) as progress:
        written = compressor.traces(
            model,
            options,
            output,
            limit=limit,
            seed=seed,
            server=ServerOptions(**servers),
            batch_size=batch_size,
            overwrite=running.overwrite,
            **running.reading(progress),
        )
    dropped = "".join(f", {count:,} {reason}" for reason, count in written.dropped.items())
    blocks: list[Block] = [
        Facts(
            (
                ("Model", written.model),
                ("Answers", f"{written.asked:,} asked, {written.kept:,} kept{dropped}"),
            )
        ),
        Text(f"Written: {written.file}, {written.manifest}"),
        Text(f"Next: moe-compress compress {model} --calibration {written.file}"),
    ]
    print_report(running.as_json, written, blocks)
