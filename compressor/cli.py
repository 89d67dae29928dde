"""The command line `moe-compress`. Errors are one sentence and exit status 2."""

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NoReturn, cast

import typer

from compressor.arguments import (
    AsJson,
    Calibration,
    Correct,
    Device,
    Dtype,
    Experts,
    Length,
    Merge,
    Model,
    NoMergeRouters,
    Out,
    Overwrite,
    PerSource,
    Protect,
    Ratio,
    Representation,
    Revision,
    Samples,
    Seed,
    Sequential,
    Settings,
    Similarity,
    StrategyName,
    counts,
    listed,
    settings,
)
from compressor.errors import CompressionError
from compressor.memory import limit_caches

app = typer.Typer(
    name="moe-compress",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Make Mixture-of-Experts checkpoints smaller; the output loads with stock transformers.",
)

USAGE_ERROR = cast(type[Exception], typer.BadParameter.__mro__[2])  # click's ClickException, wherever typer keeps it
INTERRUPTED = 130


def main() -> None:
    """Run the command line; every fault that a user can mend is one sentence on stderr and exit status 2."""
    limit_caches()
    with _own_warnings():
        try:
            status = app(prog_name="moe-compress", standalone_mode=False)
        except CompressionError as error:
            _fail(str(error))
        except USAGE_ERROR as error:
            _fail(_usage(error))
        except OSError as error:  # a name too long, a folder without permission ...
            place = f"{error.filename}: " if error.filename else ""
            _fail(f"{place}{error.strerror or error}")
        except (KeyboardInterrupt, typer.Abort):
            status = INTERRUPTED
    if status == INTERRUPTED:  # which typer too may have made of the key
        print("Interrupted; run the same command again to go on.", file=sys.stderr)
    raise SystemExit(status if isinstance(status, int) else 0)


@contextmanager
def _own_warnings() -> Iterator[None]:
    """Our warnings on stderr, one line each; the Hub client's retries are told by the error that ends them."""
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
    loggers = [logging.getLogger(package) for package in ("compressor", "strategies", "exporters")]
    for logger in loggers:
        logger.addHandler(handler)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeHandler(handler)


def _fail(message: str) -> NoReturn:
    print(f"Error: {' '.join(message.splitlines())}", file=sys.stderr)
    raise SystemExit(2)


def _usage(error: Any) -> str:
    """A fault in the arguments as one sentence; no arguments at all is a call for help, which has been shown."""
    message = str(error.format_message()).strip().rstrip(".")
    context = getattr(error, "ctx", None)
    if not message:
        raise SystemExit(2)
    return message + (f"; see {context.command_path} --help" if context is not None else "")


@contextmanager
def _progress(quiet: bool) -> Iterator[Any]:
    from compressor.progress import Silent
    from compressor.rendering import Bars

    if quiet:
        yield Silent()
    else:
        with Bars() as bars:
            yield bars


@app.command()
def inspect(
    model: Model,
    revision: Revision = None,
    experts: Annotated[int | None, typer.Option(help="Show what keeping this many would leave.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show what a model is made of and what compressing it would take; reads no weight."""
    from compressor import api, rendering

    rendering.show_inspection(api.inspect(model, revision, experts), as_json)


@app.command()
def plan(
    model: Model,
    output: Out,
    experts: Experts = None,
    ratio: Ratio = None,
    strategy: StrategyName = None,
    merge: Merge = None,
    no_merge_routers: NoMergeRouters = False,
    representation: Representation = None,
    similarity: Similarity = None,
    option: Settings = None,
    calibration: Calibration = None,
    correct: Correct = None,
    sequential: Sequential = False,
    protect: Protect = None,
    per_source: PerSource = False,
    samples: Samples = 128,
    sequence_length: Length = 512,
    seed: Seed = 0,
    device: Device = "auto",
    dtype: Dtype = "auto",
    revision: Revision = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Decide what to do with every expert and write it as JSON; no weight is written."""
    from compressor import api, rendering
    from compressor.plan_files import check_files, source_files, write_plans
    from compressor.request import DEFAULT_STRATEGY, Request

    sources = Request(calibration=calibration or None).source_names if per_source else ()
    outputs = [output, *source_files(output, sources)]
    check_files(outputs, overwrite)
    chosen = DEFAULT_STRATEGY if strategy is None else strategy
    with _progress(as_json) as progress:
        request: dict[str, Any] = {
            "experts": experts,
            "ratio": ratio,
            "strategy": chosen,
            "options": settings(chosen, merge, no_merge_routers, representation, similarity, option),
            "calibration": calibration or None,
            "correct": correct,
            "sequential": sequential,
            "protect": protect,
            "samples": samples,
            "sequence_length": sequence_length,
            "seed": seed,
            "device": device,
            "dtype": dtype,
        }
        if per_source:
            made = api.plan_per_source(model, revision=revision, progress=progress, **request)
        else:
            made = [api.plan(model, revision=revision, progress=progress, **request)]
        write_plans(outputs, made)
    rendering.show_plans(made, outputs, as_json)


@app.command()
def apply(
    plan_file: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan made by `moe-compress plan`.")],
    output: Out,
    model: Annotated[str | None, typer.Option(help="The source checkpoint, if it is not where the plan says.")] = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Carry out a plan and write the smaller checkpoint."""
    from compressor import api, rendering

    with _progress(as_json) as progress:
        summary = api.apply(plan_file, output, model=model, overwrite=overwrite, progress=progress)
    rendering.show_summary(summary, as_json)


@app.command()
def compress(
    model: Model,
    output: Out,
    experts: Experts = None,
    ratio: Ratio = None,
    strategy: StrategyName = None,
    merge: Merge = None,
    no_merge_routers: NoMergeRouters = False,
    representation: Representation = None,
    similarity: Similarity = None,
    option: Settings = None,
    calibration: Calibration = None,
    correct: Correct = None,
    sequential: Sequential = False,
    protect: Protect = None,
    samples: Samples = 128,
    sequence_length: Length = 512,
    seed: Seed = 0,
    device: Device = "auto",
    dtype: Dtype = "auto",
    revision: Revision = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Plan and apply in one go; an interrupted run goes on when the same command is run again."""
    from compressor import api, rendering
    from compressor.request import DEFAULT_STRATEGY

    chosen = DEFAULT_STRATEGY if strategy is None else strategy
    with _progress(as_json) as progress:
        summary = api.compress(
            model,
            output,
            revision=revision,
            overwrite=overwrite,
            progress=progress,
            experts=experts,
            ratio=ratio,
            strategy=chosen,
            options=settings(chosen, merge, no_merge_routers, representation, similarity, option),
            calibration=calibration or None,
            correct=correct,
            sequential=sequential,
            protect=protect,
            samples=samples,
            sequence_length=sequence_length,
            seed=seed,
            device=device,
            dtype=dtype,
        )
    rendering.show_summary(summary, as_json)


@app.command()
def compare(
    model: Model,
    experts: Annotated[str, typer.Option(help="Experts to keep, one count or several: 6,4.")],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="New folder for comparison.json, comparison.md and comparison.png.")
    ] = Path("comparison"),
    strategies: Annotated[
        str | None,
        typer.Option(help="Names separated by commas, with options as name:option=value (default: all installed)."),
    ] = None,
    correct: Annotated[
        str | None,
        typer.Option(help="Corrections to try with each, such as none,ridge,tune (default: none and its own)."),
    ] = None,
    calibration: Calibration = None,
    evaluate: Annotated[
        list[str] | None,
        typer.Option(help="Text to measure on; may be repeated (default: calibration text that no plan saw)."),
    ] = None,
    evaluation_samples: Annotated[int, typer.Option(min=1, help="Sequences to measure on, at most.")] = 64,
    random_seeds: Annotated[int, typer.Option(min=1, help="Random drops to compare with.")] = 3,
    per_source: Annotated[
        bool, typer.Option("--per-source", help="Plan for each calibration source alone, too: a row each.")
    ] = False,
    protect: Protect = None,
    samples: Samples = 128,
    sequence_length: Length = 512,
    seed: Seed = 0,
    device: Device = "auto",
    dtype: Dtype = "auto",
    revision: Revision = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Show what each strategy costs on this model and data: one calibration pass, many plans, one table."""
    from compressor import api
    from compressor.comparison_report import check_folder, write_reports
    from compressor.comparison_table import show_comparison

    kept = counts(experts)
    check_folder(output, overwrite)
    with _progress(as_json) as progress:
        found = api.compare(
            model,
            experts=kept,
            strategies=listed(strategies, "--strategies"),
            corrections=listed(correct, "--correct"),
            evaluate=evaluate or (),
            evaluation_samples=evaluation_samples,
            random_seeds=random_seeds,
            per_source=per_source,
            revision=revision,
            progress=progress,
            calibration=calibration or None,
            protect=protect,
            samples=samples,
            sequence_length=sequence_length,
            seed=seed,
            device=device,
            dtype=dtype,
        )
        written = write_reports(found, output, overwrite)
    show_comparison(found, as_json)
    if not as_json:
        print(f"Written: {', '.join(str(path) for path in written)}")


@app.command()
def attribute(
    model: Model,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="New folder for hubs.json, attribution.json and pictures.")
    ] = None,
    calibration: Calibration = None,
    top: Annotated[int, typer.Option(min=1, help="Strongest senders to show.")] = 10,
    threshold: Annotated[
        float, typer.Option(min=0, help="Modified z-score among a layer's experts above which one is a hub.")
    ] = 3.5,
    keys: Annotated[
        int, typer.Option(min=0, help="Sequences on which the strongest heads are split by key token.")
    ] = 0,
    samples: Samples = 128,
    sequence_length: Length = 512,
    seed: Seed = 0,
    device: Device = "auto",
    dtype: Dtype = "auto",
    revision: Revision = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Show what steers each layer's router, and the experts that are routing hubs; nothing is compressed."""
    from compressor import api
    from compressor.attribution_report import check_folder, write_attribution
    from compressor.attribution_table import show_attribution
    from compressor.hubs import find_hubs, super_experts

    if output is not None:
        check_folder(output, overwrite)
    with _progress(as_json) as progress:
        found = api.attribute(
            model,
            keys=keys,
            top=top,
            revision=revision,
            progress=progress,
            calibration=calibration or None,
            samples=samples,
            sequence_length=sequence_length,
            seed=seed,
            device=device,
            dtype=dtype,
        )
        hubs, supers = find_hubs(found, threshold), super_experts(found)
        written = []
        if output is not None:
            written = write_attribution(found, hubs, supers, output, overwrite, threshold, top)
    show_attribution(found, hubs, supers, top, as_json, written)


@app.command()
def strategies(as_json: AsJson = False) -> None:
    """List the strategies that are installed, built-in and third-party."""
    from compressor import registry, rendering

    loaded = [registry.load_strategy(name) for name in registry.names(registry.STRATEGIES)]
    rendering.show_strategies(loaded, as_json)


@app.command()
def demo(
    experts: Annotated[int, typer.Option(help="Experts to keep in every layer of the demo model.")] = 12,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Keep the compressed models in this new folder.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compress the embedded demo model with several strategies and show what each costs; no network is used."""
    from compressor import rendering
    from compressor.demo.run import run_demo

    with _progress(as_json) as progress:
        rows = run_demo(experts, output, progress)
    rendering.show_demo(rows, as_json)


if __name__ == "__main__":
    main()
