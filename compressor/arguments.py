"""Arguments and options that several commands of the command line take, and what their text means."""

import logging
from pathlib import Path
from typing import Annotated, Any

import typer

from compressor.errors import CompressionError

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
    from compressor.merging import METHODS
    from compressor.registry import option_fields, read_option

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
