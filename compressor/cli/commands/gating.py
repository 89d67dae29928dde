"""`gate`: the command whose exit status lets a build fail when accuracy drops, and only then."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

import compressor
from compressor.cli.commands.bars import progress_bars
from compressor.cli.commands.exporting import onnx_beside
from compressor.cli.commands.publishing import push_made
from compressor.cli.demonstration import LENGTH
from compressor.cli.options import (
    AsJson,
    BatchSize,
    CacheDir,
    Confidence,
    Device,
    Dtype,
    IncludePath,
    Inconclusive,
    Limit,
    MaxDrop,
    Overwrite,
    Revision,
    gate_request,
    listed,
    treat_inconclusive,
)
from compressor.errors import CompressionError
from compressor.gates.verdict import EXIT_STATUS, GateResult, Verdict
from compressor.progress import Progress

if TYPE_CHECKING:
    from compressor.gates.run import GateRequest

DEMO_EXPERTS = 12  # of 16, that `gate --demo` keeps
MAX_DROP, DEMO_MAX_DROP = 0.01, 0.05  # 200 items a skill cannot show less than 0.015


def gate(
    base: Annotated[str | None, typer.Argument(help="The original: a checkpoint folder or a Hub id.")] = None,
    compressed: Annotated[str | None, typer.Argument(help="The compressed model.")] = None,
    tasks: Annotated[
        str | None, typer.Option(help="lm-eval tasks separated by commas (default: mmlu,boolq,openbookqa,rte).")
    ] = None,
    max_drop: MaxDrop = None,
    confidence: Confidence = 0.95,
    limit: Limit = None,
    include_path: IncludePath = None,
    batch_size: BatchSize = "auto",
    inconclusive: Inconclusive = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="New folder for gate.json, gate.xml (JUnit) and gate.md.")
    ] = None,
    revision: Revision = None,
    compressed_revision: Annotated[str | None, typer.Option(help="The same of the compressed model.")] = None,
    demo: Annotated[
        bool,
        typer.Option("--demo", help="Use the demo's five tasks, and without models the demo model, compressed here."),
    ] = False,
    cache_dir: CacheDir = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Test whether a compressed model is as good: exit status 0 if it is, 1 if not, 3 if the items cannot tell."""
    from compressor.api import measuring
    from compressor.cli.gate_table import show_gate
    from compressor.files import check_folder
    from compressor.gates.report import NAMES, write_gate
    from compressor.gates.run import DEFAULT_TASKS, DEMO_TASKS

    decided = treat_inconclusive(inconclusive)
    chosen = listed(tasks, "--tasks") or (DEMO_TASKS if demo else DEFAULT_TASKS)
    margin = (DEMO_MAX_DROP if demo else MAX_DROP) if max_drop is None else max_drop
    wanted = gate_request(chosen, margin, confidence, limit, include_path, batch_size, device, dtype, cache_dir)
    if output is not None:
        check_folder(output, NAMES, overwrite)
    with progress_bars(as_json) as progress, _models(base, compressed, demo, progress) as (first, second):
        result = measuring.gate(
            first, second, wanted, revision=revision, compressed_revision=compressed_revision, progress=progress
        )
        written = [] if output is None else write_gate(result, output, overwrite)
    summarise(result)
    show_gate(result, as_json, written)
    raise typer.Exit(EXIT_STATUS[decided if result.verdict == "inconclusive" else result.verdict])


def compress_under_gate(
    model: str,
    output: Path,
    wanted: "GateRequest",
    decided: Verdict,
    keep_failed: bool,
    search: bool,
    as_json: bool,
    formats: tuple[str, ...],
    request: dict[str, Any],
    push_to_hub: str | None = None,
    private: bool = False,
) -> NoReturn:
    """Compress, gate, publish what passes if that is asked for, show it all; the exit status is the gate's."""
    from compressor.api.searching import compress_gated
    from compressor.cli.gate_table import show_gated
    from compressor.files import check_folder
    from compressor.gates.report import NAMES, write_gate

    if "safetensors" not in formats:
        raise CompressionError("--gate judges a safetensors output; pass --format safetensors,onnx with it")
    reports = output.with_name(f"{output.name}.gate")
    check_folder(reports, NAMES, overwrite=True)
    with progress_bars(as_json) as progress:
        found = compress_gated(
            model, output, wanted, inconclusive=decided, keep_failed=keep_failed, search=search, progress=progress,
            after=onnx_beside(formats, progress), **request,
        )  # fmt: skip
        result = found.decisive.result
        written = write_gate(result, reports, overwrite=True)
    summarise(result)
    status = EXIT_STATUS[decided if result.verdict == "inconclusive" else result.verdict]
    pushed = None
    if push_to_hub is not None and found.summary is not None and status == EXIT_STATUS["pass"]:
        report = output / "gate.json" if result.verdict == "pass" else None  # else the user has decided
        pushed = push_made(output, push_to_hub, private, report, as_json)
    show_gated(found, as_json, written, pushed)
    raise typer.Exit(status)


@contextmanager
def _models(base: str | None, compressed: str | None, demo: bool, progress: Progress) -> Iterator[tuple[str, str]]:
    """The two models to compare; for the demo without any, the embedded one and its compression."""
    if base is not None and compressed is not None:
        yield base, compressed
    elif base is not None or not demo:
        raise CompressionError("name two models, the original and the compressed one, or pass --demo for an example")
    else:
        from compressor.cli.demonstration import SAMPLES
        from compressor.demo.evaluation import demo_checkpoint

        with demo_checkpoint() as source, tempfile.TemporaryDirectory() as scratch:
            target = Path(scratch) / f"demo-{DEMO_EXPERTS}-experts"
            compressor.compress(
                str(source), target, experts=DEMO_EXPERTS, strategy="hc-smoe", correct="tune", calibration="demo",
                samples=2 * SAMPLES, sequence_length=LENGTH, progress=progress,
            )  # fmt: skip
            yield str(source), str(target)


def summarise(result: GateResult) -> None:
    """Append the report to the summary page of a GitHub job, if this is one."""
    from compressor.gates.report import append_summary

    if page := os.environ.get("GITHUB_STEP_SUMMARY"):
        append_summary(result, Path(page))
