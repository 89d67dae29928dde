"""`split`: each routed expert as several narrower ones that compute the same."""

from typing import Annotated

import typer

from compressor.cli.options import COMPUTING, Model, Out, Running
from compressor.cli.terminal import command_line, progress_bars, tell
from compressor.planning.request import CALIBRATION, DEFAULT_LENGTH, KEEP, Request


def split(
    model: Model,
    output: Out,
    running: Running,
    request: Annotated[Request, ("seed", *COMPUTING)],
    parts: Annotated[int, typer.Option("--split", help="Parts that each routed expert becomes.", rich_help_panel=KEEP)],
    split_by: Annotated[
        str,
        typer.Option(
            help="How neurons are dealt out: by energy, or in clusters that fire together (needs --data).",
            rich_help_panel=KEEP,
        ),
    ] = "energy",
    data: Annotated[
        list[str] | None,
        typer.Option(
            help="Text on which neurons are measured, as --calibration of `compress` (default: their weights alone).",
            rich_help_panel=CALIBRATION,
        ),
    ] = None,
    samples: Annotated[int, typer.Option(help="Calibration sequences.", min=1, rich_help_panel=CALIBRATION)] = 128,
    sequence_length: Annotated[
        int, typer.Option(help="Tokens in each of them.", min=2, rich_help_panel=CALIBRATION)
    ] = DEFAULT_LENGTH,
) -> None:
    """Split each routed expert into narrower ones that compute the same; `compress` can then drop them one by one."""
    from dataclasses import asdict

    from compressor.api import splitting
    from compressor.document.blocks import Text

    with progress_bars(running.as_json) as progress:
        made = splitting.split(
            model,
            output,
            parts,
            data=data or (),
            by=split_by,
            samples=samples,
            sequence_length=sequence_length,
            seed=request.seed,
            revision=running.revision,
            dtype=request.dtype,
            device=request.device,
            overwrite=running.overwrite,
            progress=progress,
            command=command_line(),
        )
    told = (
        f"{made.experts_before} experts of {made.width_before} neurons became {made.experts_after} of "
        f"{made.width_after}, top-{made.top_k_before} became top-{made.top_k_after}; the function is the same."
    )
    tell(running.as_json, asdict(made), [Text(told), Text(f"Written to {made.out}")])
