"""`calibrate-router`: the routers of a smaller model moved toward its original."""

from typing import Annotated

import typer

from compressor.cli.options import COMPUTING, Model, Out, Running
from compressor.cli.terminal import command_line, progress_bars
from compressor.planning.request import CALIBRATION, Request


def calibrate_router(
    checkpoint: Model,
    output: Out,
    running: Running,
    request: Annotated[Request, ("seed", *COMPUTING)],
    teacher: Annotated[str, typer.Option(help="The model that the checkpoint was made of: a folder or a Hub id.")],
    data: Annotated[
        list[str],
        typer.Option(help="Text to move them on, as --calibration of `compress`.", rich_help_panel=CALIBRATION),
    ],
    bake: Annotated[
        str, typer.Option(help="What is moved: router (weights), bias (one for each expert) or auto (the better one).")
    ] = "router",
    reference: Annotated[
        str | None,
        typer.Option(help="Reference set of the checkpoint, of whose optimised pathways a bias is the average."),
    ] = None,
    optimizer: Annotated[
        str, typer.Option(help="What optimises them: own (each item's answer), mode, kernel or ngd.")
    ] = "own",
    rounds: Annotated[int, typer.Option(help="Gradients, each on its share of the text.", min=1)] = 4,
    sequences: Annotated[
        int, typer.Option(help="Sequences of text; 48 more judge.", min=1, rich_help_panel=CALIBRATION)
    ] = 400,
    sequence_length: Annotated[
        int, typer.Option(help="Tokens in each of them.", min=2, rich_help_panel=CALIBRATION)
    ] = 256,
) -> None:
    """Move a smaller model's routers toward its original on text, as far as held-out text likes it (after C3PO)."""
    from compressor.api import baking
    from compressor.cli.baked import show_bake

    with progress_bars(running.as_json) as progress:
        summary = baking.calibrate_router(
            checkpoint,
            output,
            teacher=teacher,
            calibration=data,
            bake=bake,
            reference=reference,
            optimizer=optimizer,
            rounds=rounds,
            sequences=sequences,
            sequence_length=sequence_length,
            seed=request.seed,
            revision=running.revision,
            device=request.device,
            dtype=request.dtype,
            overwrite=running.overwrite,
            progress=progress,
            command=command_line(),
        )
    show_bake(summary, running.as_json)
