"""From the flags of `compress` and `plan` to a recipe: a file, or a model with the default steps; `--set` on top."""

import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from compressor.cli.options import KEEP, STEPS, STRATEGY, Computing, StrategyOptions, TextFlags, described, step_options
from compressor.errors import CompressionError
from compressor.recipe.recipe import Recipe, make_step, read_recipe, refuse_missing, step_class
from compressor.recipe.step import Step
from compressor.steps.constants.step import Constants
from compressor.steps.correct.step import Correct
from compressor.steps.distill.step import Distill
from compressor.steps.prune.step import Prune
from compressor.steps.routers.step import Routers
from compressor.steps.split.step import Split
from compressor.words import did_you_mean

SUFFIXES = (".yaml", ".yml")
FLAGS: tuple[tuple[type[Step], str, Mapping[str, str]], ...] = (  # the option's name, and the field that it is
    (Prune, KEEP, {name: name for name in ("experts", "ratio", "protect", "top_k", "mtp")}),
    (Constants, KEEP, {"experts_total": "experts_total", "budget": "budget"}),
    (Split, KEEP, {"split": "parts", "split_by": "by"}),
    (Prune, STRATEGY, {"strategy": "strategy", "sequential": "sequential"}),
    (Correct, STEPS, {"correct": "method", "deterministic": "deterministic"}),
    (Routers, STEPS, {"routers": "method"}),
    (Distill, STEPS, {"distill": "train"}),
)
ORDER = ("split", "prune", "constants", "correct", "routers", "distill")  # of steps that flags alone ask for
BESIDE_CONSTANTS = ("experts", "ratio", "protect")  # flags of `prune` that `constants` has too


@dataclass(frozen=True, slots=True)
class SetFlag:
    """Any option of any step."""

    set: list[str] | None = described(
        None, STEPS, "step.option=value for any option of a step, see `moe-compress steps`; may be repeated.",
        name="--set",
    )  # fmt: skip


def flags() -> list[inspect.Parameter]:
    """The options of `compress` and `plan` that are fields of steps; None where they are not given."""
    return [option for step, panel, fields in FLAGS for option in step_options(step, panel, fields, bare=True)]


def names() -> list[str]:
    """Names of these options."""
    return [name for _, _, fields in FLAGS for name in fields]


def recipe_of_flags(
    model: str | None,
    given: Mapping[str, Any],
    text: TextFlags,
    strategy_options: StrategyOptions,
    computing: Computing,
    settings: Sequence[str],
    revision: str | None = None,
    constants: bool = False,
) -> Recipe:
    """The recipe that a command line asks for; `model` is one, or a recipe's file, which flags change."""
    said = {name: value for name, value in given.items() if value is not None and value is not False}
    if model is not None and model.endswith(SUFFIXES):
        recipe = read_recipe(Path(model))
        steps = _changed(list(recipe.steps), said, strategy_options)
    else:
        recipe = Recipe.of({"model": model, "revision": revision}, "the command line")
        steps = _default_steps(said, strategy_options, constants)
    content: dict[str, Any] = {**dict(recipe), "steps": steps}
    if revision is not None:
        content["revision"] = revision
    content["calibration"] = {**recipe.calibration.model_dump(), **text.given()}
    content |= {"seed": text.seed} if text.seed is not None else {}
    content |= {"dtype": computing.dtype} if computing.dtype != "auto" else {}
    asked: dict[str, dict[str, Any]] = {}
    for setting in settings:
        _set(content, asked, setting)
    for name, options in asked.items():  # a step's together, since one may only do with another
        content["steps"] = _with_options(list(content["steps"]), name, options)
    made = Recipe.of(content, "the command line")
    if made.model is None:
        raise CompressionError("no model is named; give MODEL, or a recipe with one")
    if model is not None and model.endswith(SUFFIXES):
        refuse_missing(Path(model), made)
    return made


def _default_steps(said: Mapping[str, Any], strategy_options: StrategyOptions, constants: bool) -> list[Step]:
    options: dict[str, dict[str, Any]] = {name: {} for name in ORDER}
    for step, _, fields in FLAGS:
        own = {field: said[name] for name, field in fields.items() if name in said}
        options[step.name] |= own
    named = "--" + next((name for name in said if name in ("experts_total", "budget")), "").replace("_", "-")
    if constants:
        prune = options["prune"]
        options["constants"] |= {name: prune.pop(name) for name in BESIDE_CONSTANTS if name in prune}
        if prune.get("strategy") in ("auto", "constants"):
            del prune["strategy"]
        if left := {**prune, **options["split"]}:
            flag = {field: name for _, _, fields in FLAGS for name, field in fields.items()}[next(iter(left))]
            raise CompressionError(
                f"--format mone does not go with --{flag.replace('_', '-')}: it replaces the experts that a constant "
                "misses least of; leave it out"
            )
        wanted = {"constants": options["constants"], "correct": options["correct"]}
        wanted |= {name: options[name] for name in ("routers", "distill") if options[name]}
        if not options["correct"].get("method"):
            del wanted["correct"]
        return [make_step(name, entry) for name, entry in wanted.items()]
    if options["constants"] or options["correct"].get("method") == "constants":
        flag = named if options["constants"] else "--correct constants"
        raise CompressionError(f"{flag} is for constants in the place of experts; pass --format mone with it")
    prune = options["prune"]
    chosen = strategy_options.given(str(prune.get("strategy", "auto")))
    return [
        make_step("split", {"parts": "auto", **options["split"]}),
        make_step("prune", {**prune, **({"options": chosen} if chosen else {})}),
        make_step("correct", {"method": "auto", **options["correct"]}),
        *(make_step(name, options[name]) for name in ("routers", "distill") if options[name]),
    ]


def _changed(steps: list[Step], said: Mapping[str, Any], strategy_options: StrategyOptions) -> list[Step]:
    """A recipe's steps with what flags say; a step that it lacks is put in its usual place."""
    for step, _, fields in FLAGS:
        own = {field: said[name] for name, field in fields.items() if name in said}
        if step is Prune and {"experts", "ratio"} & set(own):
            own = {"experts": None, "ratio": None, **own}
        if step is Prune and "strategy" in own:
            own["options"] = {}
        if own:
            steps = _with_options(steps, step.name, own)
    prune: Any = next((step for step in steps if step.name == "prune"), None)
    if prune is not None and (chosen := strategy_options.given(prune.strategy)):
        steps = _with_options(steps, "prune", {"options": {**prune.options, **chosen}})
    return steps


def _with_options(steps: list[Step], name: str, options: Mapping[str, Any]) -> list[Step]:
    places = [place for place, step in enumerate(steps) if step.name == name]
    if len(places) > 1:
        raise CompressionError(f"the recipe has {len(places)} steps {name}; change the one that is meant in the file")
    if places:
        old = steps[places[0]]
        made = make_step(name, {**old.model_dump(), **options})
        return [*steps[: places[0]], made, *steps[places[0] + 1 :]]
    later = ORDER[ORDER.index(name) + 1 :] if name in ORDER else ()
    place = next((place for place, step in enumerate(steps) if step.name in later), len(steps))
    return [*steps[:place], make_step(name, options), *steps[place:]]


def _set(content: dict[str, Any], asked: dict[str, dict[str, Any]], setting: str) -> None:
    """Put `step.option=value` into what is asked of steps, or `field=value` of the recipe into its content."""
    path, sign, text = setting.partition("=")
    head, _, option = path.strip().partition(".")
    if not sign or not head:
        raise CompressionError(f"--set {setting!r} should be step.option=value, such as distill.steps=100")
    value = _value(text)
    if head in Recipe.model_fields and head != "steps":
        old = content[head]
        plain = old.model_dump() if isinstance(old, BaseModel) else old
        content[head] = {**(plain or {}), option.replace("-", "_"): value} if option else value
        return
    if not option:
        known = [name for name in Recipe.model_fields if name != "steps"]
        hint = did_you_mean(head, known)
        raise CompressionError(f"--set {setting!r} names no option of a step; {hint}write step.option=value")
    step_class(head)  # which refuses an unknown name
    asked.setdefault(head, {})[option.replace("-", "_")] = value


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
