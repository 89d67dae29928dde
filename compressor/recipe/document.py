"""What came of steps, in words."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from compressor.document.blocks import Block, Text, plain_words
from compressor.errors import CompressionError
from compressor.formatting import counted, short
from compressor.recipe.recipe import make_step

logger = logging.getLogger(__name__)

MOST = 12  # numbers in a cell


def protected_blocks_of(protected: Mapping[str, Sequence[int]]) -> tuple[Block, ...]:
    """Return a sentence on how many experts are protected; nothing if none is."""
    count = sum(map(len, protected.values()))
    return (
        (Text(f"{counted(count, 'protected expert')}, neither merged nor dropped"),)
        if count
        else ()
    )


def first_of(items: Sequence[object], most: int = MOST) -> str:
    """Return the first items, separated by spaces, and the number of the others; '-' for none."""
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return " ".join(map(str, items[:most])) + more or "-"


def divergence(result: Mapping[str, Any], changed: bool) -> str:
    """Return KL from the base, loss and flips (other greedy tokens) on held-out text, before and
    after."""
    parts = []
    for name, before, after in (("KL", "before", "after"), ("loss", "loss_before", "loss_after")):
        if name == "KL" or before in result:
            later = f" to {short(result.get(after))}" if changed else ""
            parts.append(f"{name} {short(result.get(before))}{later}")
    parts[0] += " nats per token from the base on held-out text"
    if "flips_before" in result:
        later = f" to {flips(result['flips_after'])}" if changed else ""
        parts.append(f"flips {flips(result['flips_before'])}{later}")
    return ", ".join(parts)


def flips(share: float) -> str:
    """Return a share of positions in percent, with three digits."""
    return f"{100 * share:.3g}%"


def changed(entry: Mapping[str, Any]) -> bool:
    """Return True if a step changed the model: by its own record, or else if its held-out error
    fell."""
    result = entry.get("result") or {}
    if "changed" in result:
        return bool(result["changed"])
    return "before" not in result or bool(result["after"] < result["before"])


def step_blocks(entry: Mapping[str, Any]) -> tuple[Block, ...]:
    """Return a step's description of its result, a sentence first; its name alone where it isn't
    installed."""
    name = entry["name"]
    try:
        blocks = tuple(make_step(name, entry["options"]).step().describe(entry))
    except CompressionError as error:
        logger.debug("the step %s cannot describe its result: %s", name, error)
        blocks = ()
    return (
        blocks if any(isinstance(block, Text) for block in blocks) else (Text(f"{name}."), *blocks)
    )


def step_line(entry: Mapping[str, Any]) -> str:
    """Return the first sentence of `step_blocks`, without its full stop."""
    sentences = [block for block in step_blocks(entry) if isinstance(block, Text)]
    return plain_words(sentences[0].words).removesuffix(".")
