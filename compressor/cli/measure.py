"""The commands that change no model: `compare`, `list` and `demo`."""

import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import typer

import compressor
from compressor.answers.options import TaskOptions
from compressor.cli.options import (
    KEEP,
    SIZES,
    Computing,
    Model,
    Printing,
    Seed,
    Text,
    described,
    flag,
    options_of,
)
from compressor.cli.sizes import Bytes, For
from compressor.cli.terminal import PROGRAM, print_report, progress_bars, reporting, written_line
from compressor.data.sources import refuse_absent_texts
from compressor.distributed import ranks
from compressor.document.blocks import Table
from compressor.document.blocks import Text as Line
from compressor.entry_points import EXPORTERS, STEPS, STRATEGIES, find, working
from compressor.errors import CompressionError
from compressor.extras import require
from compressor.files import refuse_absent
from compressor.formatting import human_bytes, human_count, known_names, read_bytes
from compressor.options import separated
from compressor.recipe.recipe import MONE, step_class
from compressor.report.grid import Grid
from compressor.steps.prune.options import protecting_packages

TASKS = "Tasks"
TASK_OPTIONS = options_of(TaskOptions, TASKS, without=("seed",))
GRID_NAMES = {
    "ratios": "ratio",
    "splits": "split",
    "top_ks": "top_k",
    "corrections": "correct",
    "evaluate": "heldout",
}
GRID = options_of(
    Grid,
    {
        **dict.fromkeys(("experts", "protect", "ratios", "splits", "top_ks"), KEEP),
        **dict.fromkeys(("sizes", "bits", "context", "shares", "schemes"), SIZES),
    },
    names=GRID_NAMES,
)
SHOWN = (  # by `compare --help`, others by `--help-all`
    "strategies",
    "correct",
    "experts",
    "ratio",
    "tasks",
    "sizes",
    "nbytes",
    "calibration",
    "samples",
    "heldout",
    "output",
    "device",
    "help_all",
)
LISTS = ("steps", "strategies", "exporters", "optimizers", "text")


def compare(
    model: Model,
    text: Text,
    running: Computing,
    grid: Annotated[dict[str, Any], GRID],
    tasks: Annotated[dict[str, Any], TASK_OPTIONS],
    output: Annotated[
        Path, flag("New folder for comparison.json, comparison.md and comparison.png.")
    ] = Path("comparison"),
    format: Annotated[
        str, flag("safetensors, or mone: rows with constants for experts, too.")
    ] = "safetensors",
    nbytes: Bytes = None,
    servers: For = None,
    seed: Seed = 0,
    cache_dir: Annotated[
        Path | None, flag("Folder of tasks' results to reuse (default: the user's).", TASKS)
    ] = None,
) -> None:
    """Compare strategies, corrections, expert counts and number formats on text and tasks: one
    table, one plot."""
    require("matplotlib", *protecting_packages(grid.get("protect")))
    for named in separated(grid.get("strategies")) or ():
        find(STRATEGIES, named.partition(":")[0])
    refuse_absent_texts(text.data or ())
    refuse_absent_texts(grid.get("evaluate", ()), "heldout")
    refuse_absent(model)
    from compressor.report.comparison_report import NAMES, write_reports

    if format not in ("safetensors", MONE):
        raise CompressionError(
            f"there are no rows of --format {format!r}; known are safetensors, {MONE}"
        )
    options = {
        **grid,
        **tasks,
        "constants": format == MONE,
        "nbytes": None if nbytes is None else read_bytes(nbytes, "--bytes"),
        "servers": servers or (),
    }
    with reporting(output, NAMES, running.overwrite, running.as_json) as progress:
        comparison = compressor.compare(
            model,
            calibration=text,
            seed=seed,
            resident=running.resident,
            cache=cache_dir,
            **options,
            **running.reading(progress),
        )
        written = write_reports(comparison, output, running.overwrite) if ranks().is_first else []
    print_report(
        running.as_json, comparison.to_dict(), [*comparison.brief(), *written_line(written)]
    )


def installed(
    kind: Annotated[str, typer.Argument(metavar="KIND", help=f"{', '.join(LISTS)}.")],
    running: Printing,
    needs: Annotated[
        bool, flag("With strategies: list the statistics that a strategy may ask for instead.")
    ] = False,
) -> None:
    """List what is installed, built-in and third-party, with the type, default and meaning of every
    option."""
    if kind not in LISTS:
        raise CompressionError(f"there is no list {kind!r}; {known_names(kind, LISTS)}")
    content = list[dict[str, Any]]()
    rows = list[tuple[str, ...]]()
    columns: tuple[str, ...] = ("name", "option", "type", "default", "meaning")
    if needs:
        from compressor.statistics.statistics import STATISTICS

        kind, columns = "statistics", ("name", "shape", "meaning")
        for name, statistic in STATISTICS.items():
            content.append({"name": name, "shape": statistic.shape, "meaning": statistic.meaning})
            rows.append((name, statistic.shape or "-", statistic.meaning))
    else:
        for name, summary, options, *needed in _entries(kind):
            summary_line = f"{summary} Needs {', '.join(needed)}." if needed else summary
            rows.append((name, "", "", "", summary_line))
            fields = described(options) if options else {}
            entry = {
                "name": name,
                "summary": summary,
                "needs": needed,
                "options": {option: field.default for option, field in fields.items()},
                "types": {option: field.type_name for option, field in fields.items()},
                "help": {option: field.text for option, field in fields.items()},
            }
            content.append(entry)
            for option, field in fields.items():
                shown = "-" if field.default in (None, {}) else field.default
                if not isinstance(shown, str):
                    shown = json.dumps(shown, default=str)
                rows.append(("", option, field.type_name, shown, field.text))
    table = Table(kind.capitalize(), columns, tuple(rows), frozenset(columns))
    print_report(running.as_json, content, [table])


def _entries(kind: str) -> Iterator[tuple[Any, ...]]:
    """Name, summary and class of options of what is installed, and the statistics that a strategy
    needs."""
    if kind == "steps":
        for step in working(STEPS, step_class):
            yield step.name, str(step.__doc__).strip().partition("\n")[0], step
    elif kind == "strategies":
        from compressor.recipe.registry import working_strategies

        for strategy in working_strategies():
            options = strategy.options and type(strategy.options)
            yield strategy.name, strategy.summary, options, *sorted(strategy.needs)
    elif kind == "exporters":
        from compressor.recipe.registry import exporter_options, load_exporter

        yield "safetensors", "A checkpoint of transformers, as `compress` writes it.", None
        yield (
            MONE,
            "Constants in the place of dropped experts, as vLLM serves them; `compress` writes it.",
            None,
        )
        for name, options in working(EXPORTERS, lambda name: (name, exporter_options(name))):
            meaning = (load_exporter(name).__doc__ or "").strip().partition("\n")[0]
            yield name, meaning, options and type(options)
    elif kind == "text":
        from compressor.data.sources import BLEND, read_blend

        yield "blend", f"These sources, read by default; copy {BLEND} to change them.", None
        for entry in read_blend():
            yield entry.domain, f"{entry.source} ({entry.licence}), weight {entry.weight:g}", None
    else:
        for name in described(step_class("distill"))["optimizer"].type_name.split(" | "):
            yield (
                name,
                "distill, as distill.optimizer: adam by default, with distill.stream adafactor.",
                None,
            )
        yield (
            "adafactor",
            "correct, with the method tune; prune.correct.rate is its learning rate.",
            None,
        )
        yield "adamw", "comoe train; --learning-rate is its learning rate.", None


def demo(
    running: Printing,
    experts: Annotated[int, flag("Experts to keep in every layer of the demo model.")] = 12,
    output: Annotated[Path | None, flag("Keep the compressed models in this new folder.")] = None,
    quick: Annotated[bool, flag("One strategy, on a tenth of the questions.")] = False,
) -> None:
    """Compress the embedded demo model with several strategies and show what each costs; no network
    is used."""
    from compressor.cli.demonstration import run_demo

    with progress_bars(running.as_json) as progress:
        rows = run_demo(experts, output, progress, quick)
    title = "Demo model: loss in nats per held-out token, mean accuracy of five skills"
    columns = ("model", "experts", "parameters", "bytes", "loss", "accuracy")
    sizes = list[tuple[str, ...]]()
    by_skill = list[tuple[str, ...]]()
    for row in rows:
        size = (str(row["experts"]), human_count(row["parameters"]), human_bytes(row["bytes"]))
        accuracies = row["accuracy"].values()
        sizes.append((row["name"], *size, f"{row['loss']:.3f}", f"{fmean(accuracies):.1%}"))
        by_skill.append((row["name"], *map("{:.1%}".format, accuracies)))
    by_name = ("model", *rows[0]["accuracy"])
    skills = Table("Accuracy by skill (chance is 25%)", by_name, tuple(by_skill))
    program = PROGRAM if shutil.which(PROGRAM) else os.path.relpath(sys.argv[0])
    sources = os.path.relpath(Path(compressor.__file__).parent / "demo" / "checkpoint")
    following = (
        "Next:",
        f"  {program} compress {sources} -o smaller --experts 12 --calibration demo "
        "--sequence-length 128",
        f"  {program} gate {sources} smaller --demo",
        f"  {program} push smaller NAMESPACE/NAME --dry-run",
    )
    print_report(
        running.as_json, rows, [Table(title, columns, tuple(sizes)), skills, *map(Line, following)]
    )
