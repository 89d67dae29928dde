"""Options that `compare` and `compress` share for a limit of bytes, and the choice of a recipe
within it."""

import logging
from typing import TYPE_CHECKING, Annotated

from compressor.cli.options import SIZES, flag, listed
from compressor.formatting import read_bytes
from compressor.progress import Progress

if TYPE_CHECKING:
    from compressor.recipe.recipe import Recipe

logger = logging.getLogger(__name__)
Bytes = Annotated[
    str | None,
    flag(
        "Prune or quantise, as is best, to so many bytes: 16GB, 500MB, 2.5GiB or a number.",
        SIZES,
        "--bytes",
    ),
]
For = Annotated[
    str | None,
    flag(
        "Only formats that these load: vllm, sglang, llama.cpp, transformers, comma-separated.",
        SIZES,
        "--for",
    ),
]


def fit_into(
    recipe: "Recipe", nbytes: str, servers: str | None, device: str, progress: Progress
) -> "Recipe":
    """Return the recipe with the share of the experts and the format that fit best; log what they
    are."""
    from compressor.report.comparison_report import sentences
    from compressor.report.sizes import fitted

    limit, names = read_bytes(nbytes, "--bytes"), listed(servers, "--for") or ()
    fitting, comparison = fitted(recipe, limit, names, device=device, progress=progress)
    for line in sentences(comparison):
        logger.info("%s", line)
    return fitting
