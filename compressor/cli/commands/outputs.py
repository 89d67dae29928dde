"""The commands on what was made: `export` to another format, `report` as a page, `push` to the Hugging Face Hub."""

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from compressor.cli.options import Computing, Model, Out, Publishing, Running, TextFlags
from compressor.cli.terminal import progress_bars
from compressor.errors import CompressionError
from compressor.files import alone
from compressor.publishing.hub import AGAIN

if TYPE_CHECKING:
    from compressor.publishing.push import PushSummary

ONNX = "ONNX"


def export(
    checkpoint: Model,
    output: Out,
    running: Running,
    format: Annotated[
        str, typer.Option("--format", help="onnx, or the name of another exporter that is installed.")
    ] = "onnx",
    option: Annotated[
        list[str] | None, typer.Option("--option", help="name=value for an option of the exporter; may be repeated.")
    ] = None,
    opset: Annotated[
        int | None, typer.Option(help="Version of the ONNX operators (default: 20).", rich_help_panel=ONNX)
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Of the weights: fp32 or fp16 (default: fp32).", rich_help_panel=ONNX)
    ] = None,
    quantize: Annotated[
        str | None,
        typer.Option(
            help="The experts' weights: none, int8 (by row) or int4 (by 32) (default: none).", rich_help_panel=ONNX
        ),
    ] = None,
    no_past: Annotated[
        bool, typer.Option("--no-past", help="No cache as inputs and outputs.", rich_help_panel=ONNX)
    ] = False,
    stream: Annotated[
        bool | None,
        typer.Option(
            "--stream/--no-stream",
            help="Verify with one layer in memory at a time, or with the whole model (default: layer by layer where "
            "the model does not fit).",
            rich_help_panel=ONNX,
        ),
    ] = None,
) -> None:
    """Write a checkpoint in another format, by default as a verified ONNX graph, one layer in memory at a time."""
    from compressor.api.exporting import export_checkpoint, find_exporter
    from compressor.checkpoint.source import locate
    from compressor.cli.rendering import show_export
    from compressor.recipe.plugins import read_option
    from compressor.recipe.registry import exporter_options

    flags: dict[str, Any] = {"opset": opset, "dtype": dtype, "quantize": quantize, "past": False if no_past else None}
    flags["stream"] = stream
    settings = {name: value for name, value in flags.items() if value is not None}
    for text in option or ():
        name, value = read_option(text, f"--option {text!r} should be name=value")
        if name == "overwrite":
            raise CompressionError("--option overwrite is the option --overwrite; pass that")
        settings[name] = value
    find_exporter(format)  # refused, as wrong options are, before a model is downloaded
    exporter_options(format, settings)
    with progress_bars(running.as_json) as progress:
        folder = locate(checkpoint, running.revision, progress).folder
        summary = export_checkpoint(format, folder, output, settings, running.overwrite, progress)
    show_export(format, output, summary, running.as_json)


def report(
    checkpoint: Annotated[Path, typer.Argument(help="A folder that compress or apply has written.")],
    text: Annotated[TextFlags, ("calibration",)],
    computing: Computing,
    running: Running,
    output: Annotated[Path, typer.Option("--output", "-o", help="The page to write.")] = Path("report.html"),
    model: Annotated[str | None, typer.Option(help="The source checkpoint, if it is not where it was.")] = None,
    samples: Annotated[
        int | None, typer.Option(help="Sequences to measure on (default: as many as make 16,384 tokens).")
    ] = None,
    sequence_length: Annotated[int | None, typer.Option(help="Tokens in each, of a text named here.")] = None,
    hubs: Annotated[Path | None, typer.Option(help="A hubs.json made by `moe-compress attribute`.")] = None,
    gate: Annotated[
        Path | None, typer.Option(metavar="GATE.JSON", help="The gate's result (default: gate.json in the folder).")
    ] = None,
    no_measure: Annotated[
        bool, typer.Option("--no-measure", help="Run no text: show what the folder says and the run noted.")
    ] = False,
    figures: Annotated[Path | None, typer.Option(help="New folder for the page's figures as PNG.")] = None,
) -> None:
    """Write one self-contained HTML page: what was done, sizes, similarities, visits, errors, hubs, gate, timings."""
    from compressor.report.data import report_data
    from compressor.report.measuring import kept_measures, measure
    from compressor.report.page import check_report, write_report

    if not checkpoint.is_dir():
        raise CompressionError(f"{checkpoint} is not a folder; name one that moe-compress has written")
    check_report(output, figures, running.overwrite)
    data = report_data(checkpoint, None, hubs, gate)  # whatever is wrong with it is told before anything runs
    with alone(output):
        if no_measure:
            measured = kept_measures(checkpoint, "run")
        else:
            with progress_bars(running.as_json) as progress:
                measured = measure(
                    checkpoint,
                    model,
                    running.revision,
                    text.calibration,
                    samples,
                    sequence_length,
                    progress,
                    computing.device,
                    computing.dtype,
                )
        data = report_data(checkpoint, measured, hubs, gate)
        written = write_report(data, output, figures, running.overwrite)
    if running.as_json:
        typer.echo(data.to_json())
        return
    for sentence in data.missing:
        typer.echo(sentence, err=True)
    typer.echo(f"Written to {output}" + (f", {len(written)} figures to {figures}" if figures else ""))


def push(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint folder, or one of an ONNX export.")],
    repo_id: Annotated[str, typer.Argument(help="The model on the Hub, as NAMESPACE/NAME; made if it is missing.")],
    running: Annotated[Running, ("as_json",)],
    private: Annotated[
        bool, typer.Option("--private", help="Make the repository private; never use a public one.")
    ] = False,
    revision: Annotated[str | None, typer.Option(metavar="BRANCH", help="Branch to push to; made if missing.")] = None,
    create_pr: Annotated[bool, typer.Option("--create-pr", help="Open a pull request instead.")] = False,
    message: Annotated[str | None, typer.Option(help="Of the commit (default: how the model was made).")] = None,
    tag: Annotated[str | None, typer.Option(help="A tag for the commit.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Verify and list what would be sent; send nothing.")
    ] = False,
    require_gate: Annotated[
        Path | None, typer.Option(metavar="GATE.JSON", help="Push only what passed this gate, and as it was then.")
    ] = None,
) -> None:
    """Publish on the Hugging Face Hub: verified anew, with a model card, in one commit (log in: `hf auth login`)."""
    from compressor.cli.rendering import show_push
    from compressor.publishing.push import push as publish

    with hub_bars(running.as_json):
        summary = publish(
            checkpoint,
            repo_id,
            private=private,
            revision=revision,
            create_pr=create_pr,
            message=message,
            tag=tag,
            dry_run=dry_run,
            require_gate=require_gate,
        )
    show_push(summary, running.as_json)


def check_access(repo_id: str, private: bool) -> None:
    """Refuse before hours of work what a push after them would be refused for: the name, the login, the repository."""
    from compressor.publishing import push as pushing

    pushing.check_access(repo_id, private)


def push_made(output: Path, publishing: Publishing, require_gate: Path | None, as_json: bool) -> "PushSummary | None":
    """Push what was just made, if that is asked for; a fault says that the output is whole and how to push it alone."""
    if publishing.push_to_hub is None:
        return None
    from compressor.publishing.push import push as publish

    repo_id, private = publishing.push_to_hub, publishing.private
    try:
        with hub_bars(as_json):
            return publish(output, repo_id, private=private, require_gate=require_gate)
    except CompressionError as error:
        again = f"moe-compress push {output} {repo_id}{' --private' if private else ''}"
        said = str(error)
        if AGAIN in said:
            said = said.replace(AGAIN, f"then run {again}, which goes on where it stopped")
        else:
            said = f"{said} (then: {again})"
        raise CompressionError(f"{output} is made and whole, but was not pushed: {said}") from None


@contextmanager
def hub_bars(as_json: bool) -> Iterator[None]:
    """The bars of the Hub's client on a terminal, or none; transformers, which switches them on again, is asked too."""
    from huggingface_hub.utils import are_progress_bars_disabled, enable_progress_bars
    from transformers.utils import logging

    quiet = as_json or not sys.stderr.isatty()
    own, shown = logging.is_progress_bar_enabled(), not are_progress_bars_disabled()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # where the environment decides
        if quiet:
            logging.disable_progress_bar()
    try:
        yield
    finally:
        if quiet and own:
            logging.enable_progress_bar()
        elif quiet and shown:
            enable_progress_bars()
