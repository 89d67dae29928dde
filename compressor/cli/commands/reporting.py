"""`report`: one page about a compressed checkpoint, to be read by people."""

from pathlib import Path
from typing import Annotated

import typer

from compressor.cli.options import Computing, Running, TextFlags
from compressor.cli.terminal import progress_bars
from compressor.errors import CompressionError
from compressor.locking import alone


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
