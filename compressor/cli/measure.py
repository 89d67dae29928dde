"""The commands that change no model: `inspect`, `compare`, `attribute`, and `steps`, `strategies` and `demo`."""

import json
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import typer

import compressor
from compressor.cli.options import CALIBRATION, KEEP, Model, Printing, Running, Text, flag, listed, numbers
from compressor.cli.terminal import print_report, progress_bars, reporting
from compressor.distributed import here
from compressor.document.blocks import Table
from compressor.entry_points import STEPS, helps, working
from compressor.errors import CompressionError
from compressor.formatting import human_bytes, human_count

MONE = "mone"


def inspect(
    context: typer.Context,
    model: Model,
    running: Annotated[Running, ("revision", "as_json")],
    experts: Annotated[int | None, flag("Show what keeping this many would leave.")] = None,
) -> None:
    """Show what a model is made of and what compressing it would take; reads no weight."""
    from compressor.cli import rendering
    from compressor.cli.gguf_files import show_gguf_inspection, takes_gguf

    if takes_gguf(context, model, None, ("experts",)):
        return show_gguf_inspection(compressor.inspect_gguf(model, experts), running.as_json)
    rendering.show_inspection(compressor.inspect(model, running.revision, experts), running.as_json)


def compare(
    model: Model,
    text: Text,
    running: Running,
    output: Annotated[Path, flag("New folder for comparison.json, comparison.md and comparison.png.")] = Path(
        "comparison"
    ),
    experts: Annotated[str | None, flag("Experts to keep, one count or several: 6,4.", KEEP)] = None,
    protect: Annotated[str | None, flag("As for `compress`: auto, graph:N, or a JSON list.", KEEP)] = None,
    ratio: Annotated[str | None, flag("Shares of the experts to remove instead, such as 0.25,0.5.", KEEP)] = None,
    split: Annotated[str, flag("Sub-experts that each expert becomes first, such as 1,2,4.", KEEP)] = "1",
    split_by: Annotated[str, flag("How its neurons are partitioned: energy or clusters.", KEEP)] = "energy",
    top_k: Annotated[str | None, flag("num_experts_per_tok, one or several (default: as now).", KEEP)] = None,
    strategies: Annotated[
        str | None, flag("Comma-separated names, options as name:option=value (default: all installed).")
    ] = None,
    correct: Annotated[str | None, flag("Corrections, such as none,ridge,tune (default: none and its own).")] = None,
    evaluate: Annotated[
        list[str] | None, flag("Text to measure on; may be repeated (default: calibration text that no plan saw).")
    ] = None,
    evaluation_samples: Annotated[int, flag("Sequences to measure on, at most.", min=1)] = 64,
    format: Annotated[str, flag("safetensors, or mone: rows with constants for experts, too.")] = "safetensors",
    random_seeds: Annotated[int, flag("Random drops to compare with.", min=1)] = 3,
    per_source: Annotated[bool, flag("Plan for each calibration source alone, too: a row each.", CALIBRATION)] = False,
) -> None:
    """Show what each strategy costs on this model and data: one calibration pass, many plans, one table."""
    from compressor.cli.rendering import show_comparison
    from compressor.report.comparison_report import NAMES, write_reports

    variants: dict[str, Any] = {
        "experts": numbers(experts, "--experts", int),
        "ratios": numbers(ratio, "--ratio", float),
        "splits": numbers(split, "--split", int),
        "top_ks": numbers(top_k, "--top-k", int),
    }
    if format not in ("safetensors", MONE):
        raise CompressionError(f"there are no rows of --format {format!r}; known are safetensors, {MONE}")
    with reporting(output, NAMES, running.overwrite, running.as_json) as progress:
        comparison = compressor.compare(
            model,
            **variants,
            split_by=split_by,
            protect=protect,
            constants=format == MONE,
            strategies=listed(strategies, "--strategies"),
            corrections=listed(correct, "--correct"),
            evaluate=evaluate or (),
            evaluation_samples=evaluation_samples,
            random_seeds=random_seeds,
            per_source=per_source,
            **text.arguments(),
            **running.reading(progress),
        )
        written = write_reports(comparison, output, running.overwrite) if here().is_first else []
    show_comparison(comparison, running.as_json, written)


def attribute(
    model: Model,
    text: Text,
    running: Running,
    output: Annotated[Path | None, flag("New folder for hubs.json, attribution.json, pictures and the graph.")] = None,
    top: Annotated[int, flag("Strongest senders to show.", min=1)] = 10,
    threshold: Annotated[float, flag("Modified z-score in a layer above which an expert is a hub.", min=0)] = 3.5,
    keys: Annotated[int, flag("Sequences on which the strongest heads are split by key token.", min=0)] = 0,
    edges: Annotated[
        str, flag("What the graph's edges lead to: routers, or every later expert's score, too: experts.")
    ] = "routers",
    edges_kept: Annotated[int, flag("Strongest edges to experts' scores to keep.", min=1)] = 2000,
) -> None:
    """Show what steers each layer's router, and the experts that are routing hubs; nothing is compressed."""
    from compressor.attribution.report import NAMES, findings, write_attribution
    from compressor.cli.rendering import show_attribution

    if edges not in ("routers", "experts"):
        raise CompressionError(f"there are no --edges {edges!r}; known are routers, experts")
    with reporting(output, NAMES, running.overwrite, running.as_json) as progress:
        attribution = compressor.attribute(
            model,
            keys=keys,
            top=top,
            edges_kept=edges_kept if edges == "experts" else 0,
            **text.arguments(),
            **running.reading(progress),
        )
        results, written = findings(attribution, threshold, top), list[Path]()
        if output is not None and here().is_first:
            written = write_attribution(results, output, running.overwrite)
    show_attribution(results, running.as_json, written)


def steps(running: Printing) -> None:
    """List the steps of a recipe that are installed, built-in and third-party, with their options."""
    from compressor.recipe.recipe import step_class

    content, rows = list[dict[str, Any]](), list[tuple[str, ...]]()
    for step in working(STEPS, step_class):
        summary = (step.__doc__ or "").strip().split("\n")[0]
        defaults, help = dict[str, Any](), dict[str, str]()
        rows.append((step.name, "", "", summary))
        for name, entry in step.model_fields.items():
            default = None if entry.is_required() else entry.get_default(call_default_factory=True)
            defaults[name], help[name] = default, " ".join((entry.description or "").split())
            shown = default if isinstance(default, str) else json.dumps(default)
            rows.append(("", name, "-" if default in (None, {}) else shown, help[name]))
        content.append({"name": step.name, "summary": summary, "options": defaults, "help": help})
    _show_catalogue(running.as_json, content, "Steps", ("step", "option", "default", "what it is"), rows)


def strategies(
    running: Printing,
    needs: Annotated[bool, flag("List the statistics that a strategy may ask for instead.")] = False,
) -> None:
    """List the strategies that are installed, built-in and third-party."""
    from compressor.recipe.registry import working_strategies
    from compressor.statistics.statistics import STATISTICS

    content, rows = list[dict[str, Any]](), list[tuple[str, ...]]()
    if needs:
        content = [{"name": name, "shape": each.shape, "meaning": each.meaning} for name, each in STATISTICS.items()]
        rows = [(entry["name"], entry["shape"] or "-", entry["meaning"]) for entry in content]
        return _show_catalogue(running.as_json, content, "Statistics", ("name", "shape", "meaning"), rows)
    for each in working_strategies():
        options, needed = asdict(each.options) if each.options else {}, sorted(each.needs)
        entry = {"name": each.name, "summary": each.summary, "needs": needed, "options": options}
        content.append({**entry, "help": helps(each.options)})
        defaults = ", ".join(f"{name}={value}" for name, value in options.items())
        rows.append((each.name, each.summary, ", ".join(needed), defaults or "-"))
    _show_catalogue(running.as_json, content, "Strategies", ("name", "what it does", "needs", "options"), rows)


def _show_catalogue(
    as_json: bool, content: Any, title: str, columns: tuple[str, ...], rows: list[tuple[str, ...]]
) -> None:
    print_report(as_json, content, [Table(title, columns, tuple(rows), frozenset(columns))])


def demo(
    running: Printing,
    experts: Annotated[int, flag("Experts to keep in every layer of the demo model.")] = 12,
    output: Annotated[Path | None, flag("Keep the compressed models in this new folder.")] = None,
    quick: Annotated[bool, flag("One strategy, on a tenth of the questions.")] = False,
) -> None:
    """Compress the embedded demo model with several strategies and show what each costs; no network is used."""
    from compressor.cli.demonstration import run_demo

    with progress_bars(running.as_json) as progress:
        rows = run_demo(experts, output, progress, quick)
    title = "The demo model before and after: loss in nats per held-out token, mean accuracy on held-out questions"
    columns = ("model", "experts", "parameters", "bytes", "loss", "accuracy")
    sizes, by_skill = list[tuple[str, ...]](), list[tuple[str, ...]]()
    for row in rows:
        size = (str(row["experts"]), human_count(row["parameters"]), human_bytes(row["bytes"]))
        sizes.append((row["name"], *size, f"{row['loss']:.3f}", f"{fmean(row['accuracy'].values()):.1%}"))
        by_skill.append((row["name"], *(f"{accuracy:.1%}" for accuracy in row["accuracy"].values())))
    skills = Table("Accuracy by skill (chance is 25%)", ("model", *rows[0]["accuracy"]), tuple(by_skill))
    print_report(running.as_json, rows, [Table(title, columns, tuple(sizes)), skills])
