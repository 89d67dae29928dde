"""The commands that make models: `plan`, `apply` and `compress`, and `split`, `calibrate-router` and `distill`."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

import compressor
from compressor.cli.commands.gating import compress_under_gate
from compressor.cli.commands.outputs import check_access, push_made
from compressor.cli.gguf_files import CHOOSING, Imatrix, compress_file, plan_of_file, show_gguf_summary, takes_gguf
from compressor.cli.options import (
    CALIBRATION,
    STEPS,
    Computing,
    Flags,
    GateOptions,
    Model,
    Out,
    Publishing,
    Running,
    StrategyOptions,
    TextFlags,
    UnderGate,
    listed,
    step_options,
)
from compressor.cli.step_flags import SetFlag, flags, recipe_of_flags
from compressor.cli.terminal import command_line, progress_bars
from compressor.distributed.ranks import held, here, refuse_several
from compressor.errors import CompressionError
from compressor.recipe.recipe import GateOptions as RecipeGate
from compressor.recipe.recipe import OutputOptions, Recipe
from compressor.recipe.step import Step, TextOptions
from compressor.steps.distill.step import Distill
from compressor.steps.routers.step import Routers
from compressor.steps.split.step import Split

MONE = "mone"  # the format in which constants stand for experts
OWN_TEXT = ("calibration", "seed")  # of steps whose sequences are options of their own
Source = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL", help="A checkpoint folder, a Hub id such as org/model, a GGUF file, or a recipe.yaml."
    ),
]
StepFlags = Annotated[dict[str, Any], Flags(flags)]


def plan(
    context: typer.Context,
    output: Out,
    step_flags: StepFlags,
    text: TextFlags,
    strategy_options: StrategyOptions,
    setting: SetFlag,
    computing: Computing,
    running: Running,
    model: Source = None,
    format: Annotated[
        str, typer.Option("--format", help="safetensors, or mone: a plan with constants for what is dropped.")
    ] = "safetensors",
    per_source: Annotated[
        bool,
        typer.Option(
            "--per-source",
            help="Plan for each calibration source alone, too: PLAN.<source>.json.",
            rich_help_panel=CALIBRATION,
        ),
    ] = False,
    imatrix: Imatrix = None,
) -> None:
    """Decide what to do with every expert and write it as JSON; no weight is written."""
    from compressor.api import compressing
    from compressor.cli import rendering
    from compressor.data.sources import parse_sources, short_names
    from compressor.recipe.steps_plan import check_files, source_files, write_plans

    if takes_gguf(context, model, imatrix, CHOOSING):
        refuse_several("a GGUF file")
        return plan_of_file(str(model), output, step_flags, imatrix, running.overwrite, running.as_json)
    constants = MONE in (listed(format, "--format") or ())
    recipe = _recipe(model, step_flags, text, strategy_options, setting, computing, running, constants)
    sources = parse_sources(recipe.calibration.data) if per_source and recipe.calibration.data else ()
    outputs = [output, *source_files(output, short_names([entry.source for entry in sources]))]
    here().broadcast(lambda: check_files(outputs, running.overwrite))
    with held(output), progress_bars(running.as_json) as progress:
        if per_source:
            made = compressing.plan_per_source(recipe, device=computing.device, progress=progress)
        else:
            made = [compressing.plan(recipe, device=computing.device, progress=progress)]
        if here().is_first:
            check_files(outputs, running.overwrite)  # planning takes a while
            write_plans(outputs, made)
    rendering.show_plans(made, outputs, running.as_json)


def _recipe(
    model: str | None,
    step_flags: dict[str, Any],
    text: TextFlags,
    strategy_options: StrategyOptions,
    setting: SetFlag,
    computing: Computing,
    running: Running,
    constants: bool,
) -> Recipe:
    if model is None:
        raise CompressionError("Missing argument 'MODEL'; see moe-compress compress --help")
    return recipe_of_flags(
        model, step_flags, text, strategy_options, computing, setting.set or (), running.revision, constants
    )


def apply(
    plan_file: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan made by `moe-compress plan`.")],
    output: Out,
    running: Annotated[Running, ("overwrite", "as_json")],
    model: Annotated[
        str | None, typer.Option(help="The source checkpoint, if it is not where the plan says, or its GGUF file.")
    ] = None,
) -> None:
    """Carry out a plan and write the smaller checkpoint."""
    from compressor.cli import rendering
    from compressor.gguf_files.header import is_gguf

    with progress_bars(running.as_json) as progress:
        if is_gguf(model):
            refuse_several("a GGUF file")
            made = compressor.apply_gguf(plan_file, str(model), output, overwrite=running.overwrite, progress=progress)
            return show_gguf_summary(made, running.as_json)
        outcome = compressor.apply(
            plan_file, output, model=model, overwrite=running.overwrite, progress=progress, command=command_line()
        )
    rendering.show_outcome(outcome, running.as_json)


def compress(
    context: typer.Context,
    output: Out,
    step_flags: StepFlags,
    text: TextFlags,
    strategy_options: StrategyOptions,
    setting: SetFlag,
    under_gate: UnderGate,
    gate_options: GateOptions,
    publishing: Publishing,
    computing: Computing,
    running: Running,
    model: Source = None,
    format: Annotated[
        str | None,
        typer.Option(
            "--format",
            help="safetensors, onnx or another exporter, or both: safetensors,onnx (in the subfolder onnx); or mone: "
            "constants for what is dropped, as vLLM serves them.",
        ),
    ] = None,
    imatrix: Imatrix = None,
) -> None:
    """Carry out a recipe's steps, or split, prune and correct; an interrupted run goes on when it is run again."""
    from compressor.api import exporting
    from compressor.cli import rendering

    if takes_gguf(context, model, imatrix, CHOOSING):
        refuse_several("a GGUF file")
        return compress_file(str(model), output, step_flags, imatrix, running.overwrite, running.as_json)
    asked = listed(format, "--format") or ()
    if MONE in asked and set(asked) != {MONE}:
        raise CompressionError(f"--format {format}: {MONE} is written alone; name one format")
    recipe = _recipe(model, step_flags, text, strategy_options, setting, computing, running, MONE in asked)
    recipe = _with_gate_and_output(recipe, under_gate, gate_options, asked)
    constants = any(step.name == "constants" for step in recipe.steps)
    formats = exporting.read_formats((exporting.WRITER,) if constants else recipe.output.formats)
    if constants and recipe.gate is not None:
        raise CompressionError("--gate loads the output by stock transformers, which cannot load --format mone")
    if publishing.push_to_hub is not None:
        check_access(publishing.push_to_hub, publishing.private)
    if recipe.gate is not None:
        compress_under_gate(recipe, output, formats, under_gate, gate_options, publishing, computing, running)
    with progress_bars(running.as_json) as progress:
        outcome = compressor.compress(
            recipe,
            output,
            overwrite=running.overwrite,
            progress=progress,
            device=computing.device,
            accept=exporting.additions(formats, progress),
            terms=",".join(formats),
            command=command_line(),
        )
    if not here().is_first:
        return
    pushed = push_made(output, publishing, None, running.as_json)
    rendering.show_outcome(outcome, running.as_json, pushed)


def _with_gate_and_output(
    recipe: Recipe, under_gate: UnderGate, options: GateOptions, formats: Sequence[str]
) -> Recipe:
    """The recipe with what the command line says of gate and formats."""
    changes: dict[str, Any] = {}
    if formats and set(formats) != {MONE}:
        changes["output"] = OutputOptions(**{**recipe.output.model_dump(), "formats": tuple(formats)})
    tasks = listed(under_gate.gate, "--gate")
    if tasks is not None or recipe.gate is not None:
        found = {} if recipe.gate is None else recipe.gate.model_dump()
        found |= {"tasks": tuple(tasks)} if tasks is not None else {}
        changes["gate"] = RecipeGate(**{**found, **options.given()})
    elif under_gate.keep_failed or under_gate.search:
        raise CompressionError("--keep-failed and --search go with --gate; name the tasks to pass")
    return recipe.model_copy(update=changes)


def split(
    model: Model,
    output: Out,
    running: Running,
    text: TextFlags,
    computing: Computing,
    options: Annotated[
        dict[str, Any], Flags(partial(step_options, Split, STEPS, {"split": "parts", "split_by": "by"}))
    ],
) -> None:
    """Split each routed expert into narrower ones that compute the same; `compress` can then drop them one by one."""
    given = {"parts": options["split"], "by": options["split_by"]}
    _carry_out("split", model, output, running, text, computing, given)


def _against_base(step: type[Step], name: str, text: str) -> Callable[..., None]:
    """A command that carries out a step on a smaller model, which it compares with its base."""

    def command(
        checkpoint: Model,
        output: Out,
        running: Running,
        text: Annotated[TextFlags, OWN_TEXT],
        computing: Computing,
        base: Annotated[str, typer.Option(help="The model that the checkpoint was made of: a folder or a Hub id.")],
        options: Annotated[dict[str, Any], Flags(partial(step_options, step, STEPS))],
    ) -> None:
        _carry_out(step.name, checkpoint, output, running, text, computing, options, base)

    command.__name__, command.__doc__ = name, text
    return command


calibrate_router = _against_base(
    Routers,
    "calibrate_router",
    "Move a smaller model's routers toward its base on text, as far as held-out text is nearer to it (after C3PO).",
)
distill = _against_base(Distill, "distill", "Train a smaller model toward its base's next-token distribution on text.")


def _carry_out(
    name: str,
    checkpoint: str,
    output: Any,
    running: Running,
    text: TextFlags,
    computing: Computing,
    options: dict[str, Any],
    base: str | None = None,
) -> None:
    from compressor.api.compressing import change
    from compressor.cli.rendering import show_outcome

    revision = {"revision": running.revision} if base is None else {"base": base, "base_revision": running.revision}
    with progress_bars(running.as_json) as progress:
        outcome = change(
            name,
            checkpoint,
            output,
            options={option: value for option, value in options.items() if value is not None},
            text=TextOptions(**text.given()),
            seed=text.seed or 0,
            dtype=computing.dtype,
            device=computing.device,
            overwrite=running.overwrite,
            progress=progress,
            command=command_line(),
            **revision,
        )
    show_outcome(outcome, running.as_json)
