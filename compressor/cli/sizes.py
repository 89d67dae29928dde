"""Options of `compare --sizes` and `compress --bytes`, and what they come to."""

import logging
from collections.abc import Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Annotated, Any

from compressor.cli.options import SIZES, flag, listed, numbers
from compressor.entry_points import read_option
from compressor.errors import CompressionError
from compressor.formatting import read_bytes
from compressor.progress import Progress

if TYPE_CHECKING:
    from compressor.recipe.recipe import Recipe

CORRECTIONS = ("none", "ridge", "tune")

logger = logging.getLogger(__name__)
Bytes = Annotated[
    str | None,
    flag("Prune or quantise, as is best, to so many bytes: 16GB, 500MB, 2.5GiB or a number.", SIZES, "--bytes"),
]
For = Annotated[
    str | None,
    flag("Only formats that these load: vllm, sglang, llama.cpp, transformers, comma-separated.", SIZES, "--for"),
]


def size_options(
    strategies: str | None,
    correct: str | None,
    split: str | None,
    nbytes: str | None,
    bits: float | None,
    shares: str,
    schemes: str | None,
    servers: str | None,
) -> dict[str, Any]:
    """Arguments of Python's `compare_sizes`."""
    name, *settings = (strategies or "auto").split(":")
    if "," in name:
        raise CompressionError(f"--strategies {strategies}: sizes are compared for one strategy; name one")
    if correct not in (None, *CORRECTIONS):
        raise CompressionError(f"--correct {correct}: sizes are compared with one of {', '.join(CORRECTIONS)}")
    if bits is not None and (nbytes is not None or bits <= 0):
        raise CompressionError(f"--bits {bits:g} should be a number above 0, and stands in place of --bytes")
    told = f"--strategies {strategies}: an option should be option=value"
    return {
        "strategy": name,
        "options": dict(read_option(setting, told) for setting in settings),
        "correct": correct,
        "split": split if split in (None, "auto") else only(numbers(split, "--split", int)),
        "nbytes": None if nbytes is None else read_bytes(nbytes, "--bytes"),
        "bits": bits,
        "shares": numbers(shares, "--shares", Fraction),
        **({} if schemes is None else {"schemes": listed(schemes, "--schemes")}),
        "servers": listed(servers, "--for") or (),
    }


def only(parts: Sequence[int]) -> int:
    """The one number of parts."""
    if len(parts) != 1:
        raise CompressionError("--split: sizes are compared for one number of parts; name one, or leave it out")
    return parts[0]


def fit_into(recipe: "Recipe", nbytes: str, servers: str | None, device: str, progress: Progress) -> "Recipe":
    """Return the recipe with the share of the experts and the format that fit best; log what they are."""
    from compressor.report.sizes import fitted
    from compressor.report.sizes_report import sentences

    limit, names = read_bytes(nbytes, "--bytes"), listed(servers, "--for") or ()
    fitting, comparison = fitted(recipe, limit, names, device=device, progress=progress)
    for line in sentences(comparison):
        logger.info("%s", line)
    return fitting
