"""The commands on items with answers: `reference` keeps what a model answers right, `comoe train` and `comoe evaluate`
tune a model by LoRA experts and ask it."""

from pathlib import Path
from typing import Annotated, Any

import typer

import compressor
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
from compressor.comoe.options import TARGETS, ComoeConfig, TuningOptions
from compressor.extras import TASKS, require
from compressor.options import Options


class ItemFlags(Options):
    """Items that a model answers."""

    tasks: str | None = None
    """lm-eval tasks of multiple choice, separated by commas; `comoe train` takes their training splits."""
    file: Path | None = None
    """Instead: a JSONL file with prompt, answer and, of multiple choice, choices; task names it."""
    limit: int | None = None
    """Items of each task, the first ones (default: all)."""
    include_path: Path | None = None
    """A folder with lm-eval task files of your own."""
    strict: bool = False
    """End at an item that cannot be used, instead of leaving it out."""

    def check_packages(self) -> None:
        """Refuse tasks without lm-eval."""
        if self.tasks:
            require(*TASKS)

    def arguments(self, file: str) -> dict[str, Any]:
        """Return the arguments of a function that reads items, with its name for their file."""
        return {**self.model_dump(exclude={"file"}), "tasks": listed(self.tasks, "--tasks") or (), file: self.file}


Items = Annotated[ItemFlags, options_of(ItemFlags, names={"file": "calibration"})]
HeldoutItems = Annotated[ItemFlags, options_of(ItemFlags, names={"file": "heldout"})]
app = typer.Typer(
    help="Tune a model by LoRA experts that a contrastive loss keeps distinct (CoMoE).", no_args_is_help=True
)


def reference(
    model: Model,
    output: Out,
    running: Reading,
    items: Items,
    embedding: Annotated[
        str, flag("How prompts are compared: own (the model's embeddings), or a sentence-transformers id.")
    ] = "own",
) -> None:
    """Ask a model items and keep those that it answers right, each with the experts it is routed to."""
    items.check_packages()
    from compressor.pathways.reference import reference_blocks
    from compressor.records import plain_json

    with progress_bars(running.as_json) as progress:
        reference_set = compressor.reference(
            model,
            output,
            **items.arguments("calibration"),
            embedding=embedding,
            overwrite=running.overwrite,
            **running.reading(progress),
        )
    print_report(
        running.as_json,
        plain_json(reference_set),
        (*reference_blocks(reference_set.facts, reference_set.asked), *written_line(reference_set.files)),
    )


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
    targets: Annotated[str, flag("How the names of the linear layers end.", EXPERTS)] = ",".join(TARGETS),
) -> None:
    """Train LoRA experts with a router beside a model's linear layers, on questions with answers.

    The adapters are written as safetensors with a config and a log. The same command goes on where a killed one was.
    """
    items.check_packages()
    require("accelerate")  # for transformers' Trainer
    from compressor.comoe.report import training_blocks
    from compressor.records import plain_json

    experts = {**config, "targets": tuple(listed(targets, "--targets") or ()), "seed": options.get("seed", 0)}
    with progress_bars(running.as_json) as progress:
        trained = compressor.train_comoe(
            model,
            output,
            **items.arguments("calibration"),
            options=TuningOptions(ComoeConfig(**experts), **options),
            overwrite=running.overwrite,
            **running.reading(progress),
        )
    print_report(running.as_json, plain_json(trained), (*training_blocks(trained), *written_line(trained.files)))


def evaluate(
    model: Model,
    adapters: Annotated[Path, flag("The folder that `comoe train` has written.")],
    running: Reading,
    items: HeldoutItems,
    with_base: Annotated[bool, flag("Evaluate the model without adapters, too.")] = False,
    batch_size: Annotated[int, flag("Items of a batch.", min=1)] = 16,
    output: Annotated[Path | None, flag("Write a report with pictures into this new folder.")] = None,
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
            with_base=with_base,
            batch_size=batch_size,
            **running.reading(progress),
        )
        files = [] if output is None else write_evaluation(evaluation, output, running.overwrite)
    print_report(running.as_json, plain_json(evaluation), (*evaluation_blocks(evaluation), *written_line(files)))


for command in (train, evaluate):
    app.command()(spread(alone(command, "comoe")))
