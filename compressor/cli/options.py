"""Arguments and options that several commands of the command line take, and what their text means."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from compressor.errors import CompressionError
from compressor.gates.verdict import Verdict

if TYPE_CHECKING:
    from compressor.gates.run import GateRequest

logger = logging.getLogger(__name__)

Model = Annotated[str, typer.Argument(help="A local checkpoint folder or a Hub id such as org/model.")]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of a Hub id.")]
Experts = Annotated[int | None, typer.Option(help="Experts to keep in every MoE layer.")]
Ratio = Annotated[float | None, typer.Option(help="Share of the experts to remove; no more than this goes.")]
StrategyName = Annotated[
    str | None, typer.Option(help="How experts are chosen and merged; see `moe-compress strategies` (default: auto).")
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
Protect = Annotated[
    str | None,
    typer.Option(
        help="Experts that are neither merged nor dropped: auto, or a JSON list of experts to keep (hubs.json of "
        "`moe-compress attribute`)."
    ),
]
MaxDrop = Annotated[
    float | None,
    typer.Option(
        help="The largest drop of a score to put up with (of a perplexity: its relative rise); by default 0.01, and "
        "0.05 with --demo."
    ),
]
Confidence = Annotated[float, typer.Option(help="Of the gate's verdict, between 0.5 and 1.")]
Limit = Annotated[int | None, typer.Option(help="Items of each task, the first ones (default: all).")]
IncludePath = Annotated[Path | None, typer.Option(help="A folder with lm-eval task files of your own.")]
BatchSize = Annotated[str, typer.Option(help="Of the evaluation: auto or a number.")]
Inconclusive = Annotated[
    str | None,
    typer.Option(help="Let a gate that decides nothing count as pass or fail (default: exit status 3)."),
]
CacheDir = Annotated[
    Path | None, typer.Option(help="Where results are kept for the next gate (default: the user's cache folder).")
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
PerSource = Annotated[
    bool, typer.Option("--per-source", help="Plan for each calibration source alone, too: PLAN.<source>.json.")
]
Out = Annotated[Path, typer.Option("--output", "-o", help="Where to write.")]


def settings(
    strategy: str,
    merge: str | None,
    no_merge_routers: bool,
    representation: str | None,
    similarity: str | None,
    options: list[str] | None,
) -> dict[str, Any]:
    """A strategy's options from the command line, refusing what it does not have."""
    from compressor.grouping.choose import METHODS
    from compressor.planning.registry import option_fields, read_option

    known = option_fields(strategy)
    given: dict[str, Any] = {"representation": representation, "similarity": similarity}
    if merge is not None and merge not in METHODS:
        raise CompressionError(f"there is no merge {merge!r}; known are {', '.join(METHODS)}")
    if "merge" in known:
        given["merge"] = merge
        given["merge_routers"] = False if no_merge_routers else None
    elif merge is not None or no_merge_routers:
        logger.warning("strategy %s drops experts and merges none: --merge has no effect", strategy)
    for option in options or ():
        name, value = read_option(option, f"--option {option!r} should be name=value")
        given[name] = value
    return {name: value for name, value in given.items() if value is not None}


def treat_inconclusive(text: str | None) -> Verdict:
    """'pass' or 'fail' as given, else 'inconclusive'."""
    if text is None:
        return "inconclusive"
    if text not in ("pass", "fail"):
        raise CompressionError(f"--inconclusive {text!r} should be pass or fail; leave it out for exit status 3")
    return cast(Verdict, text)


def gate_request(
    tasks: Sequence[str],
    max_drop: float,
    confidence: float,
    limit: int | None,
    include_path: Path | None,
    batch_size: str,
    device: str,
    dtype: str,
    cache_dir: Path | None = None,
) -> "GateRequest":
    """What a gate is asked for, checked."""
    from compressor.evaluation.tasks import EvaluationOptions, read_batch_size
    from compressor.files import default_folder
    from compressor.gates.run import GateRequest

    options = EvaluationOptions(
        tasks=tuple(tasks), limit=limit, include_path=include_path, batch_size=read_batch_size(batch_size),
        device=device, dtype=dtype,
    )  # fmt: skip
    return GateRequest(options, max_drop, confidence, cache_dir or default_folder())


def listed(text: str | None, option: str) -> list[str] | None:
    """'a, b' -> ['a', 'b']; None stays."""
    if text is None:
        return None
    found = [part.strip() for part in text.split(",") if part.strip()]
    if not found:
        raise CompressionError(f"{option} names none; name some, or leave it out for the default")
    return found


def counts(text: str) -> list[int]:
    """'6,4' -> [6, 4]."""
    try:
        return [int(part) for part in listed(text, "--experts") or ()]
    except ValueError as error:
        raise CompressionError(f"--experts {text!r} should be whole numbers separated by commas, as 6,4") from error
