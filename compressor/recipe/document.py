"""A plan as blocks: what becomes of each layer's experts."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from compressor.document.blocks import Block, Table, Text
from compressor.recipe.plan import CompressionPlan
from compressor.recipe.steps_plan import Plan
from compressor.words import counted

MOST = 12  # numbers in a cell
COLUMNS = ("layer", "experts", "kept", "dropped", "merged", "protected")


def plan_blocks(made: Plan, path: Path) -> tuple[Block, ...]:
    """A row for each layer of a plan that was written there, and its steps if there are several."""
    plan = made.stage
    columns: tuple[str, ...] = COLUMNS if plan.protected else COLUMNS[:-1]
    rows = [
        (
            layer.module,
            str(layer.experts),
            str(len(layer.groups)),
            first_of(layer.dropped),
            first_of([list(group.members) for group in layer.groups if len(group.members) > 1]),
            first_of(plan.protected.get(layer.module, ())),
        )[: len(columns)]
        for layer in plan.layers
    ]
    data = "" if plan.calibration is None or "only" not in plan.calibration else f" for {plan.calibration['only']}"
    if plan.constants is not None:
        columns = tuple("constants" if name == "dropped" else name for name in columns)
    title = f"Plan by {plan.strategy}{data}, written to {path}"
    steps = [Text(f"Steps: {', '.join(step.name for step in made.steps)}")] if len(made.steps) > 1 else []
    return Table(title, columns, tuple(rows)), *protected_blocks_of(plan.protected), *steps


def constants_line(plan: CompressionPlan) -> str:
    """'constants for 12 experts; the layers keep 6 to 8'."""
    kept = sorted({len(layer.groups) for layer in plan.layers})
    each = f"{kept[0]}" if len(kept) == 1 else f"{kept[0]} to {kept[-1]}"
    gone = counted(sum(len(layer.constants) for layer in plan.layers), "expert")
    return f"constants for {gone}; the layers keep {each} each"


def protected_blocks_of(protected: Mapping[str, Sequence[int]]) -> tuple[Block, ...]:
    """How many experts stay untouched; nothing if none."""
    count = sum(map(len, protected.values()))
    return (Text(f"{counted(count, 'protected expert')}, neither merged nor dropped"),) if count else ()


def first_of(items: Sequence[object], most: int = MOST) -> str:
    """The first of them with spaces between, and how many more there are; '-' for none."""
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return " ".join(map(str, items[:most])) + more or "-"
