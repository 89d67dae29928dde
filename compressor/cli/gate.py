"""`gate` and its modes: commands whose exit status lets a build fail when accuracy drops, and only
then."""

import logging
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import typer

import compressor
from compressor.answers.options import ServerOptions, TaskOptions
from compressor.cli.options import (
    GATE_OPTIONS,
    SERVER_OPTIONS,
    Reading,
    Running,
    Writing,
    flag,
    listed,
    options_of,
)
from compressor.cli.terminal import (
    annotate,
    print_report,
    progress_bars,
    reporting,
    written_line,
)
from compressor.data.sources import refuse_absent_texts
from compressor.distributed import ranks, refuse_several
from compressor.document.terminal import show
from compressor.errors import CompressionError
from compressor.extras import TASKS, require
from compressor.files import LONE_HALVES, check_folder, refuse_absent
from compressor.formatting import one_line
from compressor.options import validated
from compressor.progress import Progress
from compressor.quality_gate.options import DEFAULT_TASKS, DEMO_TASKS, GateOptions
from compressor.quality_gate.verdict import EXIT_STATUS, GateResult

if TYPE_CHECKING:
    from compressor.quality_gate.run import PowerAnalysis

logger = logging.getLogger(__name__)

SHOWN = (  # by `gate --help`, others by `--help-all`
    "tasks",
    "suite",
    "apply_chat_template",
    "num_fewshot",
    "limit",
    "prompts",
    "text",
    "baseline",
    "server",
    "max_drop",
    "max_task_drop",
    "max_length_change",
    "output",
    "dry_run",
    "demo",
    "help_all",
)
DEMO_EXPERTS = 12  # of 16, that `gate --demo` keeps
DEMO_MAX_DROP = 0.05  # what 250 items, `--demo --limit 50`, show with room for a few flips

Options = dict[str, Any]  # those that are given, by name
Reports = Annotated[Path | None, flag("New folder for gate.json, gate.xml (JUnit) and gate.md.")]
CacheFolder = Annotated[
    Path | None, flag("Folder of results to reuse (default: the user's cache folder).")
]
JUDGING = options_of(GateOptions, only=("max_drop", "max_task_drop", "confidence", "inconclusive"))
# of a base alone
BASE_SERVER = [option for option in SERVER_OPTIONS if option[0].startswith(("base_", "timeout"))]
USUAL_TASKS = f"default: {','.join(DEFAULT_TASKS)}"


@contextmanager
def _reporting_errors(report: Path | None, as_json: bool) -> Iterator[None]:
    """Where the block ends with an error, have gate.xml in the folder `report` and a GitHub job's
    page say so.

    The report of an earlier run stays, but for one of an error.
    """
    from compressor.quality_gate.report import clear_error, write_error

    if not ranks().is_first:
        report = None
    if report is not None:
        clear_error(report)
    try:
        yield
    except (CompressionError, OSError) as error:
        message = one_line(str(error), None)
        annotate("error", "Accuracy gate", message, as_json)
        if report is not None:
            with suppress(CompressionError, OSError):  # the error itself may be of this folder
                write_error(message, report)
        raise


def gate(
    options: Annotated[Options, GATE_OPTIONS],
    servers: Annotated[Options, SERVER_OPTIONS],
    running: Reading,
    base: Annotated[
        str | None, typer.Argument(help="The base: a checkpoint folder or a Hub id.")
    ] = None,
    compressed: Annotated[
        str | None, typer.Argument(help="The compressed model, or the tokenizer of a served one.")
    ] = None,
    tasks: Annotated[
        str | None,
        flag(
            f"Comma-separated lm-eval tasks ({USUAL_TASKS}). Beside --suite, --prompts and --text "
            "none are usual."
        ),
    ] = None,
    output: Reports = None,
    save_baseline: Annotated[Path | None, flag("As gate baseline, first.", hidden=True)] = None,
    compressed_revision: Annotated[str | None, flag("The same of the compressed model.")] = None,
    dry_run: Annotated[
        bool, flag("Print what the gate can show. Nothing is run, and no models are needed.")
    ] = False,
    demo: Annotated[
        bool,
        flag(
            "Use the demo's tasks, and without models the demo model. The largest drop that passes "
            f"is then {DEMO_MAX_DROP}."
        ),
    ] = False,
    cache_dir: CacheFolder = None,
) -> None:
    """Test if a compressed model is as good: exit status 0 if it is, 1 if not, 3 if undecided.

    `gate results A B` tests it by results that are recorded, and `gate baseline BASE FILE` keeps a
    base's answers for --baseline. (Write ./results for a model's folder of that name.)
    """
    from compressor.quality_gate.report import NAMES

    with _reporting_errors(None if dry_run else output, running.as_json):
        if demo:
            options = {"max_drop": DEMO_MAX_DROP, **options}
        gate_options = _gate_options(options, tasks, DEMO_TASKS if demo else ())
        if dry_run:
            _show_power(gate_options, running.as_json)
            return
        # what can be refused before torch is loaded
        gate_options.check()
        if output is not None:
            check_folder(output, NAMES, running.overwrite)
        refuse_absent_texts(gate_options.prompts, "prompts")
        refuse_absent_texts(gate_options.text, "text")
        for model in (base, compressed):
            refuse_absent(model)
        if gate_options.baseline is not None and base is not None and compressed is None:
            base, compressed = None, base
        elif base is None and not demo:
            raise CompressionError(
                "name two models, the base and the compressed one, or pass --demo for an example"
            )
        written = []
        with ExitStack() as stack:
            progress = stack.enter_context(
                reporting(output, NAMES, running.overwrite, running.as_json)
            )
            if base is None and compressed is None:
                base, compressed = stack.enter_context(_demo_models(gate_options, progress))
            shared = {
                **running.reading(progress),
                "servers": ServerOptions(**servers),
                "cache": cache_dir,
            }
            if save_baseline is not None and base is not None:
                written.append(save_baseline)
                compressor.save_baseline(
                    base, save_baseline, gate_options, overwrite=running.overwrite, **shared
                )
                if compressed is None and "server" not in servers:
                    _print_written(written, running.as_json)
                    return
            result = compressor.gate(
                base,
                compressed,
                gate_options,
                compressed_revision=compressed_revision,
                announce=None if running.as_json else print_power,
                **shared,
            )
        _end(result, gate_options, output, running, written)


def gate_results(
    options: Annotated[Options, JUDGING],
    running: Writing,
    base: Annotated[Path, typer.Argument(help="A file or folder of results of the base.")],
    compressed: Annotated[Path, typer.Argument(help="Those of the compressed model.")],
    tasks: Annotated[
        str | None, flag("Comma-separated tasks to compare (default: all in the files).")
    ] = None,
    metric: Annotated[
        str | None, flag("METRIC or METRIC,FILTER, or inspect's scorer (default: the first).")
    ] = None,
    output: Reports = None,
) -> None:
    """Test by recorded results if a compressed model is as good, with gate's exit statuses; no
    model is loaded.

    Results are those of lm-eval, EvalPlus or inspect, or CSV with the columns item and score."""
    with _reporting_errors(output, running.as_json):
        wanted = listed(tasks, "--tasks") or ()
        judging = {**options, "tasks": wanted or ["all"]}
        gate_options = validated(GateOptions, judging, "the command line")
        result = compressor.gate_results(base, compressed, gate_options, wanted, metric)
        _end(result, gate_options, output, running)


def gate_baseline(
    options: Annotated[Options, options_of(TaskOptions, without=("tasks",))],
    servers: Annotated[Options, BASE_SERVER],
    running: Reading,
    base: Annotated[str, typer.Argument(help="The base: a checkpoint folder or a Hub id.")],
    file: Annotated[Path, typer.Argument(help="New file, .json or .json.gz.")],
    tasks: Annotated[str | None, flag(f"Comma-separated lm-eval tasks ({USUAL_TASKS}).")] = None,
    cache_dir: CacheFolder = None,
) -> None:
    """Keep a base's answers to tasks in a file, which takes the base's place in gate --baseline."""
    with _reporting_errors(None, running.as_json):
        gate_options = _gate_options(options, tasks)
        refuse_absent(base)
        with progress_bars(running.as_json) as progress:
            compressor.save_baseline(
                base,
                file,
                gate_options,
                servers=ServerOptions(**servers),
                cache=cache_dir,
                overwrite=running.overwrite,
                **running.reading(progress),
            )
        _print_written([file], running.as_json)


def _gate_options(
    options: Options, tasks: str | None, of_demo: tuple[str, ...] = ()
) -> GateOptions:
    """Return the options with the named tasks or those of the demo, or the usual ones if nothing
    else is judged."""
    named = listed(tasks, "--tasks") or of_demo
    if not named and not {"suite", "prompts", "text", "answers", "baseline"} & options.keys():
        named = DEFAULT_TASKS
    if named:
        options = {**options, "tasks": named}
    gate_options = validated(GateOptions, options, "the command line")
    if gate_options.tasks:
        require(*TASKS)
    return gate_options


def _show_power(options: GateOptions, as_json: bool) -> None:
    """Print what a gate can show; raise `CompressionError` if no model could pass it."""
    from compressor.quality_gate.report import power_blocks
    from compressor.quality_gate.run import GateRequest, passable

    power = GateRequest.read(options).power
    print_report(as_json, power, power_blocks(power))
    passable(power)


@contextmanager
def _demo_models(options: GateOptions, progress: Progress) -> Iterator[tuple[str, str]]:
    """Yield the demo's checkpoint and a smaller one made of it, if a gate of these options can be
    passed."""
    from compressor.cli.demonstration import SAMPLES, TEXT
    from compressor.data.demo import demo_checkpoint
    from compressor.quality_gate.run import GateRequest, passable

    refuse_several("the demo's compression", "name two models")
    passable(GateRequest.read(options).power)
    with demo_checkpoint() as base, tempfile.TemporaryDirectory() as scratch:
        compressed = f"{scratch}/demo-{DEMO_EXPERTS}-experts"
        choice: Options = {"strategy": "hc-smoe", "correct": "tune", **TEXT}
        choice |= {"experts": DEMO_EXPERTS, "samples": 2 * SAMPLES, "evaluate": False}
        compressor.compress(str(base), compressed, progress=progress, **choice)
        yield str(base), compressed


def _print_written(files: Sequence[Path], as_json: bool) -> None:
    """Print which files were written."""
    print_report(as_json, {"written": [str(file) for file in files]}, written_line(files))


def _end(
    result: GateResult,
    options: GateOptions,
    output: Path | None,
    running: Running,
    written: Sequence[Path] = (),
) -> NoReturn:
    """Write and print the result, and exit with the status of its verdict."""
    from compressor.quality_gate.report import full_content, gate_blocks, keep_result, write_gate

    if ranks().is_first:
        keep_result(result)
        if output is not None:
            written = [*written, *write_gate(result, output, running.overwrite)]
    summarise(result, running.as_json)
    content = {**full_content(result), "written": [str(path) for path in written]}
    print_report(running.as_json, content, [*gate_blocks(result), *written_line(written)])
    raise typer.Exit(EXIT_STATUS[options.counted(result.verdict)])


def print_power(power: "PowerAnalysis") -> None:
    """Print what a gate can show."""
    from compressor.quality_gate.report import power_blocks

    if ranks().is_first:
        show(power_blocks(power))


def summarise(result: GateResult, as_json: bool) -> None:
    """Append the report to the summary page of a GitHub job, if this is one, and its verdict to the
    job's messages."""
    from compressor.quality_gate.report import advice, gate_page, verdict_line

    if result.verdict != "pass":
        level: Literal["error", "warning"] = "error" if result.verdict == "fail" else "warning"
        text = "\n".join([verdict_line(result), *advice(result)])
        annotate(level, f"Accuracy gate of {result.compressed}", text, as_json)
    path = os.environ.get("GITHUB_STEP_SUMMARY")
    if path and ranks().is_first:
        try:
            with open(path, "a", encoding="utf-8", errors=LONE_HALVES) as stream:
                stream.write(f"\n{gate_page(result)}\n")
        except OSError as error:  # no failed gate
            logger.warning(
                "the gate's summary could not be appended to %s: %s", path, error.strerror
            )
