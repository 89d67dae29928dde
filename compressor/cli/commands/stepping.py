"""`split`, `calibrate-router` and `distill`: commands that carry out one step on a checkpoint."""

from functools import partial
from typing import Annotated, Any

import typer

from compressor.cli.options import Computing, Model, Out, Running, TextFlags
from compressor.cli.parameters import STEPS, Flags, step_options
from compressor.cli.terminal import command_line, progress_bars
from compressor.recipe.step import TextOptions
from compressor.steps.distill.step import Distill
from compressor.steps.routers.step import Routers
from compressor.steps.split.step import Split

OWN_TEXT = ("calibration", "seed")  # of steps whose sequences are options of their own

Base = Annotated[str, typer.Option(help="The model that the checkpoint was made of: a folder or a Hub id.")]


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


def calibrate_router(
    checkpoint: Model,
    output: Out,
    running: Running,
    text: Annotated[TextFlags, OWN_TEXT],
    computing: Computing,
    base: Base,
    options: Annotated[dict[str, Any], Flags(partial(step_options, Routers, STEPS))],
) -> None:
    """Move a smaller model's routers toward its base on text, as far as held-out text is nearer to it (after C3PO)."""
    _carry_out("routers", checkpoint, output, running, text, computing, options, base)


def distill(
    checkpoint: Model,
    output: Out,
    running: Running,
    text: Annotated[TextFlags, OWN_TEXT],
    computing: Computing,
    base: Base,
    options: Annotated[dict[str, Any], Flags(partial(step_options, Distill, STEPS))],
) -> None:
    """Train a smaller model toward its base's next-token distribution on text."""
    _carry_out("distill", checkpoint, output, running, text, computing, options, base)


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
