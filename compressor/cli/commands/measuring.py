"""`inspect`, `compare` and `attribute`: the commands that look at models and strategies and change nothing."""

from pathlib import Path
from typing import Annotated

import typer

from compressor.cli.commands.bars import progress_bars
from compressor.cli.options import (
    AsJson,
    Calibration,
    Device,
    Dtype,
    Length,
    Model,
    Overwrite,
    Protect,
    Revision,
    Samples,
    Seed,
    counts,
    listed,
)


def inspect(
    model: Model,
    revision: Revision = None,
    experts: Annotated[int | None, typer.Option(help="Show what keeping this many would leave.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show what a model is made of and what compressing it would take; reads no weight."""
    from compressor.api import measuring
    from compressor.cli import rendering

    rendering.show_inspection(measuring.inspect(model, revision, experts), as_json)


def compare(
    model: Model,
    experts: Annotated[str, typer.Option(help="Experts to keep, one count or several: 6,4.")],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="New folder for comparison.json, comparison.md and comparison.png.")
    ] = Path("comparison"),
    strategies: Annotated[
        str | None,
        typer.Option(help="Names separated by commas, with options as name:option=value (default: all installed)."),
    ] = None,
    correct: Annotated[
        str | None,
        typer.Option(help="Corrections to try with each, such as none,ridge,tune (default: none and its own)."),
    ] = None,
    calibration: Calibration = None,
    evaluate: Annotated[
        list[str] | None,
        typer.Option(help="Text to measure on; may be repeated (default: calibration text that no plan saw)."),
    ] = None,
    evaluation_samples: Annotated[int, typer.Option(min=1, help="Sequences to measure on, at most.")] = 64,
    random_seeds: Annotated[int, typer.Option(min=1, help="Random drops to compare with.")] = 3,
    per_source: Annotated[
        bool, typer.Option("--per-source", help="Plan for each calibration source alone, too: a row each.")
    ] = False,
    protect: Protect = None,
    samples: Samples = 128,
    sequence_length: Length = 512,
    seed: Seed = 0,
    device: Device = "auto",
    dtype: Dtype = "auto",
    revision: Revision = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Show what each strategy costs on this model and data: one calibration pass, many plans, one table."""
    from compressor.api import measuring
    from compressor.cli.comparison_table import show_comparison
    from compressor.comparison.report import NAMES, write_reports
    from compressor.folders import check_folder

    kept = counts(experts)
    check_folder(output, NAMES, overwrite)
    with progress_bars(as_json) as progress:
        found = measuring.compare(
            model,
            experts=kept,
            strategies=listed(strategies, "--strategies"),
            corrections=listed(correct, "--correct"),
            evaluate=evaluate or (),
            evaluation_samples=evaluation_samples,
            random_seeds=random_seeds,
            per_source=per_source,
            revision=revision,
            progress=progress,
            calibration=calibration or None,
            protect=protect,
            samples=samples,
            sequence_length=sequence_length,
            seed=seed,
            device=device,
            dtype=dtype,
        )
        written = write_reports(found, output, overwrite)
    show_comparison(found, as_json)
    if not as_json:
        print(f"Written: {', '.join(str(path) for path in written)}")


def attribute(
    model: Model,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="New folder for hubs.json, attribution.json and pictures.")
    ] = None,
    calibration: Calibration = None,
    top: Annotated[int, typer.Option(min=1, help="Strongest senders to show.")] = 10,
    threshold: Annotated[
        float, typer.Option(min=0, help="Modified z-score among a layer's experts above which one is a hub.")
    ] = 3.5,
    keys: Annotated[
        int, typer.Option(min=0, help="Sequences on which the strongest heads are split by key token.")
    ] = 0,
    samples: Samples = 128,
    sequence_length: Length = 512,
    seed: Seed = 0,
    device: Device = "auto",
    dtype: Dtype = "auto",
    revision: Revision = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Show what steers each layer's router, and the experts that are routing hubs; nothing is compressed."""
    from compressor.api import measuring
    from compressor.attribution.hubs import find_hubs, super_experts
    from compressor.attribution.report import check_folder, write_attribution
    from compressor.cli.attribution_table import show_attribution

    if output is not None:
        check_folder(output, overwrite)
    with progress_bars(as_json) as progress:
        found = measuring.attribute(
            model,
            keys=keys,
            top=top,
            revision=revision,
            progress=progress,
            calibration=calibration or None,
            samples=samples,
            sequence_length=sequence_length,
            seed=seed,
            device=device,
            dtype=dtype,
        )
        hubs, supers = find_hubs(found, threshold), super_experts(found)
        written = []
        if output is not None:
            written = write_attribution(found, hubs, supers, output, overwrite, threshold, top)
    show_attribution(found, hubs, supers, top, as_json, written)
