"""`gate`: the command whose exit status lets a build fail when accuracy drops, and only then."""

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import compressor
from compressor.cli.options import (
    GATE_OPTIONS,
    SERVER_OPTIONS,
    Reading,
    flag,
    listed,
)
from compressor.cli.terminal import print_report, reporting
from compressor.distributed import ranks, refuse_several
from compressor.errors import CompressionError
from compressor.evaluation.gate_verdict import EXIT_STATUS, GateResult
from compressor.evaluation.options import ServerOptions
from compressor.extras import TASKS, require
from compressor.progress import Progress
from compressor.recipe.recipe import GateOptions, validated
from compressor.records import plain_json

if TYPE_CHECKING:
    from compressor.evaluation.gate import Outlook

DEMO_EXPERTS = 12  # of 16, that `gate --demo` keeps
DEMO_MAX_DROP = 0.05  # what 250 items, `--demo --limit 50`, show with room for a few flips


def gate(
    options: Annotated[dict[str, Any], GATE_OPTIONS],
    servers: Annotated[dict[str, Any], SERVER_OPTIONS],
    running: Reading,
    base: Annotated[str | None, typer.Argument(help="The base: a checkpoint folder or a Hub id.")] = None,
    compressed: Annotated[
        str | None, typer.Argument(help="The compressed model, or a served one's tokenizer (default: the base's).")
    ] = None,
    tasks: Annotated[
        str | None,
        flag("Comma-separated lm-eval tasks (default: mmlu,boolq,openbookqa,rte; none beside --prompts or --text)."),
    ] = None,
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
    judged = {"prompts", "text", "answers"} & options.keys()
    if tasks or demo or not judged:
        require(*TASKS)
    from compressor.cli.rendering import show_gate
    from compressor.evaluation.gate import DEFAULT_TASKS, DEMO_TASKS, passable
    from compressor.evaluation.gate_report import NAMES, write_gate
    from compressor.pipeline.gate import gate_request, read_outlook

    usual = () if judged and not demo else DEMO_TASKS if demo else DEFAULT_TASKS
    named = listed(tasks, "--tasks") or usual
    requested = {**({"max_drop": DEMO_MAX_DROP} if demo else {}), **options, "tasks": named}
    chosen = validated(GateOptions, requested, "the command line")
    wanted = gate_request(chosen, running.device, running.dtype, cache_dir)
    asked = ServerOptions(**servers)
    if dry_run or (base is None and demo):  # of the demo, before it is compressed
        prospects = read_outlook(wanted)
        if dry_run:
            announcer(running.as_json, dry_run)(prospects)
        passable(prospects)
    if dry_run:
        return
    if base is None:
        refuse_several("the demo's compression", "name two models")
    with (
        reporting(output, NAMES, running.overwrite, running.as_json) as progress,
        _models(base, compressed, demo, progress, asked.server is not None) as (first, second),
    ):
        result = compressor.gate(
            first,
            second,
            wanted,
            servers=asked,
            revision=running.revision,
            compressed_revision=compressed_revision,
            progress=progress,
            announce=announcer(running.as_json),
        )
        written = write_gate(result, output, running.overwrite) if output is not None and ranks().is_first else []
    if ranks().is_first:
        summarise(result)
    show_gate(result, running.as_json, written)
    raise typer.Exit(EXIT_STATUS[wanted.counted(result.verdict)])


@contextmanager
def _models(
    base: str | None, compressed: str | None, demo: bool, progress: Progress, served: bool
) -> Iterator[tuple[str, str | None]]:
    if base is not None and (compressed is not None or served):
        yield base, compressed
    elif base is not None or not demo:
        raise CompressionError("name two models, the base and the compressed one, or pass --demo for an example")
    else:
        from compressor.cli.demonstration import SAMPLES, TEXT
        from compressor.data.demo import demo_checkpoint

        with demo_checkpoint() as source, tempfile.TemporaryDirectory() as scratch:
            target = Path(scratch) / f"demo-{DEMO_EXPERTS}-experts"
            choice: dict[str, Any] = {"experts": DEMO_EXPERTS, "strategy": "hc-smoe", "correct": "tune"}
            choice |= {"samples": 2 * SAMPLES, "evaluate": False}
            compressor.compress(str(source), target, progress=progress, **TEXT, **choice)
            yield str(source), str(target)


def announcer(as_json: bool, dry_run: bool = False) -> Callable[["Outlook"], None]:
    """Return a function that prints what a gate can show: as its first lines, or as all that a dry run prints."""
    from compressor.evaluation.gate_report import outlook_blocks

    def announce(prospects: "Outlook") -> None:
        if ranks().is_first and (dry_run or not as_json):
            print_report(as_json, plain_json(prospects), outlook_blocks(prospects))

    return announce


def summarise(result: GateResult) -> None:
    """Append the report to the summary page of a GitHub job, if this is one."""
    from compressor.evaluation.gate_report import append_summary

    if page := os.environ.get("GITHUB_STEP_SUMMARY"):
        append_summary(result, Path(page))
