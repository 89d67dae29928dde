"""The commands that make models: `plan`, `apply` and `compress`, and `split`, `calibrate-router`
and `distill`."""

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any

import typer

import compressor
from compressor.cli.gate import print_power, summarise
from compressor.cli.model_files import Imatrix, package_of
from compressor.cli.options import (
    STEP,
    TEXT,
    Choices,
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
from compressor.cli.settings import Best, Fast, Settings, preset, recipe_of, recipe_options
from compressor.cli.sizes import Bytes, For
from compressor.cli.terminal import print_report, progress_bars, written_line
from compressor.distributed import held, ranks
from compressor.document.blocks import Block, Table
from compressor.document.blocks import Text as Line
from compressor.errors import CompressionError
from compressor.files import refuse_no_file
from compressor.formatting import read_bytes
from compressor.model.serving import Advice, servers_in_words
from compressor.recipe.keep_lists import options_of_list
from compressor.recipe.recipe import Recipe, on_text
from compressor.recipe.step import StepOptions, TextOptions
from compressor.steps.distill.options import Distill
from compressor.steps.prune.options import Prune
from compressor.steps.routers.options import Routers

if TYPE_CHECKING:  # loaded only where a model is made
    from compressor.pipeline.outcome import Attempt, Outcome
    from compressor.quality_gate.verdict import GateResult

logger = logging.getLogger(__name__)

Source = Annotated[
    str,
    typer.Argument(metavar="MODEL", help="Checkpoint folder, Hub id, GGUF file or recipe.yaml."),
]
Base = Annotated[str, flag("Model that the checkpoint was made from: a folder or a Hub id.")]
DryRun = Annotated[bool, flag("Print what would be done, and write nothing.")]
OPTIONS = recipe_options()
OF_OUTPUTS = (  # which a plan is without
    "gate.",
    "output.push_to_hub",
    "output.private",
    "output.max_shard_bytes",
    "output.evaluate",
    "output.golden_answers",
)
OF_PLANS = [option for option in OPTIONS if not option[0].startswith(OF_OUTPUTS)]


def plan(
    context: typer.Context,
    model: Source,
    output: Out,
    flags: Annotated[dict[str, Any], OF_PLANS],
    running: Making,
    settings: Settings = None,
    imatrix: Imatrix = None,
    listed: Annotated[
        list[Path] | None,
        flag(
            "File of another tool that says which experts stay, or of a server that counts the "
            "tokens of each; may be repeated.",
            None,
            "--from",
        ),
    ] = None,
    dry_run: DryRun = False,
) -> None:
    """Decide which experts stay, merge or go, and write the plan as JSON; no weight is written."""
    package = package_of(context, model, imatrix)
    if listed:
        given = {*flags, *(setting.partition("=")[0] for setting in settings or ())}
        flags = {**options_of_list(listed, given), **flags}
    if package is None:
        recipe = recipe_of(model, {**flags, "output.evaluate": False}, settings)
        recipe = recipe.model_copy(update={"gate": None})  # which is of outputs
        recipe.check_installed()
    from compressor.recipe.steps_plan import check_file, write_plan
    from compressor.report.terminal import plan_blocks

    if dry_run and package is None:
        return show_dry_run(recipe, running.as_json)
    ranks().broadcast(lambda: check_file(output, running.overwrite))
    servers = list[Advice]()
    with held(output), progress_bars(running.as_json) as progress:
        if package is None:
            planned = compressor.plan(
                recipe, device=running.device, progress=progress, announce=servers.append
            )
        else:
            planned = package.plan(model, flags, imatrix)
        if ranks().is_first:
            write_plan(output, planned, running.overwrite)
    blocks = [
        *plan_blocks(planned, output),
        *(Line(f"Servers: {servers_in_words(advice)}") for advice in servers),
    ]
    print_report(running.as_json, planned.to_dict(), blocks)


def apply(
    context: typer.Context,
    plan_file: Annotated[
        Path, typer.Argument(metavar="PLAN", help="A plan made by `moe-compress plan`.")
    ],
    output: Out,
    running: Writing,
    comparing: Comparing,
    model: Annotated[str | None, flag("Source model, if it has moved, or its GGUF file.")] = None,
) -> None:
    """Carry out a plan and write the smaller checkpoint."""
    refuse_no_file(plan_file)
    package = package_of(context, model)
    if package is not None:
        package.apply(plan_file, model, output, running)
        return
    with progress_bars(running.as_json) as progress:
        outcome = compressor.apply(
            plan_file, output, model=model, **comparing, **running.making(progress)
        )
    show_outcome(outcome, running.as_json)


def compress(
    context: typer.Context,
    model: Source,
    flags: Annotated[dict[str, Any], OPTIONS],
    running: Making,
    fast: Fast = False,
    best: Best = False,
    settings: Settings = None,
    output: Annotated[Path | None, flag("Where to write.")] = None,
    imatrix: Imatrix = None,
    nbytes: Bytes = None,
    servers: For = None,
    dry_run: DryRun = False,
) -> None:
    """Make a model smaller by a recipe's steps, or by the step prune."""
    if output is None and not dry_run:
        raise CompressionError("Missing option '--output' / '-o'; see moe-compress compress --help")
    package = package_of(context, model, imatrix)
    if package is not None:
        package.compress(model, output, flags, imatrix, running)
        return
    if servers is not None and nbytes is None:
        raise CompressionError("--for goes with --bytes, which chooses a format")
    if nbytes is not None:
        flags["fit"] = {"bytes": read_bytes(nbytes, "--bytes"), "servers": servers or ()}
    recipe = recipe_of(model, {**preset(fast, best), **flags}, settings)
    recipe.check_installed()
    if dry_run or output is None:
        if recipe.fit is not None:
            from compressor.report.sizes import fitted

            with progress_bars(running.as_json) as progress:
                recipe = fitted(recipe, running.device, progress)
        return show_dry_run(recipe, running.as_json)
    if recipe.output.push_to_hub is not None:
        show_hub_bars(running.as_json)
    announce = None if running.as_json else print_power
    try:
        with progress_bars(running.as_json) as progress:
            outcome = compressor.compress(
                recipe, output, announce=announce, **running.making(progress)
            )
    except compressor.GateFailedError as failure:
        show_gated(
            failure.result, failure.outcome, failure.attempts, failure.reports, running.as_json
        )
        raise typer.Exit(failure.status) from None
    if recipe.gate is None or outcome.gate is None:
        return show_outcome(outcome, running.as_json)
    show_gated(outcome.gate, outcome, outcome.attempts, outcome.reports, running.as_json)


def show_dry_run(recipe: Recipe, as_json: bool) -> None:
    """Print a run in advance."""
    from compressor.report.terminal import dry_run_blocks

    run = compressor.dry_run(recipe)
    print_report(as_json, run.to_dict(), dry_run_blocks(run))


def show_outcome(outcome: "Outcome", as_json: bool) -> None:
    """Print the outcome of a run, and where it was published."""
    from compressor.report.terminal import outcome_blocks

    content = outcome.to_dict()
    if outcome.pushed is not None:
        content["push"] = outcome.pushed.to_dict()
    print_report(as_json, content, () if as_json else outcome_blocks(outcome))


def show_gated(
    result: "GateResult",
    outcome: "Outcome | None",
    attempts: "Sequence[Attempt]",
    written: Sequence[Path],
    as_json: bool,
) -> None:
    """Print the gate of the model in place, or of the last one if none passed, and the outcome of
    what is in place."""
    from compressor.quality_gate.report import full_content, gate_blocks
    from compressor.report.terminal import outcome_blocks

    summarise(result, as_json)
    tried = []
    rows = []
    for attempt in attempts:
        verdict, accepted = attempt.result.verdict, attempt.accepted
        tried.append({"experts": attempt.experts, "accepted": accepted, "verdict": verdict})
        rows.append((str(attempt.experts), verdict, "yes" if accepted else "no"))
    content = {
        **full_content(result),
        "written": [str(path) for path in written],
        "attempts": tried,
        "compression": None if outcome is None else outcome.to_dict(),
    }
    if outcome is not None and outcome.pushed is not None:
        content["push"] = outcome.pushed.to_dict()
    blocks: list[Block] = [*gate_blocks(result), *written_line(written)]
    if len(rows) > 1:
        blocks.insert(0, Table("Models tried", ("experts per layer", "verdict", "accepted"), rows))
    if outcome is None:
        blocks.append(Line(f"{result.compressed} was not written."))
    elif not as_json:
        blocks += outcome_blocks(outcome)
    print_report(as_json, content, blocks)


def _of_step(
    step: type[StepOptions],
    name: str,
    text: str,
    options: Choices,
    fixed: Mapping[str, Any] = MappingProxyType({}),
    against_base: bool = True,
) -> Callable[..., None]:
    """A command that carries out one step, with `fixed` options, on a finished checkpoint."""
    # sized by the step itself, or by the text
    sizes = () if "sequence_length" in step.model_fields else ("samples", "sequence_length")
    texts = [option for option in TEXT if option[0] in ("data", *sizes, "strict")]
    if against_base:
        texts += [option for option in TEXT if option[0] == "emphasis"]
    of_base = (
        [("base", Parameter("base", Parameter.KEYWORD_ONLY, annotation=Base))]
        if against_base
        else []
    )

    def command(
        checkpoint: Model,
        output: Out,
        text: Annotated[TextOptions, texts],
        running: Computing,
        comparing: Comparing,
        base: Annotated[dict[str, Any], of_base],
        chosen: Annotated[dict[str, Any], options],
        seed: Seed = 0,
        dry_run: DryRun = False,
    ) -> None:
        revision = {"base_revision" if against_base else "revision": running.revision}
        settings = {
            "seed": seed,
            "dtype": running.dtype,
            "resident": running.resident,
            **base,
            **revision,
        }
        steps = [on_text(step.name, {**fixed, **chosen}, text)]
        content = {"model": checkpoint, "steps": steps, "output": comparing, **settings}
        recipe = Recipe.of(content, "the command line")
        recipe.check_installed()
        if dry_run:
            return show_dry_run(recipe, running.as_json)
        with progress_bars(running.as_json) as progress:
            outcome = compressor.compress(recipe, output, **running.making(progress))
        show_outcome(outcome, running.as_json)

    command.__name__, command.__doc__ = name, text
    return command


split = _of_step(
    Prune,
    "split",
    "Split each expert into narrower sub-experts with the same output, which `compress` can drop "
    "one by one.",
    options_of(Prune, STEP, only=("split",), names={"split": "parts"}),
    {"ratio": 0.0, "split": 2},
    against_base=False,
)
calibrate_router = _of_step(
    Routers,
    "calibrate_router",
    "Calibrate a smaller model's routers against its base (after C3PO); kept if held-out text is "
    "closer to the base's.",
    options_of(Routers, STEP),
)
distill = _of_step(
    Distill,
    "distill",
    "Train a smaller model to match its base's next-token distribution.",
    options_of(Distill, STEP),
)
