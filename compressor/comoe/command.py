"""`comoe train` and `comoe evaluate`, which tune a model by LoRA experts and ask it; torch is
loaded when they run."""

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

import compressor
from compressor.cli.items import HeldoutItems, Items
from compressor.cli.options import (
    EXPERTS,
    TRAINING,
    Model,
    Out,
    Reading,
    flag,
    listed,
    options_of,
    spread,
)
from compressor.cli.terminal import alone, print_report, progress_bars, reporting, written_line
from compressor.comoe.options import TARGETS, AskingOptions, ComoeConfig, TuningOptions
from compressor.extras import require

app = typer.Typer(
    help="Tune a model by LoRA experts that a contrastive loss keeps distinct (CoMoE).",
    no_args_is_help=True,
)
one_process = partial(alone, group="comoe")


@app.command()
@spread
@one_process
def train(
    model: Model,
    output: Out,
    running: Reading,
    config: Annotated[
        dict[str, Any],
        options_of(ComoeConfig, EXPERTS, without=("targets", "seed")),
    ],
    options: Annotated[dict[str, Any], options_of(TuningOptions, TRAINING)],
    items: Items,
    targets: Annotated[str, flag("How the names of the linear layers end.", EXPERTS)] = ",".join(
        TARGETS
    ),
) -> None:
    """Train LoRA experts with a router beside a model's linear layers, on questions with answers.

    The adapters are written as safetensors with a config and a log. The same command goes on where
    a killed one was."""
    items.check_packages()
    require("accelerate")  # for transformers' Trainer
    from compressor.comoe.report import training_blocks
    from compressor.records import plain_json

    experts = {
        **config,
        "targets": tuple(listed(targets, "--targets") or ()),
        "seed": options.get("seed", 0),
    }
    with progress_bars(running.as_json) as progress:
        trained = compressor.train_comoe(
            model,
            output,
            **items.arguments("calibration"),
            options=TuningOptions(config=ComoeConfig(**experts), **options),
            overwrite=running.overwrite,
            **running.reading(progress),
        )
    print_report(
        running.as_json,
        plain_json(trained),
        (*training_blocks(trained), *written_line(trained.files)),
    )


@app.command()
@spread
@one_process
def evaluate(
    model: Model,
    adapters: Annotated[Path, flag("The folder that `comoe train` has written.")],
    running: Reading,
    items: HeldoutItems,
    options: Annotated[AskingOptions, options_of(AskingOptions)],
    output: Annotated[
        Path | None, flag("Write a report with pictures into this new folder.")
    ] = None,
) -> None:
    """Ask a model with LoRA experts, and show which experts work on which task.

    The most probable choice counts; without choices, what the model generates.
    """
    items.check_packages()
    if output is not None:
        require("matplotlib", "jinja2")
    from compressor.comoe.report import NAMES, evaluation_blocks, write_evaluation
    from compressor.records import plain_json

    with reporting(output, NAMES, running.overwrite, running.as_json) as progress:
        evaluation = compressor.evaluate_comoe(
            model,
            adapters,
            **items.arguments("heldout"),
            **options.model_dump(),
            **running.reading(progress),
        )
        files = [] if output is None else write_evaluation(evaluation, output, running.overwrite)
    print_report(
        running.as_json,
        plain_json(evaluation),
        (*evaluation_blocks(evaluation), *written_line(files)),
    )
