"""`comoe train` and `comoe evaluate`: the commands that tune a model by LoRA experts, and ask it."""

from pathlib import Path
from typing import Annotated

import typer

import compressor
from compressor.cli.options import Computing, Model, Out, Running, listed
from compressor.cli.parameters import spread
from compressor.cli.ranks import alone
from compressor.cli.terminal import progress_bars, tell

EXPERTS, TRAINING = "Experts", "Training"
TARGETS = "q_proj,k_proj,v_proj,o_proj"

Data = Annotated[
    Path | None, typer.Option(help="A JSONL file with prompt, answer and, of multiple choice, choices; task names it.")
]
Limit = Annotated[int | None, typer.Option(help="Items of each task, the first ones (default: all).")]
Include = Annotated[Path | None, typer.Option(help="A folder with lm-eval task files of your own.")]

app = typer.Typer(
    help="Tune a model by LoRA experts that a contrastive loss keeps distinct (CoMoE).", no_args_is_help=True
)


def train(
    model: Model,
    output: Out,
    computing: Computing,
    running: Running,
    tasks: Annotated[
        str | None, typer.Option(help="lm-eval tasks of multiple choice with training splits, separated by commas.")
    ] = None,
    data: Data = None,
    limit: Limit = None,
    include_path: Include = None,
    rank: Annotated[int, typer.Option(help="Of each expert.", rich_help_panel=EXPERTS)] = 16,
    experts: Annotated[int, typer.Option(help="Beside each layer.", rich_help_panel=EXPERTS)] = 4,
    top_k: Annotated[int, typer.Option(help="Experts that a token activates.", rich_help_panel=EXPERTS)] = 2,
    targets: Annotated[
        str, typer.Option(help="How the names of the linear layers end.", rich_help_panel=EXPERTS)
    ] = TARGETS,
    alpha: Annotated[
        float | None,
        typer.Option(
            help="What experts add is multiplied by alpha / rank (default: twice the rank).", rich_help_panel=EXPERTS
        ),
    ] = None,
    dropout: Annotated[float, typer.Option(help="Of what experts get.", rich_help_panel=EXPERTS)] = 0.05,
    contrastive: Annotated[
        float, typer.Option(help="Weight of the contrastive loss; 0 leaves it out.", rich_help_panel=TRAINING)
    ] = 0.01,
    temperature: Annotated[float, typer.Option(help="Of the contrastive loss.", rich_help_panel=TRAINING)] = 0.07,
    contrastive_tokens: Annotated[
        int,
        typer.Option(help="Tokens of a batch that it is computed on in each layer; 0: all.", rich_help_panel=TRAINING),
    ] = 512,
    steps: Annotated[int | None, typer.Option(help="Instead of epochs.", rich_help_panel=TRAINING)] = None,
    epochs: Annotated[float, typer.Option(help="Times that all items are seen.", rich_help_panel=TRAINING)] = 2.0,
    batch_size: Annotated[int, typer.Option(help="Items of a batch.", rich_help_panel=TRAINING)] = 16,
    accumulation: Annotated[int, typer.Option(help="Batches of a step.", rich_help_panel=TRAINING)] = 1,
    learning_rate: Annotated[
        float, typer.Option(help="Of AdamW; it falls to 0 in a line.", rich_help_panel=TRAINING)
    ] = 2e-4,
    warmup: Annotated[
        float, typer.Option(help="Share of the steps in which the rate rises.", rich_help_panel=TRAINING)
    ] = 0.0,
    seed: Annotated[int, typer.Option(help="For everything that is drawn.", rich_help_panel=TRAINING)] = 0,
    log_every: Annotated[int, typer.Option(help="Steps of a line in the log.", rich_help_panel=TRAINING)] = 10,
    save_every: Annotated[
        int, typer.Option(help="Steps after which a killed run can go on.", rich_help_panel=TRAINING)
    ] = 100,
) -> None:
    """Train LoRA experts with a router beside a model's linear layers, on questions with answers.

    The adapters are written as safetensors with a config and a log. The same command goes on where a killed one was.
    """
    from compressor.cli.rendering import written_line
    from compressor.comoe.options import ComoeConfig, TuningOptions
    from compressor.comoe.report import training_blocks
    from compressor.records import plain_json

    config = ComoeConfig(rank, experts, top_k, tuple(listed(targets, "--targets") or ()), alpha, dropout, seed)
    options = TuningOptions(
        contrastive,
        temperature,
        contrastive_tokens or None,
        steps,
        epochs,
        batch_size,
        accumulation,
        learning_rate,
        warmup,
        seed,
        log_every,
        save_every,
    )
    with progress_bars(running.as_json) as progress:
        made = compressor.train_comoe(
            model,
            output,
            tasks=listed(tasks, "--tasks") or (),
            data=data,
            limit=limit,
            include_path=include_path,
            config=config,
            options=options,
            device=computing.device,
            dtype=computing.dtype,
            revision=running.revision,
            overwrite=running.overwrite,
            progress=progress,
        )
    tell(running.as_json, plain_json(made), (*training_blocks(made), *written_line(made.files)))


def evaluate(
    model: Model,
    adapters: Annotated[Path, typer.Option(help="The folder that `comoe train` has written.")],
    computing: Computing,
    running: Running,
    tasks: Annotated[str | None, typer.Option(help="lm-eval tasks of multiple choice, separated by commas.")] = None,
    data: Data = None,
    limit: Limit = None,
    include_path: Include = None,
    base: Annotated[bool, typer.Option("--base", help="Ask the model without adapters, too.")] = False,
    batch_size: Annotated[int, typer.Option(help="Items of a batch.")] = 16,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write a report with pictures into this new folder.")
    ] = None,
) -> None:
    """Ask a model with LoRA experts, and show which experts work on which task.

    Of choices the likeliest counts; without choices, what the model writes by itself.
    """
    from compressor.cli.rendering import written_line
    from compressor.comoe.report import NAMES, evaluation_blocks
    from compressor.records import plain_json

    with progress_bars(running.as_json) as progress:
        made = compressor.evaluate_comoe(
            model,
            adapters,
            tasks=listed(tasks, "--tasks") or (),
            data=data,
            limit=limit,
            include_path=include_path,
            base=base,
            output=output,
            batch_size=batch_size,
            device=computing.device,
            dtype=computing.dtype,
            revision=running.revision,
            overwrite=running.overwrite,
            progress=progress,
        )
    files = [] if output is None else [output / name for name in NAMES]
    tell(running.as_json, plain_json(made), (*evaluation_blocks(made), *written_line(files)))


for command in (train, evaluate):
    app.command()(spread(alone(command, "comoe")))
