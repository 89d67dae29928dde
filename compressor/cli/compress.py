"""The commands that make models: `plan`, `apply` and `compress`, and `split`, `calibrate-router` and `distill`."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

import compressor
from compressor.cli.gate import print_power, summarise
from compressor.cli.model_files import Imatrix, package_of
from compressor.cli.options import (
    STEP,
    TEXT,
    Comparing,
    Computing,
    Making,
    Model,
    Out,
    Parameter,
    Seed,
    Writing,
    flag,
    options_of,
)
from compressor.cli.outputs import show_hub_bars
from compressor.cli.settings import Settings, recipe_of, recipe_options
from compressor.cli.sizes import Bytes, For, fit_into
from compressor.cli.terminal import print_report, progress_bars
from compressor.distributed import held, ranks
from compressor.document.blocks import Text as Line
from compressor.errors import CompressionError
from compressor.extras import require
from compressor.model.serving import Advice, server_line
from compressor.recipe.step import StepOptions, TextOptions
from compressor.steps.distill.options import Distill
from compressor.steps.routers.options import Routers
from compressor.steps.split.options import Split

Source = Annotated[str, typer.Argument(metavar="MODEL", help="Checkpoint folder, Hub id, GGUF file or recipe.yaml.")]
Base = Annotated[str, flag("Model that the checkpoint was made from: a folder or a Hub id.")]
DryRun = Annotated[bool, flag("Print what would be done, and write nothing.")]
OPTIONS = recipe_options()
OF_OUTPUTS = (  # which a plan is without
    "gate.",
    "output.push_to_hub",
    "output.private",
    "output.max_shard_bytes",
    "output.evaluate",
)


def plan(
    context: typer.Context,
    model: Source,
    output: Out,
    flags: Annotated[dict[str, Any], [each for each in OPTIONS if not each[0].startswith(OF_OUTPUTS)]],
    running: Making,
    settings: Settings = None,
    imatrix: Imatrix = None,
    dry_run: DryRun = False,
) -> None:
    """Decide which experts stay, merge or go, and write the plan as JSON; no weight is written."""
    package = package_of(context, model, imatrix)
    if package is None:
        recipe = recipe_of(model, {**flags, "output.evaluate": False}, settings)
        recipe = recipe.model_copy(update={"gate": None})  # which is of outputs
        require(*recipe.packages)
    from compressor.cli.rendering import show_dry_run
    from compressor.recipe.document import plan_blocks
    from compressor.recipe.steps_plan import check_file, write_plan

    if dry_run and package is None:
        return show_dry_run(compressor.dry_run(recipe), running.as_json)
    ranks().broadcast(lambda: check_file(output, running.overwrite))
    servers = list[Advice]()
    with held(output), progress_bars(running.as_json) as progress:
        if package is None:
            made = compressor.plan(recipe, device=running.device, progress=progress, announce=servers.append)
        else:
            made = package.plan(model, flags, imatrix)
        if ranks().is_first:
            check_file(output, running.overwrite)  # planning takes a while
            write_plan(output, made)
    blocks = [*plan_blocks(made, output), *(Line(server_line(advice)) for advice in servers)]
    print_report(running.as_json, made.to_dict(), blocks)


def apply(
    context: typer.Context,
    plan_file: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan made by `moe-compress plan`.")],
    output: Out,
    running: Writing,
    comparing: Comparing,
    model: Annotated[str | None, flag("Source model, if it has moved, or its GGUF file.")] = None,
) -> None:
    """Carry out a plan and write the smaller checkpoint."""
    package = package_of(context, model)
    if package is not None:
        package.apply(plan_file, model, output, running)
        return
    from compressor.cli import rendering

    with progress_bars(running.as_json) as progress:
        outcome = compressor.apply(plan_file, output, model=model, **comparing, **running.making(progress))
    rendering.show_outcome(outcome, running.as_json)


def compress(
    context: typer.Context,
    model: Source,
    flags: Annotated[dict[str, Any], OPTIONS],
    running: Making,
    settings: Settings = None,
    output: Annotated[Path | None, flag("Where to write.")] = None,
    imatrix: Imatrix = None,
    nbytes: Bytes = None,
    servers: For = None,
    dry_run: DryRun = False,
) -> None:
    """Make a model smaller by a recipe's steps, or by split, prune and correct."""
    if output is None and not dry_run:
        raise CompressionError("Missing option '--output' / '-o'; see moe-compress compress --help")
    package = package_of(context, model, imatrix)
    if package is not None:
        package.compress(model, output, flags, imatrix, running)
        return
    recipe = recipe_of(model, flags, settings)
    require(*recipe.packages)
    from compressor.cli.rendering import show_dry_run, show_gated, show_outcome

    if servers is not None and nbytes is None:
        raise CompressionError("--for goes with --bytes, which chooses a format")
    if nbytes is not None:
        with progress_bars(running.as_json) as progress:
            recipe = fit_into(recipe, nbytes, servers, running.device, progress)
    if dry_run or output is None:
        return show_dry_run(compressor.dry_run(recipe), running.as_json)
    if recipe.output.push_to_hub is not None:
        show_hub_bars(running.as_json)
    announce = None if running.as_json else print_power
    try:
        with progress_bars(running.as_json) as progress:
            outcome = compressor.compress(recipe, output, announce=announce, **running.making(progress))
    except compressor.GateFailedError as failure:
        summarise(failure.result)
        show_gated(failure.result, failure.outcome, failure.attempts, failure.reports, running.as_json)
        raise typer.Exit(failure.status) from None
    if recipe.gate is None or outcome.gate is None:
        return show_outcome(outcome, running.as_json)
    summarise(outcome.gate)
    show_gated(outcome.gate, outcome, outcome.attempts, outcome.reports, running.as_json)


def _of_step(step: type[StepOptions], name: str, text: str, against_base: bool) -> Callable[..., None]:
    """A command that carries out one step on a finished checkpoint; its options are the step's fields."""
    sized = "sequence_length" in step.model_fields  # by the step itself
    fields = ("data", "emphasis", "strict") if sized else ("data", "samples", "sequence_length", "strict")
    of_base = [("base", Parameter("base", Parameter.KEYWORD_ONLY, annotation=Base))] if against_base else []

    def command(
        checkpoint: Model,
        output: Out,
        text: Annotated[TextOptions, [each for each in TEXT if each[0] in fields]],
        running: Computing,
        comparing: Comparing,
        base: Annotated[dict[str, Any], of_base],
        options: Annotated[dict[str, Any], options_of(step, STEP)],
        seed: Seed = 0,
        dry_run: DryRun = False,
    ) -> None:
        from compressor.api import make_recipe, on_text
        from compressor.cli.rendering import show_dry_run, show_outcome

        revision = {"base_revision" if against_base else "revision": running.revision}
        settings = {"seed": seed, "dtype": running.dtype, "resident": running.resident, **base, **revision}
        recipe = make_recipe(checkpoint, [on_text(step.name, options, text)], output=comparing, **settings)
        if dry_run:
            return show_dry_run(compressor.dry_run(recipe), running.as_json)
        with progress_bars(running.as_json) as progress:
            outcome = compressor.compress(recipe, output, **running.making(progress))
        show_outcome(outcome, running.as_json)

    command.__name__, command.__doc__ = name, text
    return command


split = _of_step(
    Split,
    "split",
    "Split each expert into narrower sub-experts with the same output, which `compress` can drop one by one.",
    against_base=False,
)
calibrate_router = _of_step(
    Routers,
    "calibrate_router",
    "Calibrate a smaller model's routers against its base (after C3PO); kept if held-out text is closer to the base's.",
    against_base=True,
)
distill = _of_step(
    Distill, "distill", "Train a smaller model to match its base's next-token distribution.", against_base=True
)
