"""`recover`: a smaller model trained toward its original."""

from typing import Annotated

import typer

from compressor.cli.announcing import announcing
from compressor.cli.options import COMPUTING, Model, Out, Running, Yes
from compressor.cli.terminal import command_line, progress_bars
from compressor.planning.request import CALIBRATION, LOSS, TRAINING, Request


def recover(
    checkpoint: Model,
    output: Out,
    running: Running,
    request: Annotated[Request, ("seed", *COMPUTING)],
    teacher: Annotated[str, typer.Option(help="The model that the checkpoint was made of: a folder or a Hub id.")],
    data: Annotated[
        list[str],
        typer.Option(help="Text to train on, as --calibration of `compress`.", rich_help_panel=CALIBRATION),
    ],
    method: Annotated[
        str, typer.Option(help="What is trained: experts (and routers), router, lora or all.", rich_help_panel=TRAINING)
    ] = "experts",
    distill: Annotated[
        float, typer.Option(help="Weight of the divergence from the teacher's next token.", rich_help_panel=LOSS)
    ] = 1.0,
    cross_entropy: Annotated[
        float, typer.Option(help="Weight of the loss of the text's own next token.", rich_help_panel=LOSS)
    ] = 0.0,
    hidden_states: Annotated[
        float, typer.Option(help="Weight of the distance from the teacher's last states.", rich_help_panel=LOSS)
    ] = 0.0,
    contrastive: Annotated[
        float, typer.Option(help="Weight of CoMoE's contrastive loss of the experts.", rich_help_panel=LOSS)
    ] = 0.0,
    temperature: Annotated[float, typer.Option(help="Of the contrastive loss.", rich_help_panel=LOSS)] = 0.07,
    negatives: Annotated[
        int, typer.Option(help="Inactive experts that the contrastive loss samples.", rich_help_panel=LOSS)
    ] = 8,
    steps: Annotated[int, typer.Option(help="Of the optimizer.", rich_help_panel=TRAINING)] = 400,
    tokens_per_step: Annotated[int, typer.Option(help="Tokens of a step.", rich_help_panel=TRAINING)] = 2048,
    learning_rate: Annotated[
        float | None,
        typer.Option(
            help="At its highest (default: experts and all 1e-3, lora 2e-3, router 3e-3).", rich_help_panel=TRAINING
        ),
    ] = None,
    optimizer: Annotated[
        str | None,
        typer.Option(help="adam or adafactor (default: adam, with --stream adafactor).", rich_help_panel=TRAINING),
    ] = None,
    rank: Annotated[int, typer.Option(help="Of LoRA's factors.", rich_help_panel=TRAINING)] = 16,
    stream: Annotated[
        bool,
        typer.Option("--stream", help="Train with one layer in memory at a time.", rich_help_panel=TRAINING),
    ] = False,
    evaluate_every: Annotated[
        int | None,
        typer.Option(help="Steps between evaluations (default: an eighth of them).", rich_help_panel=TRAINING),
    ] = None,
    patience: Annotated[
        int, typer.Option(help="Evaluations without a better one before it stops.", rich_help_panel=TRAINING)
    ] = 8,
    sequence_length: Annotated[int, typer.Option(help="Tokens in each sequence.", rich_help_panel=CALIBRATION)] = 256,
    yes: Yes = False,
) -> None:
    """Train back what a smaller model has lost, toward its original's next-token distribution on text."""
    from compressor.api import recovering
    from compressor.cli.recovered import show_recovery
    from compressor.steps.distill.options import Recovery
    from compressor.steps.distill.ranks import present

    options = Recovery(
        method,
        distill,
        cross_entropy,
        hidden_states,
        contrastive,
        temperature,
        negatives,
        steps,
        tokens_per_step,
        learning_rate,
        optimizer,
        rank,
        stream,
        sequence_length,
        evaluate_every,
        patience,
    )
    with progress_bars(running.as_json) as progress:
        summary = recovering.recover(
            checkpoint,
            output,
            teacher=teacher,
            data=data,
            options=options,
            seed=request.seed,
            revision=running.revision,
            device=request.device,
            dtype=request.dtype,
            overwrite=running.overwrite,
            progress=progress,
            command=command_line(),
            announce=announcing(progress, yes, running.as_json),
        )
    if present().first:
        show_recovery(summary, running.as_json)
