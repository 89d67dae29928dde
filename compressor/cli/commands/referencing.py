"""`reference`: the command that keeps what a model answers right, for pathways to be learnt from."""

from pathlib import Path
from typing import Annotated

import typer

import compressor
from compressor.cli.options import Computing, Model, Out, Running, listed
from compressor.cli.terminal import progress_bars, tell


def reference(
    model: Model,
    output: Out,
    computing: Computing,
    running: Running,
    tasks: Annotated[str | None, typer.Option(help="lm-eval tasks of multiple choice, separated by commas.")] = None,
    data: Annotated[
        Path | None, typer.Option(help="Instead: a JSONL file with prompt, answer and, of multiple choice, choices.")
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Items of each task, the first ones (default: all).")] = None,
    include_path: Annotated[Path | None, typer.Option(help="A folder with lm-eval task files of your own.")] = None,
    embedding: Annotated[
        str, typer.Option(help="How prompts are compared: own (the model's embeddings), or a sentence-transformers id.")
    ] = "own",
) -> None:
    """Ask a model items and keep those that it answers right, each with the experts that it visits."""
    from compressor.cli.rendering import written_line
    from compressor.pathways.reference import reference_blocks
    from compressor.records import plain_json

    with progress_bars(running.as_json) as progress:
        made = compressor.reference(
            model,
            output,
            tasks=listed(tasks, "--tasks") or (),
            data=data,
            limit=limit,
            include_path=include_path,
            embedding=embedding,
            device=computing.device,
            dtype=computing.dtype,
            revision=running.revision,
            overwrite=running.overwrite,
            progress=progress,
        )
    tell(running.as_json, plain_json(made), (*reference_blocks(made.facts, made.asked), *written_line(made.files)))
