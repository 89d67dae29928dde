"""What was done to an output by commands of their own, `calibrate-router` and `recover`, as those commands.

A plan keeps one bake and one recovery; `teacher` in one of them tells that a command of its own was asked for it.
"""

import shlex
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from compressor.errors import CompressionError
from compressor.recipe.plan import CompressionPlan
from compressor.recipe.whole import KEPT_WHOLE
from compressor.steps.distill.options import Recovery
from compressor.words import label, one_line

COMMANDS = {"bake": "calibrate-router", "recover": "recover"}
BAKE = {"method": "bake", "optimizer": "optimizer", "rounds": "rounds", "sequences": "sequences"}  # option by field
REFERENCE = "REFERENCE"  # of whose place a plan knows nothing


def separate(plan: CompressionPlan) -> tuple[str, ...]:
    """The entries of the plan that commands of their own were asked for, in order."""
    return tuple(name for name in plan.afterwards if "teacher" in (getattr(plan, name) or {}))


def is_whole(plan: CompressionPlan) -> bool:
    """Whether the plan holds all that was done: a second bake or recovery takes the place of the first."""
    return not any(name in (getattr(plan, name) or {}).get("after", ()) for name in plan.afterwards)


def refuse_part(plan: CompressionPlan) -> None:
    """Refuse to carry out a plan that does not hold all that was done."""
    if not is_whole(plan):
        raise CompressionError(
            "the plan holds the last of several bakes or recoveries alone, so it cannot be carried out; run the "
            'commands one after another, or remove "bake" and "recover" from it'
        )


def first_output(plan: CompressionPlan, out: str) -> str:
    """What the output of `compress` is called, where the last of all commands writes `out`."""
    return f"{out}-before-{names[0]}" if (names := separate(plan)) else out


def further_commands(plan: CompressionPlan, out: str) -> list[str] | None:
    """The command lines behind `compress`, of which the last one writes `out`; None where the plan lacks their text."""
    model, lines = label(plan.source.model), []
    names = separate(plan)
    places = [*(f"{out}-before-{name}" for name in names), out]
    if plan.strategy == KEPT_WHOLE:
        places[0] = f"./{model}"
    for number, name in enumerate(names):
        entry: Mapping[str, Any] = getattr(plan, name)
        if (data := data_arguments(entry["calibration"], "--data")) is None:
            return None
        is_source = entry["teacher"] in (plan.source.model, model)
        revision = plan.source.revision if is_source else None
        teacher = entry["teacher"] if revision is not None else f"./{label(str(entry['teacher']))}"
        asked = _bake(entry) if name == "bake" else _recovery(entry)
        arguments = [
            *(COMMANDS[name], places[number], "-o", places[number + 1], "--teacher", str(teacher)),
            *(["--revision", revision] if revision is not None else []),
            *data,
            *(argument for option, value in asked.items() for argument in _option(option, value)),
        ]
        lines.append(command_text(*arguments))
    return lines


def _bake(entry: Mapping[str, Any]) -> dict[str, Any]:
    seed = entry["calibration"].get("seed")
    found = {option: entry.get(field) for field, option in BAKE.items()}
    reference = REFERENCE if entry.get("reference") else None
    return {
        **found,
        "reference": reference,
        "sequence_length": entry.get("length"),
        "seed": seed,
        "dtype": entry.get("dtype"),
    }


def _recovery(entry: Mapping[str, Any]) -> dict[str, Any]:
    """What is not as it would be without being said."""
    usual = {each.name: each.default for each in fields(Recovery)}
    given = {name: entry.get(name) for name in usual if entry.get(name, usual[name]) != usual[name]}
    length = given.pop("length", None)
    method = given.pop("method", usual["method"])
    return {
        "method": method,
        **given,
        "sequence_length": length,
        "seed": entry.get("seed"),
        "dtype": entry.get("dtype"),
    }


def _option(name: str, value: Any) -> list[str]:
    if value is None or value is False:
        return []
    option = f"--{name.replace('_', '-')}"
    return [option] if value is True else [option, str(value)]


def command_text(*arguments: str) -> str:
    """A command line of this tool."""
    return shlex.join(["moe-compress", *map(one_line, arguments)])


def data_arguments(calibration: Mapping[str, Any], option: str) -> list[str] | None:
    """The sources of a text with their weights, by name alone; None where the plan lacks them."""
    if not (sources := sources_of(calibration)):
        return None
    weights = [entry.get("weight", 1.0) for entry in sources]
    alike = len(set(weights)) == 1
    found = []
    for entry, weight in zip(sources, weights, strict=True):
        name = label(str(entry["source"]))
        found += [option, name if alike and not _looks_weighted(name) else f"{name}={weight!r}"]
    return found


def sources_of(calibration: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """What is recorded of each calibration source."""
    stored = calibration.get("sources")
    entries = stored if isinstance(stored, list) else []
    return [entry for entry in entries if isinstance(entry, Mapping) and "source" in entry]


def _looks_weighted(name: str) -> bool:
    """Whether the command line would read the end of a name as its weight."""
    try:
        float(name.rpartition("=")[2])
    except ValueError:
        return False
    return "=" in name
