"""The commands that make models: `plan`, `apply` and `compress`, and `split`, `calibrate-router` and `distill`."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

import compressor
from compressor.cli.gate import compress_under_gate
from compressor.cli.gguf_files import CHOOSING, Imatrix, choosing, show_gguf_summary, takes_gguf
from compressor.cli.options import (
    CALIBRATION,
    GATE_OPTIONS,
    RUNNING,
    STEPS,
    TEXT,
    Model,
    Out,
    Publishing,
    RecipeFlags,
    Running,
    Text,
    TextFlags,
    UnderGate,
    field_options,
    flag,
    listed,
    without_none,
)
from compressor.cli.outputs import push_made
from compressor.cli.step_flags import flags, recipe_of_flags
from compressor.cli.terminal import print_report, progress_bars
from compressor.distributed import held, here, refuse_several
from compressor.errors import CompressionError
from compressor.recipe.step import Step, TextOptions
from compressor.steps.distill.step import Distill
from compressor.steps.routers.step import Routers
from compressor.steps.split.step import Split

MONE = "mone"  # the format in which constants stand for experts
Source = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL", help="A checkpoint folder, a Hub id such as org/model, a GGUF file, or a recipe.yaml."
    ),
]
DryRun = Annotated[
    bool, flag("Print what would be done: steps, shapes, servers, memory, text. Writes nothing.", RUNNING)
]
StepFlags = Annotated[dict[str, Any], flags()]


def plan(
    context: typer.Context,
    output: Out,
    step_flags: StepFlags,
    text: Text,
    recipe_flags: RecipeFlags,
    running: Running,
    model: Source = None,
    format: Annotated[str, flag("safetensors, or mone: a plan with constants for what is dropped.")] = "safetensors",
    per_source: Annotated[bool, flag("Plan for each source alone, too: PLAN.<source>.json.", CALIBRATION)] = False,
    imatrix: Imatrix = None,
    dry_run: DryRun = False,
) -> None:
    """Decide what to do with every expert and write it as JSON; no weight is written."""
    from compressor.cli.rendering import show_dry_run
    from compressor.data.sources import parse_sources, short_names
    from compressor.recipe.document import plan_blocks
    from compressor.recipe.steps_plan import check_files, source_files, write_plans

    outputs, is_gguf = [output], takes_gguf(context, model, imatrix, CHOOSING)
    if not is_gguf:
        constants = MONE in (listed(format, "--format") or ())
        recipe = recipe_of_flags(model, step_flags, text, recipe_flags, running, constants)
        sources = parse_sources(recipe.calibration.data) if per_source and recipe.calibration.data else ()
        if dry_run:
            return show_dry_run(compressor.dry_run(recipe), running.as_json)
        outputs += source_files(output, short_names([entry.source for entry in sources]))
    here().broadcast(lambda: check_files(outputs, running.overwrite))
    with held(output), progress_bars(running.as_json) as progress:
        if is_gguf:
            plans = [compressor.plan_gguf(str(model), **choosing(step_flags, imatrix))]
        elif per_source:
            plans = compressor.plan_per_source(recipe, device=running.device, progress=progress)
        else:
            plans = [compressor.plan(recipe, device=running.device, progress=progress)]
        if here().is_first:
            check_files(outputs, running.overwrite)  # planning takes a while
            write_plans(outputs, plans)
    content = [each.to_dict() for each in plans]
    blocks = (block for each, path in zip(plans, outputs, strict=True) for block in plan_blocks(each, path))
    print_report(running.as_json, content if len(content) > 1 else content[0], blocks)


def apply(
    plan_file: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan made by `moe-compress plan`.")],
    output: Out,
    running: Annotated[Running, ("overwrite", "as_json")],
    model: Annotated[str | None, flag("The source, if not where the plan says, or its GGUF file.")] = None,
) -> None:
    """Carry out a plan and write the smaller checkpoint."""
    from compressor.cli import rendering
    from compressor.gguf_files.header import is_gguf

    with progress_bars(running.as_json) as progress:
        if is_gguf(model):
            refuse_several("a GGUF file")
            written = compressor.apply_gguf(
                plan_file, str(model), output, overwrite=running.overwrite, progress=progress
            )
            return show_gguf_summary(written, running.as_json)
        outcome = compressor.apply(plan_file, output, model=model, **running.making(progress))
    rendering.show_outcome(outcome, running.as_json)


def compress(
    context: typer.Context,
    step_flags: StepFlags,
    text: Text,
    recipe_flags: RecipeFlags,
    under_gate: UnderGate,
    gate_options: Annotated[dict[str, Any], GATE_OPTIONS],
    publishing: Publishing,
    running: Running,
    model: Source = None,
    output: Annotated[Path | None, flag("Where to write.")] = None,
    format: Annotated[
        str | None,
        flag(
            "safetensors, onnx or another exporter, or both: safetensors,onnx (in the subfolder onnx); or mone: "
            "constants for what is dropped, as vLLM serves them."
        ),
    ] = None,
    imatrix: Imatrix = None,
    dry_run: DryRun = False,
) -> None:
    """Carry out a recipe's steps, or split, prune and correct; an interrupted run goes on when it is run again."""
    from compressor.cli import exporting, rendering

    if output is None and not dry_run:
        raise CompressionError("Missing option '--output' / '-o'; see moe-compress compress --help")
    if takes_gguf(context, model, imatrix, CHOOSING):
        with progress_bars(running.as_json) as progress:
            chosen = {**choosing(step_flags, imatrix), "overwrite": running.overwrite, "progress": progress}
            assert output is not None  # --dry-run is no option for it
            summary = compressor.compress_gguf(str(model), output, **chosen)
        return show_gguf_summary(summary, running.as_json)
    formats = listed(format, "--format") or []
    constants = MONE in formats
    if constants and set(formats) != {MONE}:
        raise CompressionError(f"--format {format}: {MONE} is written alone; name one format")
    gate, tasks = without_none(gate_options), listed(under_gate.gate, "--gate")
    recipe = recipe_of_flags(
        model,
        step_flags,
        text,
        recipe_flags,
        running,
        constants,
        gate if tasks is None else {**gate, "tasks": tasks},
        [] if constants else formats,
    )
    if recipe.gate is None and (under_gate.keep_failed or under_gate.search):
        raise CompressionError("--keep-failed and --search go with --gate; name the tasks to pass")
    constants = any(step.name == "constants" for step in recipe.steps)
    written = exporting.read_formats((exporting.WRITER,) if constants else recipe.output.formats)
    if constants and recipe.gate is not None:
        raise CompressionError("--gate loads the output by stock transformers, which cannot load --format mone")
    if dry_run or output is None:
        return rendering.show_dry_run(compressor.dry_run(recipe), running.as_json)
    if publishing.push_to_hub is not None:  # refused now rather than after hours of work
        from compressor.hub.push import check_access

        check_access(publishing.push_to_hub, publishing.private)
    if recipe.gate is not None:
        compress_under_gate(recipe, output, written, under_gate, publishing, running)
    with progress_bars(running.as_json) as progress:
        outcome = compressor.compress(
            recipe,
            output,
            accept=exporting.additions(written, progress),
            terms=",".join(written),
            **running.making(progress),
        )
    if here().is_first:
        pushed = push_made(output, publishing, None, running.as_json)
        rendering.show_outcome(outcome, running.as_json, pushed)


def split(
    model: Model,
    output: Out,
    text: Text,
    running: Running,
    options: Annotated[dict[str, Any], field_options(Split, STEPS, {"split": "parts", "split_by": "by"})],
) -> None:
    """Split each routed expert into narrower ones that compute the same; `compress` can then drop them one by one."""
    named = {"parts": options["split"], "by": options["split_by"]}
    _carry_out("split", model, output, running, text, named, revision=running.revision)


def _against_base(step: type[Step], name: str, text: str) -> Callable[..., None]:
    """A command that carries out a step on a smaller model, which it compares with its base."""

    def command(
        checkpoint: Model,
        output: Out,
        text: Annotated[TextFlags, (TEXT[0], TEXT[-1])],  # the sizes of its sequences are the step's options
        running: Running,
        base: Annotated[str, flag("The model that the checkpoint was made of: a folder or a Hub id.")],
        options: Annotated[dict[str, Any], field_options(step, STEPS)],
    ) -> None:
        of_base = {"base": base, "base_revision": running.revision}
        _carry_out(step.name, checkpoint, output, running, text, options, **of_base)

    command.__name__, command.__doc__ = name, text
    return command


calibrate_router = _against_base(
    Routers,
    "calibrate_router",
    "Move a smaller model's routers toward its base on text, as far as held-out text is nearer to it (after C3PO).",
)
distill = _against_base(Distill, "distill", "Train a smaller model toward its base's next-token distribution on text.")


def _carry_out(
    name: str, checkpoint: str, output: Path, running: Running, text: TextFlags, options: dict[str, Any], **model: Any
) -> None:
    from compressor.cli.rendering import show_outcome

    with progress_bars(running.as_json) as progress:
        outcome = compressor.change(
            name,
            checkpoint,
            output,
            options=without_none(options),
            text=TextOptions(**text.given()),
            seed=text["seed"] or 0,
            dtype=running.dtype,
            **model,
            **running.making(progress),
        )
    show_outcome(outcome, running.as_json)
