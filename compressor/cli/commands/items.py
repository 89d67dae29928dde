"""The commands on items with answers: `reference` keeps what a model answers right, `comoe train` and `comoe evaluate`
tune a model by LoRA experts and ask it."""

from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

import compressor
from compressor.cli.options import (
    EXPERTS,
    TRAINING,
    Computing,
    Flags,
    Model,
    Out,
    Running,
    dataclass_options,
    described,
    listed,
    spread,
)
from compressor.cli.terminal import alone, progress_bars, tell
from compressor.comoe.options import ComoeConfig, TuningOptions

TARGETS = ",".join(ComoeConfig().targets)


@dataclass(frozen=True, slots=True)
class ItemFlags:
    """Which items are asked."""

    tasks: str | None = described(
        None, None, "lm-eval tasks of multiple choice, separated by commas; `comoe train` asks their training splits."
    )
    data: Path | None = described(
        None, None, "Instead: a JSONL file with prompt, answer and, of multiple choice, choices; task names it."
    )
    limit: int | None = described(None, None, "Items of each task, the first ones (default: all).")
    include_path: Path | None = described(None, None, "A folder with lm-eval task files of your own.")

    def given(self) -> dict[str, Any]:
        """What the functions behind these commands take."""
        return {**asdict(self), "tasks": listed(self.tasks, "--tasks") or ()}


app = typer.Typer(
    help="Tune a model by LoRA experts that a contrastive loss keeps distinct (CoMoE).", no_args_is_help=True
)


def reference(
    model: Model,
    output: Out,
    computing: Computing,
    running: Running,
    items: ItemFlags,
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
            **items.given(),
            embedding=embedding,
            **computing.arguments(running, progress),
        )
    tell(running.as_json, plain_json(made), (*reference_blocks(made.facts, made.asked), *written_line(made.files)))


def train(
    model: Model,
    output: Out,
    computing: Computing,
    running: Running,
    config: Annotated[dict[str, Any], Flags(partial(dataclass_options, ComoeConfig, panel=EXPERTS))],
    options: Annotated[dict[str, Any], Flags(partial(dataclass_options, TuningOptions, panel=TRAINING))],
    items: ItemFlags,
    targets: Annotated[
        str, typer.Option(help="How the names of the linear layers end.", rich_help_panel=EXPERTS)
    ] = TARGETS,
) -> None:
    """Train LoRA experts with a router beside a model's linear layers, on questions with answers.

    The adapters are written as safetensors with a config and a log. The same command goes on where a killed one was.
    """
    from compressor.cli.rendering import written_line
    from compressor.comoe.report import training_blocks
    from compressor.records import plain_json

    named = tuple(listed(targets, "--targets") or ())
    options["contrastive_tokens"] = options["contrastive_tokens"] or None
    with progress_bars(running.as_json) as progress:
        made = compressor.train_comoe(
            model,
            output,
            **items.given(),
            config=ComoeConfig(**config, targets=named, seed=options["seed"]),
            options=TuningOptions(**options),
            **computing.arguments(running, progress),
        )
    tell(running.as_json, plain_json(made), (*training_blocks(made), *written_line(made.files)))


def evaluate(
    model: Model,
    adapters: Annotated[Path, typer.Option(help="The folder that `comoe train` has written.")],
    computing: Computing,
    running: Running,
    items: ItemFlags,
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
            **items.given(),
            base=base,
            output=output,
            batch_size=batch_size,
            **computing.arguments(running, progress),
        )
    files = [] if output is None else [output / name for name in NAMES]
    tell(running.as_json, plain_json(made), (*evaluation_blocks(made), *written_line(files)))


for command in (train, evaluate):
    app.command()(spread(alone(command, "comoe")))
