"""`gate`: the command whose exit status lets a build fail when accuracy drops, and only then."""

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import compressor
from compressor.answers.options import ServerOptions
from compressor.cli.options import (
    GATE_OPTIONS,
    SERVER_OPTIONS,
    Reading,
    flag,
    listed,
)
from compressor.cli.terminal import print_report, reporting, written_line
from compressor.distributed import ranks, refuse_several
from compressor.document.terminal import show
from compressor.errors import CompressionError
from compressor.extras import TASKS, require
from compressor.options import validated
from compressor.progress import Progress
from compressor.quality_gate.options import DEFAULT_TASKS, DEMO_TASKS, GateOptions
from compressor.quality_gate.verdict import EXIT_STATUS, GateResult
from compressor.records import plain_json

if TYPE_CHECKING:
    from compressor.quality_gate.run import PowerAnalysis

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
        flag(
            "Comma-separated lm-eval tasks (default: mmlu,boolq,openbookqa,rte; none with --suite, --prompts, --text)."
        ),
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
    names_conditions = bool({"suite", "prompts", "text", "answers"} & options.keys())
    usual: tuple[str, ...] = () if names_conditions else DEFAULT_TASKS
    if demo:
        usual = DEMO_TASKS
        options = {"max_drop": DEMO_MAX_DROP, **options}
    options["tasks"] = listed(tasks, "--tasks") or usual
    gate_options = validated(GateOptions, options, "the command line")
    if gate_options.tasks:
        require(*TASKS)
    from compressor.quality_gate.report import NAMES, power_blocks, write_gate
    from compressor.quality_gate.run import GateRequest, passable, read_tasks

    computing: dict[str, Any] = {"device": running.device, "dtype": running.dtype, "cache": cache_dir}
    if dry_run:
        _, power = read_tasks(GateRequest.read(gate_options, **computing))
        print_report(running.as_json, plain_json(power), power_blocks(power))
        passable(power)
        return
    if base is None and not demo:
        raise CompressionError("name two models, the base and the compressed one, or pass --demo for an example")
    with reporting(output, NAMES, running.overwrite, running.as_json) as progress, ExitStack() as stack:
        if base is None:
            refuse_several("the demo's compression", "name two models")
            # before the demo is compressed
            _, power = read_tasks(GateRequest.read(gate_options, **computing))
            passable(power)
            base, compressed = stack.enter_context(_demo_models(progress))
        result = compressor.gate(
            base,
            compressed,
            gate_options,
            servers=ServerOptions(**servers),
            revision=running.revision,
            compressed_revision=compressed_revision,
            progress=progress,
            announce=None if running.as_json else print_power,
            **computing,
        )
        written = write_gate(result, output, running.overwrite) if output is not None and ranks().is_first else []
    summarise(result)
    show_gate(result, running.as_json, written)
    raise typer.Exit(EXIT_STATUS[gate_options.counted(result.verdict)])


@contextmanager
def _demo_models(progress: Progress) -> Iterator[tuple[str, str]]:
    """Yield the demo model and a compression of it."""
    from compressor.cli.demonstration import SAMPLES, TEXT
    from compressor.data.demo import demo_checkpoint

    with demo_checkpoint() as source, tempfile.TemporaryDirectory() as scratch:
        target = Path(scratch) / f"demo-{DEMO_EXPERTS}-experts"
        choice: dict[str, Any] = {"experts": DEMO_EXPERTS, "strategy": "hc-smoe", "correct": "tune"}
        choice |= {"samples": 2 * SAMPLES, "evaluate": False}
        compressor.compress(str(source), target, progress=progress, **TEXT, **choice)
        yield str(source), str(target)


def show_gate(result: GateResult, as_json: bool, written: Sequence[Path] = ()) -> None:
    """Print a row for each task, then the verdict and what would decide it; `written` are the reports' files."""
    from compressor.quality_gate.report import full_content, gate_blocks

    content = {**full_content(result), "written": [str(path) for path in written]}
    print_report(as_json, content, [*gate_blocks(result), *written_line(written)])


def print_power(power: "PowerAnalysis") -> None:
    """Print what a gate can show."""
    from compressor.quality_gate.report import power_blocks

    if ranks().is_first:
        show(power_blocks(power))


def summarise(result: GateResult) -> None:
    """Append the report to the summary page of a GitHub job, if this is one."""
    from compressor.quality_gate.report import append_summary

    page = os.environ.get("GITHUB_STEP_SUMMARY")
    if page and ranks().is_first:
        append_summary(result, Path(page))
