"""Recipes: model, text, steps, gate and output as YAML, written beside every output and read by
`compress`.

A recipe is made from the plan alone, so that `compress`, and `plan` with `apply`, leave the same
bytes. Like compression.json it names no folder; on the machine that made the output, the record of
the run knows them."""

import json
import os
import reprlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from compressor.data.sources import (
    GIVEN,
    SourceSpec,
    absent_text,
    local_name,
    refuse_absent_texts,
    without_folders,
)
from compressor.entry_points import EXPORTERS, STEPS, load, load_installed
from compressor.errors import CompressionError
from compressor.extras import TASKS, require
from compressor.files import refuse_absent
from compressor.formatting import did_you_mean
from compressor.model.loaded import LoadedModel
from compressor.options import Names, NBytes, Options, separated, validated
from compressor.plain_yaml import read_yaml, yaml_text
from compressor.quality_gate.options import GateOptions
from compressor.recipe.step import StepOptions, TextOptions
from compressor.recipe.steps_plan import Plan
from compressor.records import Json
from compressor.run_record import read_record

RECIPE = "recipe.yaml"
SAFETENSORS = "safetensors"  # the format that a run writes, and that every exporter reads
MONE = "mone"  # the same with constants in the place of experts
BUILT_IN = (SAFETENSORS, MONE)
YAML_ORDER = (
    "model",
    "revision",
    "base",
    "base_revision",
    "calibration",
    "seed",
    "dtype",
    "steps",
    "gate",
    "output",
)
# of steps that options add
USUAL_ORDER = ("prune", "constants", "routers", "distill", "quantize")
# names of options of `compress`, in Python and on the command line, for paths in the recipe; a
# field of prune is named by itself
SHORT_NAMES = {
    "deterministic": "prune.correct.deterministic",
    "experts_total": "constants.experts_total",
    "budget": "constants.budget",
    "routers": "routers.method",
    "distill": "distill.train",
    "quantize": "quantize.scheme",
}
COUNTS = ("experts", "ratio", "experts_total")  # of which a step takes one


class OutputOptions(Options):
    """Options of the output: its formats, and where it is published."""

    formats: tuple[str, ...] = Field(("safetensors",), min_length=1)
    """safetensors, onnx or mone. Several are comma-separated: safetensors,onnx writes ONNX to the
    subfolder onnx. mone replaces dropped experts by constants, which vLLM serves. Exporters add
    formats."""
    max_shard_bytes: int | None = Field(None, ge=1)
    """Largest weight file, in bytes; a tensor is never cut."""
    # which changes no weight, so that no recipe of an output holds it
    evaluate: bool = Field(True, exclude=True)
    """Compare the output with its base on held-out text: loss, KL and flips."""
    golden_answers: bool = Field(True, exclude=True)
    """Keep answers in the output by which `moe-compress check` knows the model anywhere."""
    # what publishes an output is no part of its recipe
    push_to_hub: str | None = Field(None, exclude=True)
    """Publish on the Hub as NAMESPACE/NAME. With a gate only if it passes."""
    private: bool = Field(False, exclude=True)
    """Publish to a private repository."""

    _split = field_validator("formats", mode="before")(separated)

    @model_validator(mode="after")
    def _named(self) -> Self:
        if self.private and self.push_to_hub is None:
            raise ValueError("--private goes with --push-to-hub; name the repository")
        return self


class Fit(Options):
    """The share of the experts, and number formats by layer, that cost least in so many bytes."""

    bytes: NBytes
    """Bytes of all tensors: 16GB, 500MB, 2.5GiB or a number."""
    servers: Names = ()
    """Only formats that these load: vllm, sglang, llama.cpp, transformers."""


class ModelOptions(Options):
    """Options of the model: its revision, device and dtype."""

    revision: str | None = None
    """Branch, tag or commit of a Hub id."""
    dtype: str = "auto"
    """Computing dtype: auto (the checkpoint's), float32, bfloat16 or float16."""


Resident = Annotated[  # of YAML's yes and no, which are true and false there
    Literal["auto", "yes", "no"],
    BeforeValidator(lambda value: ("no", "yes")[value] if isinstance(value, bool) else value),
]
RESIDENT: Any = Field(
    "auto",
    exclude=True,
    description="Keep the model on the device: yes, no (a layer at a time), or auto, if it fits.",
)


class Recipe(ModelOptions):
    """Everything that decides an output."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    model: str | LoadedModel | None = None
    base: str | None = None
    """Model to compare the result with (default: the model)."""
    base_revision: str | None = None
    """Branch, tag or commit of the base."""
    calibration: TextOptions = TextOptions()
    seed: int = Field(0, ge=0, lt=2**63)
    """Seed of all random draws, such as calibration text."""
    resident: Resident = RESIDENT
    # chosen by `compress`, before all else: no recipe of an output holds it
    fit: Fit | None = Field(None, exclude=True)
    steps: tuple[StepOptions, ...] = ()
    gate: GateOptions | None = None
    output: OutputOptions = OutputOptions()

    def check_installed(self) -> None:
        """Refuse a package, plugin or text that a run of it takes and that is not here; of plugins
        only exporters are loaded."""
        packages = list[str]()
        for step in self.steps:
            step.check_installed()
        if self.gate is not None and (self.gate.tasks or self.gate.baseline):
            packages += TASKS
        if self.output.push_to_hub is not None:
            packages.append("matplotlib")  # for the card's pictures
        require(*packages)
        for name in self.output.formats:
            if name not in BUILT_IN:
                load_installed(EXPORTERS, name)
        for step in self.steps:
            # a strategy of another name, and a correction that it decides on, may read no text
            correct = getattr(step, "correct", None)
            refits = correct is not None and correct.method in ("ridge", "tune")
            reads = refits or getattr(step, "strategy", None) == "auto"
            text = step.calibration or (self.calibration if reads else None)
            refuse_absent_texts((text and text.data) or ())
        if self.gate is not None:
            refuse_absent_texts(self.gate.prompts, "prompts")
            refuse_absent_texts(self.gate.text, "text")
        for model in (self.model, self.base):
            refuse_absent(model)

    @field_validator("steps", mode="plain")
    @classmethod
    def _read_steps(cls, value: Any) -> tuple[StepOptions, ...]:
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise ValueError("steps should be a list, such as [prune: {ratio: 0.25}]")
        return tuple(_step(entry, number) for number, entry in enumerate(value))

    @classmethod
    def of(cls, content: Json, where: str = "the recipe") -> Self:
        """A recipe from plain values; raises `CompressionError` naming the place of what is
        wrong."""
        return validated(cls, content, where, f"{where} has no field")


def step_class(name: str, location: str = "") -> type[StepOptions]:
    """Return the options of a step by its name; raises `CompressionError` for one that is not
    installed, or is none."""
    kind = load(STEPS, name, location)
    if (
        not (isinstance(kind, type) and issubclass(kind, StepOptions))
        or getattr(kind, "name", None) != name
    ):
        message = f"its entry point should be a StepOptions whose `name` is {name!r}"
        raise CompressionError(f"step {name!r} is no plugin: {message}")
    return kind


def make_step(name: str, options: Json, location: str = "") -> StepOptions:
    """Return a step with these options; raises `CompressionError` naming the option that is unknown
    or impossible."""
    where, at = (f"{location}: {name}", f" at {location}") if location else (name, "")
    return validated(step_class(name, location), options, where, f"step {name} has no option", at)


def _step(entry: Any, number: int) -> StepOptions:
    if isinstance(entry, StepOptions):
        return entry
    location = f"steps[{number}]"
    if isinstance(entry, str):
        return make_step(entry, {}, location)
    if isinstance(entry, Mapping) and len(entry) == 1:
        ((name, options),) = entry.items()
        if isinstance(name, str) and isinstance(options, Mapping | None):
            return make_step(name, options or {}, location)
    shown = reprlib.repr(entry)
    raise CompressionError(
        f"{location} is {shown}; it should be one step, such as 'prune: {{ratio: 0.25}}'"
    )


def default_steps(constants: bool = False, **options: Any) -> tuple[StepOptions, ...]:
    """Return the steps of `compress` where only options are given: prune, and more where options
    name them.

    Options are fields of prune or those in `SHORT_NAMES`; those of a step may come in a mapping:
    `distill={"steps": 100}`. `constants` replaces experts by constants. Where `quantize` is named
    and no option of prune, nothing is pruned.
    """
    values = dict[str, Any]()
    for name, value in options.items():
        path = SHORT_NAMES.get(name, f"prune.{name}")
        if isinstance(value, Mapping) and path.startswith(f"{name}."):
            values |= {f"{name}.{field}": inner for field, inner in value.items()}
        elif value is not None:
            values[path] = value
    return with_values(Recipe(steps=first_steps(values, constants)), values).steps


def first_steps(values: Json, constants: bool) -> tuple[StepOptions, ...]:
    """Return the steps that these values, by path, change: prune, as it is by default, unless only
    a quantisation is asked for, or constants."""
    if constants:
        return (make_step("constants", {}),)
    named = {path.partition(".")[0] for path in values}
    if "quantize" in named and "prune" not in named:
        return ()
    return (make_step("prune", {"split": "auto", "correct": "auto"}),)


def with_values(recipe: "Recipe", values: Json) -> "Recipe":
    """Return the recipe with these values, by path, such as `prune.correct.steps`; a step that it
    lacks is put in its usual place.

    Raises `CompressionError` for a path that leads nowhere, and for an impossible value.
    """
    names = [step.name for step in recipe.steps]
    if "constants" not in names and any(path.startswith("constants.") for path in values):
        raise CompressionError(
            "--budget and --experts-total: layers can keep different numbers of experts only with "
            "constants, which vLLM serves; pass --format mone, or leave them out"
        )
    content = dict(recipe)
    of_steps = dict[str, dict[str, Any]]()
    for path, value in sorted(values.items(), key=lambda entry: entry[0].count(".")):
        head, _, field = path.partition(".")
        if head in Recipe.model_fields and head != "steps":
            content = _with(content, path, value)
            continue
        if not field:
            known = [name for name in Recipe.model_fields if name != "steps"]
            raise CompressionError(
                f"--set {path!r} names no option of a step; {did_you_mean(head, known)}write "
                "step.option=value"
            )
        step_class(head)  # which refuses an unknown name
        if head == "prune" and "constants" in names and head not in names:
            head = "constants"  # which has the same names
        if names.count(head) > 1:
            raise CompressionError(
                f"the recipe has {names.count(head)} steps {head}; change the one that is meant in "
                "the file"
            )
        of_steps.setdefault(head, {})[field] = value
    steps = list(recipe.steps)
    for name, given in of_steps.items():
        options = steps[names.index(name)].model_dump() if name in names else {}
        if given.keys() & COUNTS:
            options |= dict.fromkeys({*COUNTS} & options.keys())
        if "strategy" in given and "options" in options:
            options["options"] = {}  # the recipe's were another strategy's
        for field, value in given.items():
            options = _with(options, field, value)
        if name in names:
            steps[names.index(name)] = make_step(name, options)
            continue
        later = USUAL_ORDER[USUAL_ORDER.index(name) + 1 :] if name in USUAL_ORDER else ()
        place = next((i for i, step in enumerate(steps) if step.name in later), len(steps))
        steps.insert(place, make_step(name, options))
        names.insert(place, name)
    return Recipe.of({**content, "steps": steps}, "the command line")


def _with(options: Json, path: str, value: Any) -> dict[str, Any]:
    """Return the options with a value at a path; `correct: ridge` is short for its method."""
    name, _, inner = path.partition(".")
    old = options.get(name)
    below = dict(old) if isinstance(old, BaseModel | Mapping) else {}
    if inner:
        return {**options, name: _with(below, inner, value)}
    if name == "correct" and isinstance(value, str):
        return {**options, name: {**below, "method": value}}
    return {**options, name: value}


def recipe_yaml(recipe: Recipe) -> bytes:
    """Return the recipe as YAML, without defaults; sizes of the calibration text are always
    there."""
    content = recipe.model_dump(mode="json", exclude_defaults=True, exclude={"steps"})
    content["calibration"] = recipe.calibration.model_dump(mode="json", exclude_none=True)
    content["steps"] = []
    for step in recipe.steps:
        options = step.model_dump(mode="json", exclude_defaults=True)
        correct = options.get("correct")
        if correct and correct.keys() == {"method"}:
            options["correct"] = correct["method"]
        content["steps"].append({step.name: options} if options else step.name)
    gate = content.get("gate", {})
    for name in gate.keys() & {"prompts", "text", "answers"}:
        gate[name] = [local_name(source) for source in gate[name]]
    stated = {name: content[name] for name in YAML_ORDER if content.get(name)}
    heading = ""
    if f"{GIVEN}:" in json.dumps([content["calibration"], content["steps"]]):
        heading = (
            "# Calibration text given in Python is named by a digest alone, so this file "
            "cannot repeat it.\n"
        )
    return (heading + yaml_text(stated)).encode(errors="backslashreplace")


def read_recipe(path: Path) -> Recipe:
    """Read a recipe file, its model and texts located where the run had them.

    Raises `CompressionError` for a file that is no YAML mapping, and for a field, step or option
    that is not known, with its place."""
    if not path.is_file():
        raise CompressionError(f"{path} is not a file; name a recipe.yaml")
    content = read_yaml(path, str(path))
    if not isinstance(content, dict):
        raise CompressionError(f"{path} should hold a mapping of fields, such as 'experts: 4'")
    return Recipe.of(_found_again(path, content), str(path))


def _found_again(path: Path, content: dict[str, Any]) -> dict[str, Any]:
    """Return the recipe of an output with the folders that the run's record on this machine
    knows."""
    record = read_record(path.parent)
    if record is None:
        return content
    known = (record.calibration or {}).get("sources", ())
    texts = [str(entry["source"]) for entry in known]
    paths = {
        local_name(text): text for text in texts if os.path.exists(SourceSpec.parse(text).name)
    }

    def in_place(source: str) -> str:
        name, _, weight = source.rpartition("=")
        return f"{paths[name]}={weight}" if name in paths else paths.get(source, source)

    located = dict(content)
    for field, location in (("model", record.source), ("base", record.base)):
        if location and os.path.isdir(location) and content.get(field) == Path(location).name:
            located[field] = location
    text = content.get("calibration")
    if isinstance(text, dict) and isinstance(text.get("data"), list):
        located["calibration"] = {
            **text,
            "data": [in_place(str(source)) for source in text["data"]],
        }
    return located


def refuse_missing(path: Path, recipe: Recipe) -> None:
    """Refuse a model's folder or a text that a recipe names and that is not there, saying how to
    name it."""
    for what, name, revision in (
        ("model", recipe.model, recipe.revision),
        ("base", recipe.base, recipe.base_revision),
    ):
        if (
            isinstance(name, str)
            and revision is None
            and "/" not in name
            and not os.path.exists(name)
        ):
            hint = f"add --set {what}=FOLDER"
            raise CompressionError(
                f"{path} names the {what} {name!r}, which is no folder here; {hint}"
            )
    text = absent_text(recipe.calibration.data or ())
    if text is not None:
        raise CompressionError(
            f"{path} names the text {text}, which is not here; name it with --calibration"
        )


def on_text(name: str, options: dict[str, Any], text: TextOptions) -> StepOptions:
    """Return a step with a text of its own, so that the plan of its output goes on with earlier
    ones."""
    if text.data is not None or text.emphasis is not None:
        options = {**options, "calibration": text}
    return make_step(name, options)


def text_options(calibration: Json | None) -> TextOptions:
    """Sources and sizes that a text was read with, folders left out; the default where none was."""
    if calibration is None:
        return TextOptions()
    named = without_folders(calibration)
    entries = named.get("sources") or [{"source": named["source"]}]
    weights = [entry.get("weight", 1.0) for entry in entries]
    alike = all(weight == weights[0] for weight in weights) and not any(
        "=" in entry["source"] for entry in entries
    )
    sources = [
        entry["source"] if alike else f"{entry['source']}={weight!r}"
        for entry, weight in zip(entries, weights, strict=True)
    ]
    requested = calibration.get("asked")
    sizes = requested if isinstance(requested, Mapping) else {}
    options = {name: sizes[name] for name in ("samples", "sequence_length") if sizes.get(name)}
    emphasis = calibration.get("emphasis")
    if isinstance(emphasis, Mapping):
        options["emphasis"] = {name: entry.get("weight") for name, entry in emphasis.items()}
    return TextOptions(data=tuple(sources), **options)


def recipe_of_plan(plan: Plan) -> Recipe:
    """Return the recipe that a plan was made by, its source as the plan names it."""
    steps = [
        make_step(entry.name, entry.options, f"steps[{number}]")
        for number, entry in enumerate(plan.steps)
    ]
    content = {
        "model": plan.source.model,
        "revision": plan.source.revision,
        "seed": plan.seed,
        "dtype": plan.dtype,
    }
    if plan.base is not None:
        content |= {"base": plan.base.model, "base_revision": plan.base.revision}
    return Recipe.of(
        {**content, "steps": steps, "calibration": text_options(plan.calibration)}, "the plan"
    )
