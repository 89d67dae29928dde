"""`gate`: the command whose exit status lets a build fail when accuracy drops, and only then."""

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

import compressor
from compressor.cli.options import (
    GATE_OPTIONS,
    PATHWAY_OPTIONS,
    GateRun,
    Publishing,
    RoutingFlags,
    Running,
    UnderGate,
    flag,
    listed,
    without_none,
)
from compressor.cli.outputs import push_made
from compressor.cli.terminal import print_report, progress_bars, reporting
from compressor.distributed import here, refuse_several
from compressor.errors import CompressionError
from compressor.evaluation.gate_verdict import EXIT_STATUS, GateResult
from compressor.progress import Progress
from compressor.recipe.recipe import Recipe
from compressor.records import plain_json

if TYPE_CHECKING:
    from compressor.evaluation.gate import Outlook

DEMO_EXPERTS = 12  # of 16, that `gate --demo` keeps
DEMO_MAX_DROP = 0.05  # what 250 items, `--demo --limit 50`, show with room for a few flips


def gate(
    options: Annotated[dict[str, Any], GATE_OPTIONS],
    gate_run: GateRun,
    routing_flags: RoutingFlags,
    pathways: Annotated[dict[str, Any], PATHWAY_OPTIONS],
    running: Running,
    base: Annotated[str | None, typer.Argument(help="The base: a checkpoint folder or a Hub id.")] = None,
    compressed: Annotated[str | None, typer.Argument(help="The compressed model.")] = None,
    tasks: Annotated[str | None, flag("Comma-separated lm-eval tasks (default: mmlu,boolq,openbookqa,rte).")] = None,
    output: Annotated[Path | None, flag("New folder for gate.json, gate.xml (JUnit) and gate.md.")] = None,
    compressed_revision: Annotated[str | None, flag("The same of the compressed model.")] = None,
    dry_run: Annotated[bool, flag("Print what the gate can show, and run nothing; needs no models.")] = False,
    demo: Annotated[
        bool,
        flag(
            f"Use the demo's five tasks and a largest drop of {DEMO_MAX_DROP}, and without models the demo model, "
            "compressed here."
        ),
    ] = False,
    cache_dir: Annotated[Path | None, flag("Folder of results to reuse (default: the user's cache folder).")] = None,
) -> None:
    """Test whether a compressed model is as good: exit status 0 if it is, 1 if not, 3 if the items cannot tell."""
    from compressor.cli.rendering import show_gate
    from compressor.evaluation.gate import DEFAULT_TASKS, DEMO_TASKS, outlook, passable
    from compressor.evaluation.gate_report import NAMES, write_gate
    from compressor.evaluation.tasks import resolve_tasks

    requested = {"max_drop": DEMO_MAX_DROP if demo else None, **without_none(options)}
    requested["tasks"] = listed(tasks, "--tasks") or (DEMO_TASKS if demo else DEFAULT_TASKS)
    wanted = gate_run.request(requested, running.device, running.dtype, cache_dir)
    routing = routing_flags.read(pathways, of_two=compressed is not None)
    if dry_run or (base is None and demo):  # of the demo, before it is compressed
        found = outlook(here().first_before_others(lambda: resolve_tasks(wanted.options)), wanted)
        if dry_run:
            announcer(running.as_json, dry_run)(found)
        passable(found)
    if dry_run:
        return
    if base is None:
        refuse_several("the demo's compression", "name two models")
    with (
        reporting(output, NAMES, running.overwrite, running.as_json) as progress,
        _models(base, compressed, demo, progress) as (first, second),
    ):
        result = compressor.gate(
            first,
            second,
            wanted,
            revision=running.revision,
            compressed_revision=compressed_revision,
            routing=routing,
            progress=progress,
            announce=announcer(running.as_json),
        )
        written = write_gate(result, output, running.overwrite) if output is not None and here().is_first else []
    if here().is_first:
        summarise(result)
    show_gate(result, running.as_json, written)
    raise typer.Exit(EXIT_STATUS[wanted.counted(result.verdict)])


def compress_under_gate(
    recipe: Recipe,
    output: Path,
    formats: Sequence[str],
    under_gate: UnderGate,
    publishing: Publishing,
    running: Running,
) -> NoReturn:
    """Compress, gate, publish what passes if that is asked for, show it all; the exit status is the gate's."""
    from compressor.cli.exporting import WRITER, additions
    from compressor.cli.rendering import show_gated
    from compressor.cli.searching import compress_gated
    from compressor.evaluation.gate_report import NAMES, write_gate
    from compressor.files import check_folder

    assert recipe.gate is not None
    wanted = under_gate.request(recipe.gate.model_dump(), running.device)
    if WRITER not in formats:
        raise CompressionError("--gate judges a safetensors output; pass --format safetensors,onnx with it")
    reports = output.with_name(f"{output.name}.gate")
    here().broadcast(lambda: check_folder(reports, NAMES, overwrite=True))
    with progress_bars(running.as_json) as progress:
        gated = compress_gated(
            recipe,
            output,
            wanted,
            keep_failed=under_gate.keep_failed,
            search=under_gate.search,
            after=additions(formats, progress),
            terms=",".join(formats),
            announce=announcer(running.as_json),
            **running.making(progress),
        )
        result = gated.decisive.result
        written = write_gate(result, reports, overwrite=True) if here().is_first else []
    status, pushed = here().broadcast(lambda: EXIT_STATUS[wanted.counted(result.verdict)]), None
    if not here().is_first:
        raise typer.Exit(status)
    summarise(result)
    if gated.outcome is not None and status == EXIT_STATUS["pass"]:
        report = output / "gate.json" if result.verdict == "pass" else None  # else the user has decided
        pushed = push_made(output, publishing, report, running.as_json)
    show_gated(gated, running.as_json, written, pushed)
    raise typer.Exit(status)


@contextmanager
def _models(base: str | None, compressed: str | None, demo: bool, progress: Progress) -> Iterator[tuple[str, str]]:
    if base is not None and compressed is not None:
        yield base, compressed
    elif base is not None or not demo:
        raise CompressionError("name two models, the base and the compressed one, or pass --demo for an example")
    else:
        from compressor.cli.demonstration import SAMPLES, TEXT
        from compressor.data.demo import demo_checkpoint

        with demo_checkpoint() as source, tempfile.TemporaryDirectory() as scratch:
            target = Path(scratch) / f"demo-{DEMO_EXPERTS}-experts"
            choice: dict[str, Any] = {"experts": DEMO_EXPERTS, "strategy": "hc-smoe", "correct": "tune"}
            compressor.compress(str(source), target, samples=2 * SAMPLES, progress=progress, **TEXT, **choice)
            yield str(source), str(target)


def announcer(as_json: bool, dry_run: bool = False) -> Callable[["Outlook"], None]:
    """What prints what a gate can show: as its first lines, or as all that a dry run prints."""
    from compressor.evaluation.gate_report import outlook_blocks

    def announce(found: "Outlook") -> None:
        if here().is_first and (dry_run or not as_json):
            print_report(as_json, plain_json(found), outlook_blocks(found))

    return announce


def summarise(result: GateResult) -> None:
    """Append the report to the summary page of a GitHub job, if this is one."""
    from compressor.evaluation.gate_report import append_summary

    if page := os.environ.get("GITHUB_STEP_SUMMARY"):
        append_summary(result, Path(page))
