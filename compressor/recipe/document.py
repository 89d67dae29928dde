"""Plans and results in words: what becomes of each layer's experts, and what came of steps on the whole model.

Entries of results may come from a record that anybody may have edited.
"""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard

from compressor.document.blocks import Block, Table, Text, plain_words
from compressor.formatting import counted, one_line, short
from compressor.recipe.recipe import make_step
from compressor.recipe.steps_plan import Plan

logger = logging.getLogger(__name__)

MOST = 12  # numbers in a cell
MOST_ENTRIES = 1_000  # rounds or evaluations, each with a row
COLUMNS = ("layer", "experts", "kept", "dropped", "merged", "protected")


def plan_blocks(planned: Plan, path: Path) -> tuple[Block, ...]:
    """A row for each layer of a plan that was written there, and its steps if there are several."""
    plan = planned.stage
    columns: tuple[str, ...] = COLUMNS if plan.protected else COLUMNS[:-1]
    rows = [
        (
            layer.module,
            str(layer.experts),
            str(len(layer.groups)),
            first_of(layer.dropped),
            first_of(list(map(list, layer.merged))),
            first_of(plan.protected.get(layer.module, ())),
        )[: len(columns)]
        for layer in plan.layers
    ]
    data = "" if plan.calibration is None or "only" not in plan.calibration else f" for {plan.calibration['only']}"
    if plan.constants is not None:
        columns = tuple("constants" if name == "dropped" else name for name in columns)
    title = f"Plan by {plan.strategy}{data}, written to {path}"
    steps = [Text(f"Steps: {', '.join(step.name for step in planned.steps)}")] if len(planned.steps) > 1 else []
    decided = [step.to_dict() for step in planned.steps if step.plan is not None]
    described = (block for entry in decided for block in make_step(entry["name"], entry["options"]).describe(entry))
    return Table(title, columns, tuple(rows)), *described, *steps


def protected_blocks_of(protected: Mapping[str, Sequence[int]]) -> tuple[Block, ...]:
    """How many experts stay untouched; nothing if none."""
    count = sum(map(len, protected.values()))
    return (Text(f"{counted(count, 'protected expert')}, neither merged nor dropped"),) if count else ()


def first_of(items: Sequence[object], most: int = MOST) -> str:
    """The first of them with spaces between, and how many more there are; '-' for none."""
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return " ".join(map(str, items[:most])) + more or "-"


def result_of(entry: Mapping[str, Any]) -> Mapping[str, Any]:
    """The result in a step's entry; empty where there is none."""
    result = entry.get("result")
    return result if isinstance(result, Mapping) else {}


def option(entry: Mapping[str, Any], name: str) -> Any:
    """An option in a step's entry; None where there is none."""
    options = entry.get("options")
    return options.get(name) if isinstance(options, Mapping) else None


def is_number(value: Any) -> TypeGuard[float]:
    """Return True if a value can be shown and drawn; JSON has whole numbers beyond all floats."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e308


def figure(value: Any) -> str:
    """A number with three digits; a dash for anything else."""
    return short(value) if is_number(value) else "-"


def entries(value: Any) -> list[Mapping[str, Any]]:
    """The mappings of a list."""
    listed = value[:MOST_ENTRIES] if isinstance(value, list | tuple) else []
    return [entry for entry in listed if isinstance(entry, Mapping)]


def divergence(result: Mapping[str, Any], changed: bool) -> str:
    """KL from the base, loss and flips (another greedy token than the base's) on held-out text, before and after."""
    pairs = {"KL": ("before", "after"), "loss": ("loss_before", "loss_after"), "flips": ("flips_before", "flips_after")}
    parts = []
    for what, names in pairs.items():
        values = [result.get(name) for name in names]
        if what == "flips":
            before, after = (f"{100 * value:.3g}%" if is_number(value) else "-" for value in values)
        else:
            before, after = map(figure, values)
        if what == "KL" or before != "-":
            parts.append(f"{what} {f'{before} to {after}' if changed else before}")
    parts[0] += " nats per token from the base on held-out text"
    return ", ".join(parts)


def changed(entry: Mapping[str, Any]) -> bool:
    """Return True if a step changed the model: by its own record, or else if it brought held-out text nearer."""
    result = result_of(entry)
    before, after, recorded = (result.get(name) for name in ("before", "after", "changed"))
    if isinstance(recorded, bool):
        return recorded
    return after < before if is_number(before) and is_number(after) else "before" not in result


def step_blocks(entry: Mapping[str, Any]) -> tuple[Block, ...]:
    """A step's description of its result, a sentence first; its name alone where there is none."""
    name = one_line(str(entry.get("name")))
    try:
        blocks = tuple(make_step(name, entry.get("options") or {}).describe(entry))
    except Exception as error:  # of a plugin, or of options that were edited
        logger.debug("the step %s cannot describe its result: %s", name, error)
        blocks = ()
    return blocks if any(isinstance(block, Text) for block in blocks) else (Text(f"{name}."), *blocks)


def step_line(entry: Mapping[str, Any]) -> str:
    """The sentence of `step_blocks`, without its full stop."""
    return next(plain_words(block.words) for block in step_blocks(entry) if isinstance(block, Text)).removesuffix(".")
