"""The recipe that asks for a plan again, from the plan alone: all steps so far, no folders and no tokens."""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compressor.errors import CompressionError
from compressor.recipe.recipe import RECIPE, recipe_of_plan, recipe_yaml
from compressor.recipe.steps_plan import PRUNE, Plan, source_files
from compressor.words import label, one_line


@dataclass(frozen=True, slots=True)
class Again:
    """A recipe's YAML, and the command lines that carry it out."""

    recipe: str
    commands: tuple[str, ...]


def again(plan: Plan, out: str) -> Again | None:
    """What asks for this plan again and writes it to `out`; None where the plan does not record all that it takes.

    A plan of one source of several (`--per-source`) needs two commands. Local models and text files are named without
    their folders.
    """
    texts = [text for text in (plan.calibration, *(step.text for step in plan.steps)) if text is not None]
    if not all(isinstance(text.get("asked"), Mapping) for text in texts):
        return None
    try:
        made = recipe_of_plan(_without_folders(plan)).model_copy(update={"model": label(plan.source.model)})
    except CompressionError:  # a step that is not installed, or options that were edited
        return None
    only = (plan.calibration or {}).get("only")
    if only is None:
        commands: list[tuple[str, ...]] = [("compress", RECIPE, "-o", out)]
    else:
        (file,) = source_files(Path("plan.json"), [label(str(only))])
        commands = [("plan", RECIPE, "-o", "plan.json", "--per-source"), ("apply", str(file), "-o", out)]
    lines = tuple(shlex.join(["moe-compress", *map(one_line, command)]) for command in commands)
    return Again(recipe_yaml(made).decode().rstrip(), lines)


def _without_folders(plan: Plan) -> Plan:
    """The plan with folders left out of its options, those of strategies excepted."""
    for number, step in enumerate(plan.steps):
        options = {name: _named(value) for name, value in step.options.items()}
        if step.name == PRUNE and "options" in options:
            options["options"] = dict(step.options["options"])
        plan = plan.with_entry(number, options=options)
    return plan


def _named(value: Any) -> Any:
    """A value in which paths are names."""
    if isinstance(value, Mapping):
        return {name: _named(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_named(inner) for inner in value]
    return label(value) if isinstance(value, str) else value
