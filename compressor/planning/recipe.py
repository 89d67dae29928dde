"""Recipes: a request with its model as YAML, written beside every output and read by `--recipe`.

A recipe is made from the plan alone, so that `compress`, and `plan` with `apply`, leave the same bytes. Like
compression.json it names no folder; on the machine that made the output, the record of the run knows them.
"""

import os
import reprlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import yaml

from compressor.data.sources import TEXT_SUFFIXES, is_file, without_folders
from compressor.errors import CompressionError, reason_of
from compressor.planning.further import first_output, further_commands, separate
from compressor.planning.request import AUTO, BUDGETS, Request
from compressor.recipe.plan import CompressionPlan
from compressor.recipe.split import CLUSTERS, part_entry, parts_of
from compressor.records import MOST_DEPTH
from compressor.run_record import read_record
from compressor.words import did_you_mean

RECIPE = "recipe.yaml"
MOST_BYTES = 1_000_000
MOST_PARTS, MOST_LETTERS = 2**18, 4096  # of YAML, and of each word: no whole number of more digits can be shown
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # in C, where PyYAML was built so
MODEL = {"model": str, "revision": str | None}  # what a recipe says beside the fields of a request
BAKE = {"bake": "method", "bake_rounds": "rounds", "bake_sequences": "sequences"}  # a request's fields, a bake's
KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text", Mapping: "a mapping"}


def recipe_of(plan: CompressionPlan, model: str) -> bytes:
    """The recipe that asks for this plan of `model` again, as far as the plan tells; folders are left out.

    What commands of their own have done to the output stands above it, as these commands. Protected experts stand in it
    one by one, whether they were listed or found.
    """
    often, parts = Counter(layer.layer for layer in plan.layers), parts_of(plan.split)
    protected = [
        {"layer": layer.layer, **part_entry(expert, parts)}
        | ({"module": layer.module} if often[layer.layer] > 1 else {})
        for layer in plan.layers
        for expert in plan.protected.get(layer.module, ())
    ]
    correction = plan.correction or {"method": "none"}
    own = {name: getattr(plan, name) for name in plan.afterwards if name not in separate(plan)}
    content = {
        "model": model,
        "revision": plan.source.revision,
        **_numbers(plan),
        "protect": protected,
        "split": parts if parts > 1 or plan.strategy == AUTO else None,  # auto would choose
        "split_by": CLUSTERS if (plan.split or {}).get("by") == CLUSTERS else None,
        "top_k": plan.top_k,
        "mtp": plan.mtp,
        "strategy": None if plan.constants is not None else plan.strategy,
        "options": dict(plan.options),
        "sequential": plan.sequential or None,
        **_data(plan.calibration),
        "seed": plan.seed,
        "correct": correction["method"],
        "deterministic": correction.get("deterministic"),
        **{name: own["bake"].get(entry) for name, entry in BAKE.items() if "bake" in own},
        "recover": own.get("recover", {}).get("method"),
        "recover_steps": own.get("recover", {}).get("steps"),
        "recover_stream": own.get("recover", {}).get("stream") or None,
        "dtype": (plan.correction or own.get("bake") or own.get("recover") or {}).get("dtype"),
    }
    said = {name: value for name, value in content.items() if value is not None and value not in ([], {})}
    text: str = yaml.safe_dump(said, sort_keys=False, allow_unicode=True, default_flow_style=False, width=120)
    heading = f"# moe-compress compress --recipe recipe.yaml -o {first_output(plan, 'OUTPUT')}\n"
    if (plan.calibration or {}).get("only") is not None:  # the plan of one source of several takes two commands
        heading = "# One of the plans of: moe-compress plan --recipe recipe.yaml --per-source -o plan.json\n"
    further = [f"# {line}\n" for line in further_commands(plan, "OUTPUT") or ()]
    return ("".join([heading, *further]) + text).encode(errors="backslashreplace")


def _numbers(plan: CompressionPlan) -> dict[str, Any]:
    """How many experts stay, in each layer or in all, and whether constants stand for the others."""
    if plan.constants is None:
        return {"experts": plan.experts}
    budget, total = plan.constants.get("budget"), plan.constants.get("experts_total")
    given = {"experts": plan.experts} if budget == BUDGETS[0] else {"experts_total": total}
    return {**given, "budget": budget, "constants": True}


def _data(calibration: Mapping[str, Any] | None) -> dict[str, Any]:
    """Sources and sizes that a plan was made with; nothing where no data was read."""
    if calibration is None:
        return {}
    named, asked = without_folders(calibration), calibration.get("asked")
    entries = named.get("sources") or [{"source": named["source"]}]
    weights = [entry.get("weight", 1.0) for entry in entries]
    alike = all(weight == weights[0] for weight in weights) and not any("=" in entry["source"] for entry in entries)
    sources = [
        entry["source"] if alike else f"{entry['source']}={weight!r}"
        for entry, weight in zip(entries, weights, strict=True)
    ]
    sizes = asked if isinstance(asked, Mapping) else {}
    return {"calibration": sources, **{name: sizes.get(name) for name in ("samples", "sequence_length")}}


def read_recipe(path: Path) -> dict[str, Any]:
    """The fields of a recipe, each of the kind that it should be, its model and files found where the run had them.

    Raises `CompressionError` for a file that is too large or no YAML mapping, and for a field that is not known.
    """
    content = _read_yaml(path)
    hints = MODEL | {entry.name: get_type_hints(Request)[entry.name] for entry in fields(Request)}
    for name, value in content.items():
        if name not in hints:
            hint = did_you_mean(str(name), hints)
            raise CompressionError(f"{path} has no field {reprlib.repr(name)}; {hint}known are {', '.join(hints)}")
        if not _fits(value, hints[name]):
            raise CompressionError(f"{path}: {name} is {reprlib.repr(value)}, it should be {_kind(hints[name])}")
    return _found_again(path, content)


def _read_yaml(path: Path) -> dict[Any, Any]:
    if not path.is_file():
        raise CompressionError(f"--recipe {path} is not a file; name a recipe.yaml")
    if path.stat().st_size > MOST_BYTES:
        raise CompressionError(f"{path} is larger than 1 MB, so it is no recipe; name a recipe.yaml")
    try:
        text = path.read_text(encoding="utf-8-sig")
        _refuse_mazes(path, text)
        content = yaml.load(text, Loader=LOADER)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise CompressionError(f"{path} is not valid YAML ({reason_of(error, 200)}); mend it") from error
    if not isinstance(content, dict):
        raise CompressionError(f"{path} should hold a mapping of fields, such as 'experts: 4'")
    return content


def _refuse_mazes(path: Path, text: str) -> None:
    """Refuse YAML that takes time or stack out of all proportion: repeated parts, deep nesting, endless words."""
    depth = 0
    for number, event in enumerate(yaml.parse(text, Loader=LOADER)):
        if isinstance(event, yaml.AliasEvent):
            raise CompressionError(f"{path} repeats a part by an alias (*); write it out")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MOST_DEPTH:
            raise CompressionError(f"{path} is nested deeper than {MOST_DEPTH} lists or mappings; mend it")
        if number > MOST_PARTS or (isinstance(event, yaml.ScalarEvent) and len(event.value) > MOST_LETTERS):
            raise CompressionError(
                f"{path} has more than {MOST_PARTS:,} parts or a word of over {MOST_LETTERS:,} letters, so it is no "
                "recipe; name a recipe.yaml"
            )


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value read from YAML is of the kind that a field's annotation names."""
    if get_origin(hint) in (Union, UnionType):
        return any(_fits(value, each) for each in get_args(hint))
    if get_origin(hint) is Sequence:
        return isinstance(value, list) and all(_fits(entry, get_args(hint)[0]) for entry in value)
    if get_origin(hint) is Mapping:
        return isinstance(value, dict) and all(isinstance(name, str) and _plain(each) for name, each in value.items())
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and _plain(value)
    return isinstance(value, hint) and (hint is bool or not isinstance(value, bool)) and _plain(value)


def _plain(value: Any) -> bool:
    """Whether a value could stand in JSON; no text with a NUL, which no file's name can hold, and no endless number."""
    if isinstance(value, list | dict):
        return all(map(_plain, value)) and (isinstance(value, list) or all(map(_plain, value.values())))
    if isinstance(value, str):
        return "\0" not in value
    return value is None or (isinstance(value, int) and value.bit_length() < 64) or isinstance(value, float)


def _kind(hint: Any) -> str:
    """An annotation in words."""
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(dict.fromkeys(_kind(each) for each in get_args(hint) if each is not type(None)))
    if get_origin(hint) is Sequence:
        return "a list"
    return KINDS[get_origin(hint) or hint]


def _found_again(path: Path, content: dict[str, Any]) -> dict[str, Any]:
    """The recipe of an output with the folders that the run's record on this machine knows."""
    record = read_record(path.parent)
    if record is None:
        return content
    known = (record.calibration or {}).get("sources")
    texts = [str(entry["source"]) for entry in known or () if isinstance(entry, dict) and "source" in entry]
    places = {Path(text).name: text for text in texts if is_file(text)}
    found = dict(content)
    if os.path.isdir(record.source) and content.get("model") == Path(record.source).name:
        found["model"] = record.source
    if isinstance(sources := content.get("calibration"), list):
        found["calibration"] = [_in_place(source, places) for source in sources]
    return found


def _in_place(source: str, places: Mapping[str, str]) -> str:
    name, sign, weight = source.rpartition("=")
    return places.get(source) or (f"{places[name]}={weight}" if sign and name in places else source)


def refuse_missing(path: Path, content: Mapping[str, Any]) -> None:
    """Refuse a model's folder or a text that a recipe names and that is not there, saying how to name it."""
    model, sources = content.get("model"), content.get("calibration") or []
    if model is not None and content.get("revision") is None and "/" not in model and not os.path.exists(model):
        raise CompressionError(f"{path} names the model {model!r}, which is no folder here; name it as MODEL")
    for source in [sources] if isinstance(sources, str) else sources:
        name = source.rpartition("=")[0] or source
        if not any(map(is_file, (source, name))) and Path(name).suffix in TEXT_SUFFIXES and not Path(name).is_dir():
            raise CompressionError(f"{path} names the text {name}, which is not here; name it with --calibration")
