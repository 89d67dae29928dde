"""`gate`: the command whose exit status lets a build fail when accuracy drops, and only then."""

import logging
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import typer

import compressor
from compressor.answers.options import ServerOptions
from compressor.cli.options import GATE_OPTIONS, SERVER_OPTIONS, Reading, Running, flag, listed
from compressor.cli.terminal import annotate, print_report, reporting, written_line
from compressor.data.sources import refuse_absent_texts
from compressor.distributed import ranks, refuse_several
from compressor.document.terminal import show
from compressor.errors import CompressionError
from compressor.extras import TASKS, require
from compressor.files import LONE_HALVES, check_folder, refuse_absent
from compressor.formatting import joined, one_line
from compressor.options import validated
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
    "results",
    "baseline",
    "save_baseline",
    "server",
    "max_drop",
    "max_task_drop",
    "max_length_change",
    "output",
    "dry_run",
    "demo",
    "help_all",
)
# options of recorded results, too
JUDGING = {"max_drop", "max_task_drop", "confidence", "inconclusive"}
DEMO_EXPERTS = 12  # of 16, that `gate --demo` keeps
DEMO_MAX_DROP = 0.05  # what 250 items, `--demo --limit 50`, show with room for a few flips


@contextmanager
def _reporting_errors(report: Path | None, as_json: bool) -> Iterator[None]:
    """Where the block ends with an error, have gate.xml in the folder `report` and a GitHub job's
    page say so.

    The report of an earlier run stays, but for one of an error.
    """
    from compressor.quality_gate.report import clear_error, write_error

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
    options: Annotated[dict[str, Any], GATE_OPTIONS],
    servers: Annotated[dict[str, Any], SERVER_OPTIONS],
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
            "Comma-separated lm-eval tasks (default: mmlu,boolq,openbookqa,rte). Beside --suite, "
            "--prompts and --text none are usual."
        ),
    ] = None,
    output: Annotated[
        Path | None, flag("New folder for gate.json, gate.xml (JUnit) and gate.md.")
    ] = None,
    save_baseline: Annotated[
        Path | None,
        flag(
            "Keep the base's answers in this .json or .json.gz for --baseline; needs no smaller "
            "model."
        ),
    ] = None,
    results: Annotated[
        bool,
        flag(
            "Compare results of lm-eval, EvalPlus, inspect or CSV, in two files or folders; loads "
            "no model."
        ),
    ] = False,
    metric: Annotated[
        str | None,
        flag("METRIC or METRIC,FILTER of --results, or inspect's scorer (default: the first)."),
    ] = None,
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
    cache_dir: Annotated[
        Path | None, flag("Folder of results to reuse (default: the user's cache folder).")
    ] = None,
) -> None:
    """Test if a compressed model is as good: exit status 0 if it is, 1 if not, 3 if undecided."""
    report = output if not dry_run and ranks().is_first else None
    with _reporting_errors(report, running.as_json):
        wanted: Sequence[str] = listed(tasks, "--tasks") or ()
        if results:
            from compressor.quality_gate.recorded import gate_results

            unused = [
                f"--{name.replace('_', '-')}"
                for name in sorted(options.keys() - JUDGING | servers.keys())
            ]
            if unused or demo or dry_run or save_baseline or not (base and compressed):
                more = joined(unused) or "--demo, --dry-run and --save-baseline"
                raise CompressionError(
                    "--results compares two files or folders alone; name both, and leave out "
                    f"{more}"
                )
            judging = validated(
                GateOptions, {**options, "tasks": wanted or ["all"]}, "the command line"
            )
            _end(
                gate_results(Path(base), Path(compressed), judging, wanted, metric),
                judging,
                output,
                running,
            )
        if metric is not None:
            raise CompressionError(
                "--metric is of recorded results; pass --results, or leave it out"
            )
        names_conditions = bool(
            {"suite", "prompts", "text", "answers", "baseline"} & options.keys()
        )
        usual: tuple[str, ...] = () if names_conditions else DEFAULT_TASKS
        if demo:
            usual = DEMO_TASKS
            options = {"max_drop": DEMO_MAX_DROP, **options}
        named = wanted or usual
        if named or "baseline" not in options:
            options["tasks"] = named
        gate_options = validated(GateOptions, options, "the command line")
        if gate_options.tasks:
            require(*TASKS)
        from compressor.quality_gate.report import NAMES, power_blocks

        if not dry_run:  # what can be refused before torch is loaded
            gate_options.check()
            if output is not None:
                check_folder(output, NAMES, running.overwrite)
            refuse_absent_texts(gate_options.prompts, "prompts")
            refuse_absent_texts(gate_options.text, "text")
            for model in (base, compressed):
                refuse_absent(model)
        from compressor.quality_gate.run import GateRequest, passable, read_tasks

        computing: dict[str, Any] = {
            "device": running.device,
            "dtype": running.dtype,
            "cache": cache_dir,
        }
        if dry_run:
            _, power = read_tasks(GateRequest.read(gate_options, **computing))
            print_report(running.as_json, power, power_blocks(power))
            passable(power)
            return
        if gate_options.baseline is not None and base is not None and compressed is None:
            base, compressed = None, base
        elif base is None and not demo:
            raise CompressionError(
                "name two models, the base and the compressed one, or pass --demo for an example"
            )
        with (
            reporting(output, NAMES, running.overwrite, running.as_json) as progress,
            ExitStack() as stack,
        ):
            serving = ServerOptions(**servers)
            if base is None and compressed is None:
                refuse_several("the demo's compression", "name two models")
                # before the demo is compressed
                _, power = read_tasks(GateRequest.read(gate_options, **computing))
                passable(power)
                from compressor.cli.demonstration import SAMPLES, TEXT
                from compressor.data.demo import demo_checkpoint

                base = str(stack.enter_context(demo_checkpoint()))
                scratch = stack.enter_context(tempfile.TemporaryDirectory())
                compressed = f"{scratch}/demo-{DEMO_EXPERTS}-experts"
                choice: dict[str, Any] = {"strategy": "hc-smoe", "correct": "tune", **TEXT}
                choice |= {"experts": DEMO_EXPERTS, "samples": 2 * SAMPLES, "evaluate": False}
                compressor.compress(base, Path(compressed), progress=progress, **choice)
            shared = {
                **computing,
                "servers": serving,
                "revision": running.revision,
                "progress": progress,
            }
            written = []
            if save_baseline is not None and base is not None:
                written.append(save_baseline)
                compressor.save_baseline(
                    base, save_baseline, gate_options, overwrite=running.overwrite, **shared
                )
                if compressed is None and serving.server is None:
                    print_report(
                        running.as_json, {"written": [str(save_baseline)]}, written_line(written)
                    )
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
    if output is not None and ranks().is_first:
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
