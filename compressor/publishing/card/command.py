"""The command that makes a plan again, from the plan alone."""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compressor.planning.further import (
    command_text,
    data_arguments,
    first_output,
    further_commands,
    is_whole,
    separate,
)
from compressor.planning.request import AUTO
from compressor.recipe.files import source_files
from compressor.recipe.plan import CompressionPlan
from compressor.recipe.split import CLUSTERS, part_entry, parts_of
from compressor.recipe.whole import KEPT_WHOLE
from compressor.words import label

PROTECTED = "protected.json"


@dataclass(frozen=True, slots=True)
class Command:
    """Command lines, and the file of protected experts that they read, if there are any."""

    lines: tuple[str, ...]
    protected: str | None = None


def rebuilt(plan: CompressionPlan, out: str) -> Command | None:
    """What asks for this plan again and writes it to `out`; None where the plan does not say all that was done.

    A plan of one source of several (`--per-source`) needs two commands, and so does one whose output was baked or
    recovered by a command of its own. Text files and local models stand there by their names alone.
    """
    data, further = _data_arguments(plan.calibration), further_commands(plan, out)
    if data is None or further is None or not is_whole(plan):
        return None
    base = ["--revision", plan.source.revision] if plan.source.revision is not None else []
    if plan.split is not None and plan.strategy == KEPT_WHOLE:
        split = _splitting(plan, plan.split, first_output(plan, out), base)
        return None if split is None else Command((*split.lines, *further))
    if plan.strategy == KEPT_WHOLE:
        return Command(tuple(further))
    out = first_output(plan, out)
    refit = {"method": "none"} if plan.correction is None else plan.correction  # said, for strategies differ in theirs
    dtype = refit.get("dtype")
    correct = ["--correct", str(refit.get("method")), *(["--dtype", str(dtype)] if dtype else [])]
    shared = [
        *base,
        *_finer(plan),
        *_numbers(plan),
        *(argument for name, value in plan.options.items() for argument in ("--option", option_text(name, value))),
        *data,
        *("--seed", str(plan.seed)),
        *correct,
        *_afterwards(plan),
        *(["--sequential"] if plan.sequential else []),
        *(["--protect", PROTECTED] if plan.protected else []),
    ]
    protected = protected_list(plan) if plan.protected else None
    only = (plan.calibration or {}).get("only")
    model = plan.source.model if base else f"./{label(plan.source.model)}"  # which cannot be taken for an option
    if only is None:
        return Command((command_text("compress", model, "-o", out, *shared), *further), protected)
    planned = command_text("plan", model, "-o", "plan.json", *shared, "--per-source")
    (file,) = source_files(Path("plan.json"), [label(str(only))])
    return Command((planned, command_text("apply", str(file), "-o", out), *further), protected)


def _finer(plan: CompressionPlan) -> list[str]:
    """How experts were split before they were planned, and how many of them a token visits."""
    split = plan.split or {}
    return [
        *(["--split", str(split.get("parts", 1))] if split or plan.strategy == AUTO else []),
        *(["--split-by", CLUSTERS] if split.get("by") == CLUSTERS else []),
        *(["--top-k", str(plan.top_k)] if plan.top_k is not None else []),
    ]


def _numbers(plan: CompressionPlan) -> tuple[str, ...]:
    """How many experts to keep, and how they are chosen."""
    if plan.constants is None:
        return "--experts", str(plan.experts), "--strategy", plan.strategy
    budget, total = str(plan.constants.get("budget")), str(plan.constants.get("experts_total"))
    many = ("--experts", str(plan.experts)) if budget == "even" else ("--experts-total", total)
    return "--format", "mone", *many, "--budget", budget


def _splitting(plan: CompressionPlan, split: Mapping[str, Any], out: str, base: list[str]) -> Command | None:
    """What splits the experts again."""
    data = _data_arguments(split.get("calibration"))
    if data is None:
        return None
    by = ["--split-by", CLUSTERS] if split.get("by") == CLUSTERS else []
    said = ["--data" if word == "--calibration" else word for word in data]
    model = plan.source.model if base else f"./{label(plan.source.model)}"
    asked = [*base, "--split", str(split.get("parts")), *by, *said, "--seed", str(plan.seed)]
    return Command((command_text("split", model, "-o", out, *asked),))


def _afterwards(plan: CompressionPlan) -> list[str]:
    """The bake and the recovery, where `compress` was asked for them."""
    own = {name: getattr(plan, name) for name in plan.afterwards if name not in separate(plan)}
    bake, recover = own.get("bake"), own.get("recover")
    return [
        *(["--bake", str(bake.get("method")), *_sizes(bake)] if bake else []),
        *(["--recover", str(recover.get("method")), "--recover-steps", str(recover.get("steps"))] if recover else []),
        *(["--recover-stream"] if recover and recover.get("stream") is True else []),
    ]


def _sizes(bake: Mapping[str, Any]) -> list[str]:
    return ["--bake-rounds", str(bake.get("rounds")), "--bake-sequences", str(bake.get("sequences"))]


def option_text(name: str, value: Any) -> str:
    """name=value as `--option` reads it: JSON, or text that is no JSON."""
    if not isinstance(value, str):
        return f"{name}={json.dumps(value)}"
    try:
        json.loads(value)
    except ValueError:
        return f"{name}={value}"
    return f"{name}={json.dumps(value)}"


def _data_arguments(calibration: Mapping[str, Any] | None) -> list[str] | None:
    """Sources and sizes; nothing if no data was read, and None where the plan lacks what was asked for."""
    if calibration is None:
        return []
    asked, found = calibration.get("asked"), data_arguments(calibration, "--calibration")
    if not isinstance(asked, Mapping) or found is None:
        return None
    samples, length = asked.get("samples"), asked.get("sequence_length")
    return [*found, "--samples", str(samples), "--sequence-length", str(length)]


def protected_list(plan: CompressionPlan) -> str:
    """The protected experts as `--protect` reads them: JSON, one line a layer."""
    often, parts = Counter(layer.layer for layer in plan.layers), parts_of(plan.split)
    lines = []
    for layer in plan.layers:
        named = {"module": layer.module} if often[layer.layer] > 1 else {}
        own = plan.protected.get(layer.module, ())
        entries = [{"layer": layer.layer, **part_entry(expert, parts), **named} for expert in own]
        if entries:
            lines.append(", ".join(map(json.dumps, entries)))
    return "[" + ",\n ".join(lines) + "]"
