"""From the options of `compress` and `plan` to a recipe.

Every option is a path into the recipe: `--prune.correct.steps 100`, or `--set` with the same.
`PATHS` has the short names: `--split 2` is `--prune.split 2`. `--help` shows few options.
"""

import re
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

from compressor.cli.options import Choices, flag, options_of
from compressor.entry_points import read_option
from compressor.errors import CompressionError
from compressor.options import Options, separated
from compressor.quality_gate.options import GateOptions
from compressor.recipe.recipe import (
    MONE,
    SHORT_NAMES,
    OutputOptions,
    Recipe,
    first_steps,
    read_recipe,
    refuse_missing,
    step_class,
    with_values,
)
from compressor.recipe.step import TextOptions
from compressor.records import Json
from compressor.steps.correct.options import Correct

SUFFIXES = (".yaml", ".yml")
PATH = re.compile(r"--[a-z_-]+(\.[a-z0-9_-]+)+")  # of an option in a recipe, as a flag
OPTION = re.compile(r"-[a-zA-Z-]")  # which no number begins with
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
# short names of options for paths in the recipe; all other options are named by their last part
PATHS = {
    **SHORT_NAMES,
    "calibration": "calibration.data",
    "gate": "gate.tasks",
    "format": "output.formats",
}
NAMES = {path: name for name, path in PATHS.items()}
# each short for values of other options, which win when they are given
PRESETS: Mapping[str, Json] = {
    "fast": {
        "prune.strategy": "energy",
        "prune.sequential": True,
        "prune.correct": "ridge",
        "prune.correct.toward": 0.0,
    },
    "best": {"calibration.samples": 1024, "prune.correct": "tune", "distill.train": "experts"},
}
Fast = Annotated[
    bool,
    flag(
        "One pass, energy, ridge. Short for --strategy energy --sequential --correct ridge "
        "--prune.correct.toward 0."
    ),
]
Best = Annotated[
    bool,
    flag("More text, tune and distill. Short for --samples 1024 --correct tune --distill experts."),
]
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
    """Return an option for each field of a recipe and of prune, and for the paths in `PATHS`."""
    options = Choices()
    sections: list[tuple[str, type[Options]]] = [
        (name, step_class(name)) for name in ("constants", "routers", "distill", "quantize")
    ]
    sections = [("prune.correct", Correct), *sections]
    for section, model in sections:
        fields = [field for field in model.model_fields if f"{section}.{field}" in NAMES]
        options += _options(section, model, only=fields, mention=False)
    auto = ("split", "correct")  # by default here, and nothing in a recipe
    options += _options("prune", step_class("prune"), only=auto, mention=False)
    options += _options("prune", step_class("prune"), without=auto)
    options += _options("calibration", TextOptions)
    # the text's `strict` is the gate's, too; --seed is of calibration, the tasks' --set gate.seed
    options += _options("gate", GateOptions, without=("strict", "seed"))
    options += _options("output", OutputOptions)
    options += _options("", Recipe, without=("calibration", "fit"))
    return options + _options("prune.options", StrategyFlags)


def _options(
    section: str,
    model: type[Options],
    only: Sequence[str] | None = None,
    without: Sequence[str] = (),
    mention: bool = True,
) -> Choices:
    """Return the options of the fields of a section of the recipe, by path."""
    prefix = f"{section}." if section else ""
    names = {
        field: NAMES[prefix + field] for field in model.model_fields if prefix + field in NAMES
    }
    left_out = ("calibration", "options", *without)
    named = options_of(model, only=only, without=left_out, names=names, mention=mention)
    return [(prefix + field, option) for field, option in named]


def paths_spelled_out(arguments: Sequence[str]) -> list[str]:
    """Return arguments with `--prune.correct.steps 100`, a path in the recipe, as a `--set`.

    Without a value, as before another option, it is true."""
    spelled = list[str]()
    remaining = deque(arguments)
    while remaining:
        argument = remaining.popleft()
        path, equals, value = argument.partition("=")
        if not PATH.fullmatch(path):
            spelled.append(argument)
            continue
        if not equals:
            has_value = bool(remaining) and not OPTION.match(remaining[0])
            value = remaining.popleft() if has_value else "true"
        spelled += ["--set", f"{path.removeprefix('--').replace('-', '_')}={value}"]
    return spelled


def preset(fast: bool, best: bool) -> Json:
    """Return the values that --fast or --best stands for, by path; none without them."""
    if fast and best:
        raise CompressionError("--fast and --best are two ends of one choice; give one of them")
    return PRESETS["fast"] if fast else PRESETS["best"] if best else {}


def recipe_of(model: str, flags: Json, settings: Sequence[str] | None) -> Recipe:
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
    if is_file:
        recipe = read_recipe(Path(model))
    else:
        recipe = Recipe(model=model, steps=first_steps(values, constants))
    changed = with_values(recipe, values)
    if changed.model is None:
        raise CompressionError("no model is named; give MODEL, or a recipe with one")
    if is_file:
        refuse_missing(Path(model), changed)
    return changed
