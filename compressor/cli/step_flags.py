"""From the flags of `compress` and `plan` to a recipe: a file, or a model with the default steps; `--set` on top."""

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from compressor.cli.options import KEEP, STEPS, STRATEGY, RecipeFlags, Running, TextFlags, field_options, without_none
from compressor.entry_points import read_option
from compressor.errors import CompressionError
from compressor.formatting import did_you_mean
from compressor.recipe.recipe import (
    FIELDS,
    Recipe,
    default_steps,
    options_by_step,
    read_recipe,
    refuse_missing,
    step_class,
    with_options,
)
from compressor.recipe.step import Step
from compressor.steps.constants.step import Constants
from compressor.steps.correct.step import Correct
from compressor.steps.distill.step import Distill
from compressor.steps.prune.step import Prune
from compressor.steps.routers.step import Routers
from compressor.steps.split.step import Split

SUFFIXES = (".yaml", ".yml")
PANELS: tuple[tuple[type[Step], str, tuple[str, ...]], ...] = (  # options that are fields of a step, by panel
    (Prune, KEEP, ("experts", "ratio", "protect", "top_k", "mtp")),
    (Constants, KEEP, ("experts_total", "budget")),
    (Split, KEEP, ("split", "split_by")),
    (Prune, STRATEGY, ("strategy", "sequential")),
    (Correct, STEPS, ("correct", "deterministic")),
    (Routers, STEPS, ("routers",)),
    (Distill, STEPS, ("distill",)),
)
UNLIKE_CONSTANTS = ("top_k", "mtp", "strategy", "sequential", "split", "split_by")  # flags that steps beside it have


def flags() -> list[inspect.Parameter]:
    """The options of `compress` and `plan` that are fields of steps; None where they are not given."""
    return [
        option
        for step, panel, names in PANELS
        for option in field_options(step, panel, {name: FIELDS.get(name, ("", name))[1] for name in names}, bare=True)
    ]


def recipe_of_flags(
    model: str | None,
    step_flags: Mapping[str, Any],
    text: TextFlags,
    recipe_flags: RecipeFlags,
    running: Running,
    constants: bool = False,
    gate: Mapping[str, Any] | None = None,
    formats: Sequence[str] = (),
) -> Recipe:
    """The recipe that a command line asks for; `model` is one, or a recipe's file, which flags change."""
    if model is None:
        raise CompressionError("Missing argument 'MODEL'; see moe-compress compress --help")
    named = {name: value for name, value in step_flags.items() if value is not None and value is not False}
    is_file = model.endswith(SUFFIXES)
    if is_file:
        recipe = read_recipe(Path(model))
        steps = _changed(recipe.steps, named, recipe_flags)
    else:
        recipe = Recipe(model=model)
        steps = _default_steps(named, recipe_flags, constants)
    content: dict[str, Any] = {**dict(recipe), "steps": steps}
    content["calibration"] = {**recipe.calibration.model_dump(), **text.given()}
    content |= without_none({"revision": running.revision, "seed": text["seed"]})
    if running.dtype != "auto":
        content["dtype"] = running.dtype
    if formats:
        content["output"] = {**recipe.output.model_dump(), "formats": tuple(formats)}
    if gate is not None and (recipe.gate is not None or "tasks" in gate):
        content["gate"] = {**(recipe.gate.model_dump() if recipe.gate else {}), **gate}
    of_steps: dict[str, dict[str, Any]] = {}
    for setting in recipe_flags.settings or ():
        _set(content, of_steps, setting)
    for name, values in of_steps.items():  # a step's together, since one may only do with another
        content["steps"] = with_options(content["steps"], name, values)
    changed = Recipe.of(content, "the command line")
    if changed.model is None:
        raise CompressionError("no model is named; give MODEL, or a recipe with one")
    if is_file:
        refuse_missing(Path(model), changed)
    return changed


def _default_steps(named: Mapping[str, Any], flags: RecipeFlags, constants: bool) -> list[Step]:
    if constants:
        wanted = dict(named)
        if wanted.get("strategy") in ("auto", "constants"):
            del wanted["strategy"]
        if other := next((name for name in UNLIKE_CONSTANTS if name in wanted), None):
            raise CompressionError(
                f"--format mone does not go with --{other.replace('_', '-')}: it replaces the experts that a constant "
                "misses least of; leave it out"
            )
        return default_steps(constants=True, **wanted)
    of_constants = [f"--{name.replace('_', '-')}" for name in ("experts_total", "budget") if name in named]
    if of_constants or named.get("correct") == "constants":
        option = (*of_constants, "--correct constants")[0]
        raise CompressionError(f"{option} is for constants in the place of experts; pass --format mone with it")
    chosen = flags.strategy_options(str(named.get("strategy", "auto")))
    return default_steps(**named, options=chosen or None)


def _changed(steps: Sequence[Step], named: Mapping[str, Any], flags: RecipeFlags) -> list[Step]:
    """A recipe's steps with the flags' options; a step that it lacks is put in its usual place."""
    for name, options in options_by_step(named).items():
        if options.keys() & {"experts", "ratio"}:
            options = {"experts": None, "ratio": None, **options}
        steps = with_options(steps, name, {**options, "options": {}} if "strategy" in options else options)
    prune: Any = next((step for step in steps if step.name == "prune"), None)
    if prune is not None and (chosen := flags.strategy_options(prune.strategy)):
        steps = with_options(steps, "prune", {"options": {**prune.options, **chosen}})
    return list(steps)


def _set(content: dict[str, Any], of_steps: dict[str, dict[str, Any]], setting: str) -> None:
    """Put `step.option=value` into the options of steps, or `field=value` of the recipe into its content."""
    path, sign, text = setting.partition("=")
    head, _, option = path.strip().partition(".")
    if not sign or not head:
        raise CompressionError(f"--set {setting!r} should be step.option=value, such as distill.steps=100")
    option, value = read_option(f"{option}={text}", "")
    if head in Recipe.model_fields and head != "steps":
        old = content[head]
        plain = old.model_dump() if isinstance(old, BaseModel) else old
        content[head] = {**(plain or {}), option: value} if option else value
        return
    if not option:
        hint = did_you_mean(head, [name for name in Recipe.model_fields if name != "steps"])
        raise CompressionError(f"--set {setting!r} names no option of a step; {hint}write step.option=value")
    step_class(head)  # which refuses an unknown name
    of_steps.setdefault(head, {})[option] = value
