"""`inspect`, `compare` and `attribute`: the commands that look at models and strategies and change nothing."""

from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

import compressor
from compressor.cli.options import CALIBRATION, KEEP, Computing, Model, Running, TextFlags, counts, listed, shares
from compressor.cli.terminal import progress_bars
from compressor.distributed.ranks import held, here
from compressor.errors import CompressionError
from compressor.recipe.step import TextOptions

MONE = "mone"


def inspect(
    context: typer.Context,
    model: Model,
    running: Annotated[Running, ("revision", "as_json")],
    experts: Annotated[int | None, typer.Option(help="Show what keeping this many would leave.")] = None,
) -> None:
    """Show what a model is made of and what compressing it would take; reads no weight."""
    from compressor.cli import rendering
    from compressor.cli.gguf_files import show_gguf_inspection, takes_gguf

    if takes_gguf(context, model, None, ("experts",)):
        return show_gguf_inspection(compressor.inspect_gguf(model, experts), running.as_json)
    rendering.show_inspection(compressor.inspect(model, running.revision, experts), running.as_json)


def compare(
    model: Model,
    text: TextFlags,
    computing: Computing,
    running: Running,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="New folder for comparison.json, comparison.md and comparison.png.")
    ] = Path("comparison"),
    experts: Annotated[
        str | None, typer.Option(help="Experts to keep, one count or several: 6,4.", rich_help_panel=KEEP)
    ] = None,
    protect: Annotated[
        str | None, typer.Option(help="As for `compress`: auto, graph:N, or a JSON list.", rich_help_panel=KEEP)
    ] = None,
    ratio: Annotated[
        str | None,
        typer.Option(help="Shares of the experts to remove instead, such as 0.25,0.5.", rich_help_panel=KEEP),
    ] = None,
    split: Annotated[
        str, typer.Option(help="Parts that each expert is split into first, such as 1,2,4.", rich_help_panel=KEEP)
    ] = "1",
    split_by: Annotated[
        str, typer.Option(help="How its neurons are dealt out: energy or clusters.", rich_help_panel=KEEP)
    ] = "energy",
    top_k: Annotated[
        str | None,
        typer.Option(
            help="Experts that a token visits in the output, one number or several (default: as many as now).",
            rich_help_panel=KEEP,
        ),
    ] = None,
    strategies: Annotated[
        str | None,
        typer.Option(help="Names separated by commas, with options as name:option=value (default: all installed)."),
    ] = None,
    correct: Annotated[
        str | None,
        typer.Option(help="Corrections to try with each, such as none,ridge,tune (default: none and its own)."),
    ] = None,
    evaluate: Annotated[
        list[str] | None,
        typer.Option(help="Text to measure on; may be repeated (default: calibration text that no plan saw)."),
    ] = None,
    evaluation_samples: Annotated[int, typer.Option(min=1, help="Sequences to measure on, at most.")] = 64,
    format: Annotated[
        str, typer.Option("--format", help="safetensors, or mone: rows with constants for experts, too.")
    ] = "safetensors",
    random_seeds: Annotated[int, typer.Option(min=1, help="Random drops to compare with.")] = 3,
    per_source: Annotated[
        bool,
        typer.Option(
            "--per-source",
            help="Plan for each calibration source alone, too: a row each.",
            rich_help_panel=CALIBRATION,
        ),
    ] = False,
) -> None:
    """Show what each strategy costs on this model and data: one calibration pass, many plans, one table."""
    from compressor.cli.rendering import show_comparison
    from compressor.comparison.report import NAMES, write_reports
    from compressor.files import check_folder

    kept = counts(experts, "--experts")
    removed, parts, visited = shares(ratio, "--ratio"), counts(split, "--split"), counts(top_k, "--top-k")
    if format not in ("safetensors", MONE):
        raise CompressionError(f"there are no rows of --format {format!r}; known are safetensors, {MONE}")
    here().broadcast(lambda: check_folder(output, NAMES, running.overwrite))
    with held(output), progress_bars(running.as_json) as progress:
        found = compressor.compare(
            model,
            calibration=TextOptions(**text.given()),
            seed=text.seed or 0,
            device=computing.device,
            dtype=computing.dtype,
            constants=format == MONE,
            protect=protect,
            experts=kept,
            ratios=removed,
            splits=parts,
            split_by=split_by,
            top_ks=visited,
            strategies=listed(strategies, "--strategies"),
            corrections=listed(correct, "--correct"),
            evaluate=evaluate or (),
            evaluation_samples=evaluation_samples,
            random_seeds=random_seeds,
            per_source=per_source,
            revision=running.revision,
            progress=progress,
        )
        written = write_reports(found, output, running.overwrite) if here().is_first else []
    show_comparison(found, running.as_json, written)


def attribute(
    model: Model,
    text: TextFlags,
    computing: Computing,
    running: Running,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="New folder for hubs.json, attribution.json, pictures and the graph."),
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="Strongest senders to show.")] = 10,
    threshold: Annotated[
        float, typer.Option(min=0, help="Modified z-score among a layer's experts above which one is a hub.")
    ] = 3.5,
    keys: Annotated[
        int, typer.Option(min=0, help="Sequences on which the strongest heads are split by key token.")
    ] = 0,
    edges: Annotated[
        str, typer.Option(help="What the graph's edges lead to: routers, or every later expert's score, too: experts.")
    ] = "routers",
    edges_kept: Annotated[int, typer.Option(min=1, help="Strongest edges to experts' scores to keep.")] = 2000,
) -> None:
    """Show what steers each layer's router, and the experts that are routing hubs; nothing is compressed."""
    from compressor.attribution.report import NAMES, findings, write_attribution
    from compressor.cli.rendering import show_attribution
    from compressor.files import check_folder

    if edges not in ("routers", "experts"):
        raise CompressionError(f"there are no --edges {edges!r}; known are routers, experts")
    if output is not None:
        here().broadcast(lambda: check_folder(output, NAMES, running.overwrite))
    with held(output) if output else nullcontext(), progress_bars(running.as_json) as progress:
        attribution = compressor.attribute(
            model,
            calibration=TextOptions(**text.given()),
            seed=text.seed or 0,
            device=computing.device,
            dtype=computing.dtype,
            keys=keys,
            top=top,
            edges_kept=edges_kept if edges == "experts" else 0,
            revision=running.revision,
            progress=progress,
        )
        found, written = findings(attribution, threshold, top), list[Path]()
        if output is not None and here().is_first:
            written = write_attribution(found, output, running.overwrite)
    show_attribution(found, running.as_json, written)
