"""The command that makes a plan again, from the plan alone."""

import json
import shlex
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compressor.plans.files import source_files
from compressor.plans.plan import CompressionPlan
from compressor.words import label, one_line

PROTECTED = "protected.json"


@dataclass(frozen=True, slots=True)
class Command:
    """Command lines, and the file of protected experts that they read, if there are any."""

    lines: tuple[str, ...]
    protected: str | None = None


def rebuilt(plan: CompressionPlan, out: str) -> Command | None:
    """What asks for this plan again and writes it to `out`; None where the plan does not say on which text.

    A plan of one source of several (`--per-source`) needs two commands. Text files and local models stand there by
    their names alone.
    """
    data = _data_arguments(plan.calibration)
    if data is None:
        return None
    base = ["--revision", plan.source.revision] if plan.source.revision is not None else []
    if plan.split is not None:
        return _splitting(plan, plan.split, out, base)
    refit = {"method": "none"} if plan.correction is None else plan.correction  # said, for strategies differ in theirs
    dtype = refit.get("dtype")
    correct = ["--correct", str(refit.get("method")), *(["--dtype", str(dtype)] if dtype else [])]
    shared = [
        *base,
        *("--experts", str(plan.experts), "--strategy", plan.strategy),
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
        return Command((_line("compress", model, "-o", out, *shared),), protected)
    planned = _line("plan", model, "-o", "plan.json", *shared, "--per-source")
    (file,) = source_files(Path("plan.json"), [label(str(only))])
    return Command((planned, _line("apply", str(file), "-o", out)), protected)


def _splitting(plan: CompressionPlan, split: Mapping[str, Any], out: str, base: list[str]) -> Command | None:
    """What splits the experts again."""
    data = _data_arguments(split.get("calibration"))
    if data is None:
        return None
    by = ["--split-by", "clusters"] if split.get("by") == "clusters" else []
    said = ["--data" if word == "--calibration" else word for word in data]
    model = plan.source.model if base else f"./{label(plan.source.model)}"
    asked = [*base, "--split", str(split.get("parts")), *by, *said, "--seed", str(plan.seed)]
    return Command((_line("split", model, "-o", out, *asked),))


def _afterwards(plan: CompressionPlan) -> list[str]:
    """The bake and the recovery, where `compress` was asked for them; `teacher` tells that another command was."""
    bake, recover = ({} if not asked or "teacher" in asked else asked for asked in (plan.bake, plan.recover))
    return [
        *(["--bake", str(bake.get("method"))] if bake else []),
        *(["--recover", str(recover.get("method")), "--recover-steps", str(recover.get("steps"))] if recover else []),
    ]


def _line(*arguments: str) -> str:
    return shlex.join(["moe-compress", *map(one_line, arguments)])


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
    asked, sources = calibration.get("asked"), sources_of(calibration)
    if not isinstance(asked, Mapping) or not sources:
        return None
    weights = [entry.get("weight", 1.0) for entry in sources]
    alike = len(set(weights)) == 1
    found = []
    for entry, weight in zip(sources, weights, strict=True):
        name = label(str(entry["source"]))
        found += ["--calibration", name if alike and not _looks_weighted(name) else f"{name}={weight!r}"]
    samples, length = asked.get("samples"), asked.get("sequence_length")
    return [*found, "--samples", str(samples), "--sequence-length", str(length)]


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


def protected_list(plan: CompressionPlan) -> str:
    """The protected experts as `--protect` reads them: JSON, one line a layer."""
    often = Counter(layer.layer for layer in plan.layers)
    lines = []
    for layer in plan.layers:
        named = {"module": layer.module} if often[layer.layer] > 1 else {}
        entries = [{"layer": layer.layer, "expert": expert, **named} for expert in plan.protected.get(layer.module, ())]
        if entries:
            lines.append(", ".join(map(json.dumps, entries)))
    return "[" + ",\n ".join(lines) + "]"
