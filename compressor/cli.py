"""The command line `moe-compress`. Errors are one sentence and exit status 2."""

import json
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NoReturn, cast

import typer

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

Model = Annotated[str, typer.Argument(help="A local checkpoint folder or a Hub id such as org/model.")]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of a Hub id.")]
Experts = Annotated[int | None, typer.Option(help="Experts to keep in every MoE layer.")]
Ratio = Annotated[float | None, typer.Option(help="Share of the experts to remove; no more than this goes.")]
StrategyName = Annotated[
    str | None, typer.Option(help="How experts are chosen and merged; see `moe-compress strategies`.")
]
Merge = Annotated[str | None, typer.Option(help="How grouped experts become one: uniform, max, frequency or learned.")]
NoMergeRouters = Annotated[
    bool, typer.Option("--no-merge-routers", help="Keep one member's router row instead of merging rows.")
]
Representation = Annotated[str | None, typer.Option(help="model-centric: compare surrogate or vectorized weights.")]
Similarity = Annotated[str | None, typer.Option(help="data-centric: linear-cka, rbf-cka or mean-output.")]
Settings = Annotated[
    list[str] | None, typer.Option("--option", help="name=value for an option of any strategy; may be repeated.")
]
Calibration = Annotated[
    list[str] | None,
    typer.Option(
        help="A text or JSONL file, a data set id (default: C4), or 'demo'; repeat it for several sources, each with "
        "=WEIGHT if they should not count alike."
    ),
]
Correct = Annotated[
    str | None,
    typer.Option(help="Refit what is left: none, ridge or tune (default: tune for auto, none for the others)."),
]
Sequential = Annotated[
    bool, typer.Option("--sequential", help="Plan each layer on what the compressed earlier layers put out.")
]
Samples = Annotated[int, typer.Option(min=1, help="Calibration sequences.")]
Length = Annotated[int, typer.Option("--sequence-length", min=2, help="Tokens in each of them.")]
Seed = Annotated[int, typer.Option(help="For the choice of calibration text and everything else that is drawn.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1 ...")]
Dtype = Annotated[str, typer.Option(help="For computing: auto (the checkpoint's), float32, bfloat16 or float16.")]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace an existing output once the new one is complete.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
PerSource = Annotated[bool, typer.Option("--per-source", help="Also plan for each calibration source alone.")]
Out = Annotated[Path, typer.Option("--output", "-o", help="Where to write.")]


def main() -> None:
    """Run the command line; every fault that a user can mend is one sentence on stderr and exit status 2."""
    _log_own_warnings()
    limit_caches()
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


def _log_own_warnings() -> None:
    """Our warnings on stderr, one line each; the Hub client's retries are told by the error that ends them."""
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
    for package in ("compressor", "strategies", "exporters"):
        logging.getLogger(package).addHandler(handler)


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


def _settings(
    strategy: str,
    merge: str | None,
    no_merge_routers: bool,
    representation: str | None,
    similarity: str | None,
    options: list[str] | None,
) -> dict[str, Any]:
    """A strategy's options from the command line, refusing what it does not have."""
    from compressor.merging import METHODS
    from compressor.registry import option_fields

    known = option_fields(strategy)
    given: dict[str, Any] = {"representation": representation, "similarity": similarity}
    if merge is not None and merge not in METHODS:
        raise CompressionError(f"there is no merge {merge!r}; known are {', '.join(METHODS)}")
    if "merge" in known:
        given["merge"] = merge
        given["merge_routers"] = False if no_merge_routers else None
    elif merge is not None or no_merge_routers:
        logging.getLogger(__name__).warning(
            "strategy %s drops experts and merges none: --merge has no effect", strategy
        )
    for option in options or ():
        name, separator, text = option.partition("=")
        if not separator:
            raise CompressionError(f"--option {option!r} should be name=value")
        given[name.replace("-", "_")] = _parsed(text)
    return {name: value for name, value in given.items() if value is not None}


def _is_plan(path: Path) -> bool:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(content, dict) and str(content.get("format", "")).startswith("moe-compressor-plan/")


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


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
    from compressor.request import DEFAULT_STRATEGY

    if output.exists() and not overwrite:
        raise CompressionError(f"{output} exists already; name another file or pass --overwrite")
    if output.exists() and not _is_plan(output):
        raise CompressionError(f"{output} is not a plan, so --overwrite will not replace it; name another file")
    if not output.parent.is_dir():
        raise CompressionError(f"{output.parent} does not exist; create it or name another file")
    chosen = DEFAULT_STRATEGY if strategy is None else strategy
    with _progress(as_json) as progress:
        made = api.plan(
            model,
            revision=revision,
            progress=progress,
            experts=experts,
            ratio=ratio,
            strategy=chosen,
            options=_settings(chosen, merge, no_merge_routers, representation, similarity, option),
            calibration=calibration or None,
            correct=correct,
            sequential=sequential,
            samples=samples,
            sequence_length=sequence_length,
            seed=seed,
            device=device,
            dtype=dtype,
        )
    fresh = output.with_name(f".{output.name}.new")
    try:
        fresh.write_text(made.to_json(), encoding="utf-8")
        fresh.replace(output)
    finally:
        fresh.unlink(missing_ok=True)
    rendering.show_plan(made, output, as_json)


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
            options=_settings(chosen, merge, no_merge_routers, representation, similarity, option),
            calibration=calibration or None,
            correct=correct,
            sequential=sequential,
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
    """Show what each strategy costs on this model and data: one calibration pass, many plans, one table."""
    from compressor import api, rendering
    from compressor.comparison_report import check_folder, write_reports

    check_folder(output)
    with _progress(as_json) as progress:
        found = api.compare(
            model,
            experts=_counts(experts),
            strategies=_listed(strategies),
            corrections=_listed(correct),
            evaluate=evaluate or (),
            evaluation_samples=evaluation_samples,
            random_seeds=random_seeds,
            per_source=per_source,
            revision=revision,
            progress=progress,
            calibration=calibration or None,
            samples=samples,
            sequence_length=sequence_length,
            seed=seed,
            device=device,
            dtype=dtype,
        )
    written = write_reports(found, output)
    rendering.show_comparison(found, as_json)
    if not as_json:
        print(f"Written: {', '.join(str(path) for path in written)}")


def _listed(text: str | None) -> list[str] | None:
    """'a, b' -> ['a', 'b']."""
    return None if text is None else [part.strip() for part in text.split(",") if part.strip()]


def _counts(text: str) -> list[int]:
    try:
        found = [int(part) for part in _listed(text) or ()]
    except ValueError as error:
        raise CompressionError(f"--experts {text!r} should be whole numbers separated by commas, as 6,4") from error
    if not found:
        raise CompressionError("--experts names no count; say how many experts to keep, as 6,4")
    return found


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
