"""Plans and results for people: the fate of each layer's experts, and the results of steps."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from compressor.document.blocks import Block, Table, Text, plain_words
from compressor.errors import CompressionError
from compressor.formatting import counted, short
from compressor.recipe.recipe import make_step
from compressor.recipe.steps_plan import Plan

logger = logging.getLogger(__name__)

MOST = 12  # numbers in a cell
COLUMNS = ("layer", "experts", "kept", "dropped", "merged", "protected")


def plan_blocks(planned: Plan, path: Path) -> tuple[Block, ...]:
    """Return a table of a plan's layers, what its steps say, and their names if there are several."""
    plan = planned.expert_plan
    columns = list(COLUMNS)
    if not plan.protected:
        columns.remove("protected")
    if plan.has_constants:
        columns[columns.index("dropped")] = "constants"
    rows = []
    for layer in plan.layers:
        cells = (
            layer.module,
            str(layer.experts),
            str(len(layer.groups)),
            first_of(layer.dropped),
            first_of(list(map(list, layer.merged))),
            first_of(plan.protected.get(layer.module, ())),
        )
        rows.append(cells[: len(columns)])
    title = f"Plan by {planned.strategy}, written to {path}"
    blocks: list[Block] = [Table(title, tuple(columns), tuple(rows))]
    for step in planned.steps:
        if step.decision is not None:
            blocks += make_step(step.name, step.options).step().describe(step.to_dict())
    if len(planned.steps) > 1:
        blocks.append(Text(f"Steps: {', '.join(step.name for step in planned.steps)}"))
    return tuple(blocks)


def protected_blocks_of(protected: Mapping[str, Sequence[int]]) -> tuple[Block, ...]:
    """Return a sentence on how many experts are protected; nothing if none is."""
    count = sum(map(len, protected.values()))
    return (Text(f"{counted(count, 'protected expert')}, neither merged nor dropped"),) if count else ()


def first_of(items: Sequence[object], most: int = MOST) -> str:
    """Return the first items, separated by spaces, and the number of the others; '-' for none."""
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return " ".join(map(str, items[:most])) + more or "-"


def divergence(result: Mapping[str, Any], changed: bool) -> str:
    """Return KL from the base, loss and flips (other greedy tokens) on held-out text, before and after."""
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
    """Return True if a step changed the model: by its own record, or else if its held-out error fell."""
    result = entry.get("result") or {}
    if "changed" in result:
        return bool(result["changed"])
    return "before" not in result or bool(result["after"] < result["before"])


def step_blocks(entry: Mapping[str, Any]) -> tuple[Block, ...]:
    """Return a step's description of its result, a sentence first; its name alone where it isn't installed."""
    name = entry["name"]
    try:
        blocks = tuple(make_step(name, entry["options"]).step().describe(entry))
    except CompressionError as error:
        logger.debug("the step %s cannot describe its result: %s", name, error)
        blocks = ()
    return blocks if any(isinstance(block, Text) for block in blocks) else (Text(f"{name}."), *blocks)


def step_line(entry: Mapping[str, Any]) -> str:
    """Return the first sentence of `step_blocks`, without its full stop."""
    sentences = [block for block in step_blocks(entry) if isinstance(block, Text)]
    return plain_words(sentences[0].words).removesuffix(".")
