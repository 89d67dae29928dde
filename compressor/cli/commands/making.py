"""`plan`, `apply` and `compress`: the commands that make models smaller."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

import compressor
from compressor.cli.announcing import announcing
from compressor.cli.commands.gating import compress_under_gate
from compressor.cli.commands.publishing import check_access, push_made
from compressor.cli.gguf_files import CHOOSING, Imatrix, compress_file, plan_of_file, show_gguf_summary, takes_gguf
from compressor.cli.options import GateOptions, Out, Publishing, Running, StrategyOptions, UnderGate, Yes, listed
from compressor.cli.parameters import given
from compressor.cli.terminal import command_line, progress_bars
from compressor.distributed.places import held
from compressor.distributed.present import here, refuse_several
from compressor.errors import CompressionError
from compressor.planning.request import CALIBRATION, MONE, Request

Model = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL", help="A local checkpoint folder, a Hub id such as org/model, or a GGUF file; a recipe has one."
    ),
]
Recipe = Annotated[
    Path | None,
    typer.Option(help="A recipe.yaml, as every output has one: its fields count where an option is not given here."),
]


def plan(
    context: typer.Context,
    output: Out,
    request: Request,
    strategy_options: StrategyOptions,
    running: Running,
    model: Model = None,
    recipe: Recipe = None,
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
    yes: Yes = False,
    imatrix: Imatrix = None,
) -> None:
    """Decide what to do with every expert and write it as JSON; no weight is written."""
    from compressor.cli import rendering
    from compressor.recipe.files import check_files, source_files, write_plans

    if takes_gguf(context, model, imatrix, CHOOSING):
        refuse_several("a GGUF file")
        return plan_of_file(str(model), output, request, imatrix, running.overwrite, running.as_json)
    name, revision, request = _asked(context, model, running.revision, recipe, request, strategy_options)
    request = with_constants(request, listed(format, "--format") or ())
    outputs = [output, *source_files(output, request.source_names if per_source else ())]
    here().first_alone(lambda: check_files(outputs, running.overwrite))
    with held(output), progress_bars(running.as_json) as progress:
        if per_source:
            made = compressor.plan_per_source(name, request, revision=revision, progress=progress)
        else:
            told = announcing(progress, yes, running.as_json)
            made = [compressor.plan(name, request, revision=revision, progress=progress, announce=told)]
        if here().is_first:
            check_files(outputs, running.overwrite)  # planning takes a while
            write_plans(outputs, made)
    rendering.show_plans(made, outputs, running.as_json)


def _asked(
    context: typer.Context,
    model: str | None,
    revision: str | None,
    recipe: Path | None,
    request: Request,
    strategy_options: StrategyOptions,
) -> tuple[str, str | None, Request]:
    """Model, revision and request of the command line, and of a recipe where the command line says nothing."""
    said = given(context)
    if recipe is not None:
        from compressor.planning.recipe import read_recipe, refuse_missing

        content = {name: value for name, value in read_recipe(recipe).items() if name not in said}
        if said & {"experts", "ratio", "search"}:
            content = {name: value for name, value in content.items() if name not in ("experts", "ratio")}
        if model is not None:  # a revision, too, is of the recipe's model
            content = {name: value for name, value in content.items() if name not in ("model", "revision")}
        if "strategy" in said:
            content.pop("options", None)  # which are those of the recipe's strategy
        refuse_missing(recipe, content)
        model, revision = content.pop("model", model), content.pop("revision", revision)
        request = replace(request, **content)
    if model is None:
        nor = "" if recipe is None else f", and {recipe} names none"
        raise CompressionError(f"Missing argument 'MODEL'{nor}; see {context.command_path} --help")
    return model, revision, strategy_options.put_into(request)


def with_constants(request: Request, formats: Sequence[str]) -> Request:
    """The request, for constants if it is for the format that has them; that goes with no other format."""
    if MONE not in formats:
        return request
    if set(formats) != {MONE}:
        raise CompressionError(f"--format {','.join(formats)}: {MONE} is written alone; name one format")
    return replace(request, constants=True)


def refuse_beside_constants(under_gate: UnderGate) -> None:
    """Refuse a gate, which loads the output by stock transformers."""
    if under_gate.gate is not None:
        raise CompressionError("--gate loads the output by stock transformers, which cannot load --format mone")


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
    from compressor.gguf_files.parts import is_gguf

    with progress_bars(running.as_json) as progress:
        if is_gguf(model):
            refuse_several("a GGUF file")
            made = compressor.apply_gguf(plan_file, str(model), output, overwrite=running.overwrite, progress=progress)
            return show_gguf_summary(made, running.as_json)
        summary = compressor.apply(
            plan_file, output, model=model, overwrite=running.overwrite, progress=progress, command=command_line()
        )
    rendering.show_summary(summary, running.as_json)


def compress(
    context: typer.Context,
    output: Out,
    request: Request,
    strategy_options: StrategyOptions,
    under_gate: UnderGate,
    gate_options: GateOptions,
    publishing: Publishing,
    running: Running,
    model: Model = None,
    recipe: Recipe = None,
    format: Annotated[
        str,
        typer.Option(
            "--format",
            help="safetensors, onnx or another exporter, or both: safetensors,onnx (in the subfolder onnx); or mone: "
            "constants for what is dropped, as vLLM serves them.",
        ),
    ] = "safetensors",
    yes: Yes = False,
    imatrix: Imatrix = None,
) -> None:
    """Plan and apply in one go; an interrupted run goes on when the same command is run again."""
    from compressor.api import exporting
    from compressor.cli import rendering

    if takes_gguf(context, model, imatrix, CHOOSING):
        refuse_several("a GGUF file")
        return compress_file(str(model), output, request, imatrix, running.overwrite, running.as_json)
    name, revision, request = _asked(context, model, running.revision, recipe, request, strategy_options)
    request = with_constants(request, listed(format, "--format") or ())
    formats = exporting.read_formats((exporting.WRITER,) if request.constants else listed(format, "--format") or ())
    if request.constants:
        refuse_beside_constants(under_gate)
    if publishing.push_to_hub is not None:
        check_access(publishing.push_to_hub, publishing.private)
    task: dict[str, Any] = {"request": request, "revision": revision, "command": command_line()}
    if under_gate.gate is not None:
        compress_under_gate(name, output, task, formats, under_gate, gate_options, publishing, running)
    with progress_bars(running.as_json) as progress:
        summary = compressor.compress(
            name,
            output,
            overwrite=running.overwrite,
            progress=progress,
            accept=exporting.additions(formats, progress),
            terms=",".join(formats),
            announce=announcing(progress, yes, running.as_json),
            **task,
        )
    if not here().is_first:
        return
    pushed = push_made(output, publishing, None, running.as_json)
    rendering.show_summary(summary, running.as_json, pushed)
