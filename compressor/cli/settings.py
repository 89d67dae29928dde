"""From the options of `compress` and `plan` to a recipe.

Each option sets a field of the recipe, named by its path as for `--set`: `--split 2` is `--set
split.parts=2`. `--help` shows few of them. The others are made of every field of the recipe, its
text, gate and output, and of those fields of steps that Python's `compress` takes by name."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel

from compressor.cli.options import Choices, flag, options_of
from compressor.entry_points import read_option
from compressor.errors import CompressionError
from compressor.formatting import did_you_mean
from compressor.options import Options, separated
from compressor.quality_gate.options import GateOptions
from compressor.recipe.recipe import (
    FIELDS,
    MONE,
    UNEVEN_LAYERS,
    OutputOptions,
    Recipe,
    default_steps,
    read_recipe,
    refuse_missing,
    step_class,
    with_options,
)
from compressor.recipe.step import TextOptions

SUFFIXES = (".yaml", ".yml")
SHOWN = (  # by `compress --help`, others by `--help-all`
    "output",
    "ratio",
    "experts",
    "strategy",
    "correct",
    "distill",
    "fast",
    "best",
    "calibration",
    "samples",
    "sequence_length",
    "gate",
    "format",
    "push_to_hub",
    "device",
    "settings",
    "dry_run",
    "overwrite",
    "help_all",
)
NAMES = {"calibration.data": "calibration", "gate.tasks": "gate", "output.formats": "format"}
# each short for values of other options, which win when they are given
PRESETS: Mapping[str, Mapping[str, Any]] = {
    "fast": {
        "prune.strategy": "energy",
        "prune.sequential": True,
        "correct.method": "ridge",
        "correct.toward": 0.0,
    },
    "best": {"calibration.samples": 1024, "correct.method": "tune", "distill.train": "experts"},
}
Fast = Annotated[
    bool,
    flag(
        "One pass, energy, ridge. Short for --strategy energy --sequential --correct ridge --set "
        "correct.toward=0."
    ),
]
Best = Annotated[
    bool,
    flag("More text, tune and distill. Short for --samples 1024 --correct tune --distill experts."),
]
COUNTS = ("experts", "ratio", "experts_total")  # of which a step takes one
Settings = Annotated[
    list[str] | None,
    flag(
        "Any other option, as step.option=value. May be repeated.", None, "--set", metavar="<str>"
    ),
]


class StrategyFlags(Options):
    """Options of `compress` that are a strategy's, whose modules --help does not load."""

    merge: str | None = None
    """Option of the strategy."""
    no_merge_routers: bool = False
    """Option of the strategy."""
    representation: str | None = None
    """Option of the strategy."""
    similarity: str | None = None
    """Option of the strategy."""
    option: tuple[str, ...] = ()
    """Option of the strategy."""


def recipe_options() -> Choices:
    """Return an option for each field of a recipe, by the field's path."""
    options = Choices()
    for name, (step, field) in FIELDS.items():
        named = options_of(step_class(step), only=(field,), names={field: name}, mention=False)
        options += [(f"{step}.{field}", option) for _, option in named]
    sections: dict[str, type[Options]] = {
        "prune": step_class("prune"),
        "calibration": TextOptions,
        "gate": GateOptions,
        "output": OutputOptions,
        "": Recipe,
        "prune.options": StrategyFlags,
    }
    for section, model in sections.items():
        prefix = f"{section}." if section else ""
        names = {
            path.removeprefix(prefix): name
            for path, name in NAMES.items()
            if path.startswith(prefix)
        }
        # the text's `strict` is the gate's, too; --seed is of calibration, and the tasks' --set
        # gate.seed
        shared = ("strict", "seed") if model is GateOptions else ()
        named = options_of(model, without=("calibration", "options", *shared), names=names)
        options += [(f"{prefix}{field}", option) for field, option in named]
    return options


def preset(fast: bool, best: bool) -> Mapping[str, Any]:
    """Return the values that --fast or --best stands for, by path; none without them."""
    if fast and best:
        raise CompressionError("--fast and --best are two ends of one choice; give one of them")
    return PRESETS["fast"] if fast else PRESETS["best"] if best else {}


def recipe_of(model: str, flags: Mapping[str, Any], settings: Sequence[str] | None) -> Recipe:
    """Return the recipe that a command line asks for; `model` may be a recipe's file, changed by
    flags and settings."""
    values = dict(flags)
    if values.pop("prune.options.no_merge_routers", False):
        values["prune.options.merge_routers"] = False
    for text in values.pop("prune.options.option", ()):
        name, value = read_option(text, f"--option {text!r} should be name=value")
        values[f"prune.options.{name}"] = value
    for text in settings or ():
        path, value = read_option(
            text, f"--set {text!r} should be step.option=value, such as distill.steps=100"
        )
        values[path] = value
    constants = MONE in (separated(values.get("output.formats")) or ())
    is_file = model.endswith(SUFFIXES)
    heads = {path.partition(".")[0] for path in values}
    steps = (
        ()
        if "quantize" in heads and "prune" not in heads and not constants
        else default_steps(constants)
    )
    recipe = read_recipe(Path(model)) if is_file else Recipe(model=model, steps=steps)
    changed = _changed(recipe, values)
    if changed.model is None:
        raise CompressionError("no model is named; give MODEL, or a recipe with one")
    if is_file:
        refuse_missing(Path(model), changed)
    return changed


def _changed(recipe: Recipe, values: Mapping[str, Any]) -> Recipe:
    """Return the recipe with these values, by path; a step that it lacks is put in its usual
    place."""
    steps = {step.name: step for step in recipe.steps}
    if "constants" not in steps and any(path.startswith("constants.") for path in values):
        raise CompressionError(
            f"--budget and --experts-total: {UNEVEN_LAYERS}; pass --format mone, or leave them out"
        )
    content = dict(recipe)
    of_steps = dict[str, dict[str, Any]]()
    for path, value in values.items():
        head, _, field = path.partition(".")
        if head in Recipe.model_fields and head != "steps":
            content = _with(content, path, value)
            continue
        if not field:
            hint = did_you_mean(head, [name for name in Recipe.model_fields if name != "steps"])
            raise CompressionError(
                f"--set {path!r} names no option of a step; {hint}write step.option=value"
            )
        step_class(head)  # which refuses an unknown name
        if head == "prune" and "constants" in steps and head not in steps:
            head = "constants"  # which has the same names
        of_steps[head] = _with(of_steps.get(head, {}), field, value)
    changed = list(recipe.steps)
    for name, options in of_steps.items():  # a step's together, since one may only do with another
        if options.keys() & {*COUNTS}:
            options = {**dict.fromkeys(COUNTS & step_class(name).model_fields.keys()), **options}
        if name == "prune" and "strategy" in options:
            options = {"options": {}, **options}  # the recipe's were another strategy's
        elif isinstance(options.get("options"), dict) and name in steps:
            options = {
                **options,
                "options": {**getattr(steps[name], "options", {}), **options["options"]},
            }
        changed = with_options(changed, name, options)
    return Recipe.of({**content, "steps": changed}, "the command line")


def _with(options: Mapping[str, Any], path: str, value: Any) -> dict[str, Any]:
    """Return the options with a value at a path, such as `calibration.emphasis.end`."""
    name, _, inner = path.partition(".")
    old = options.get(name)
    below = dict(old) if isinstance(old, BaseModel | dict) else {}
    return {**options, name: _with(below, inner, value) if inner else value}
