"""The plan: the recipe's steps with what each decided and, after the run, what came of it; JSON to read and edit.

A plan and its source checkpoint are enough to rebuild the output bit for bit.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, reduce
from itertools import groupby
from pathlib import Path
from typing import Any, Self

from compressor.errors import CompressionError
from compressor.files import alone, json_object, replacing
from compressor.formatting import distinct
from compressor.recipe.plan import KEPT_WHOLE, LAYER_FACTS, CompressionPlan, Group, LayerPlan, Source
from compressor.records import plain_json, read_as, read_json, readable_json, value_as

FORMAT = "moe-compressor-plan/2"
SPLIT, PRUNE, CONSTANTS, CORRECT, QUANTIZE = "split", "prune", "constants", "correct", "quantize"
MOST_STEPS = 100
MOST_LAYERS, MOST_EXPERTS = 2**10, 2**12  # of a model, and of a layer: more than any has
MOST_IN_ALL = 2**17  # experts of all layers, few enough to list and to draw
MOST_FIGURES = 100  # names in a layer's figures, and in whatever else a page shows one by one
NOT_DECISIVE = ("neurons", "calibration")  # of a split: the digest of the order stands for both
DECISIONS = frozenset(
    ("experts", "protected", "top_k", "mtp", "layers", "budget", "figures", "experts_total", "format")
)  # of prune and constants


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """A step as the plan has it: its options, what it decided, what came of it. None: not yet."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    plan: Mapping[str, Any] | None = None
    result: Mapping[str, Any] | None = None
    text: Mapping[str, Any] | None = None  # identity of a text of its own
    stage: int = 0  # number of its stage: layerwise steps that are done together, or one on the whole model

    def __post_init__(self) -> None:
        few(self.options, "options")

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types, without what is not there."""
        found = {"name": self.name, "options": dict(self.options), "stage": self.stage}
        more = {"plan": self.plan, "result": self.result, "text": self.text}
        return found | {name: dict(value) for name, value in more.items() if value is not None}


@dataclass(frozen=True)
class Plan:
    """What was or shall be done to a source checkpoint, step by step, with its provenance."""

    source: Source
    steps: tuple[PlannedStep, ...]
    calibration: Mapping[str, Any] | None = None  # identity of the text: sources, sizes, digests; None: none was read
    seed: int = 0
    dtype: str = "auto"  # for computing
    versions: Mapping[str, str] = field(default_factory=dict)
    base: Source | None = None  # what the result is compared with and trained toward, where that is not the source

    def __post_init__(self) -> None:
        if self.calibration is not None and not isinstance(self.calibration.get("source"), str):
            raise CompressionError("calibration should name its source; restore it, or write null if no data was read")
        for stage in self.stages:  # which check themselves
            self.staged(stage)

    @cached_property
    def stages(self) -> tuple[tuple[int, ...], ...]:
        """Numbers of the steps of each stage: layerwise ones that follow each other, or one on the whole model."""
        numbers = groupby(range(len(self.steps)), key=lambda number: self.steps[number].stage)
        return tuple(tuple(group) for _, group in numbers)

    def staged(self, numbers: Sequence[int]) -> CompressionPlan | None:
        """What the layerwise steps of a stage do to every expert; None where it is not decided, or of another kind."""
        by_name = {self.steps[number].name: self.steps[number] for number in numbers}
        chosen = by_name.get(PRUNE) or by_name.get(CONSTANTS)
        if chosen is None or chosen.plan is None:
            return None
        decided, options, where = chosen.plan, chosen.options, f"the plan of {chosen.name}"
        if unknown := sorted(decided.keys() - DECISIONS):
            known = ", ".join(sorted(DECISIONS))
            raise CompressionError(f"{where} has an unknown field {unknown[0]!r}; known are {known}")
        if missing := sorted({"experts", "layers"} - set(decided)):
            raise CompressionError(f"{where} has no {missing[0]!r}; restore it or plan again")
        _refuse_crowds(decided["layers"])
        refit = by_name.get(CORRECT)
        constants = correction = None
        if chosen.name == CONSTANTS:
            named = {name: decided[name] for name in ("format", "budget", "experts_total")}
            constants = {**named, "dtype": self.dtype, **(decided.get("figures") or {})}
        if refit is not None:
            refitted = {name: value for name, value in refit.options.items() if name != "calibration"}
            correction = {**refitted, "dtype": self.dtype}
        protected = value_as(decided.get("protected", {}), Mapping[str, tuple[int, ...]], "protected")
        return CompressionPlan(
            source=self.source,
            experts=value_as(decided["experts"], int, "experts"),
            strategy=str(options.get("strategy", chosen.name)),
            options=dict(options.get("options") or {}),
            calibration=self.calibration,
            layers=tuple(layer_from_dict(entry) for entry in decided["layers"]),
            seed=self.seed,
            sequential=bool(options.get("sequential")),
            correction=correction,
            protected={module: tuple(sorted(set(experts))) for module, experts in protected.items()},
            mtp=decided.get("mtp"),
            constants=constants,
            split=_split_by(by_name.get(SPLIT)),
            top_k=decided.get("top_k"),
        )

    @cached_property
    def stage(self) -> CompressionPlan:
        """What becomes of the source's experts over all stages together, for those who show it."""
        plans = [plan for stage in self.stages if (plan := self.staged(stage)) is not None]
        if plans:
            return reduce(_composed, plans)
        split = next((split for step in self.of(SPLIT) if (split := _split_by(step))), None)
        experts = 0 if split is None else int(split["experts"]) * int(split["parts"])
        return CompressionPlan(self.source, experts, KEPT_WHOLE, {}, self.calibration, (), split=split)

    def of(self, name: str) -> tuple[PlannedStep, ...]:
        """All steps of a name, in order."""
        return tuple(step for step in self.steps if step.name == name)

    def with_entry(self, number: int, **changes: Any) -> "Plan":
        changed = replace(self.steps[number], **changes)
        return replace(self, steps=(*self.steps[:number], changed, *self.steps[number + 1 :]))

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types, in the file's order."""
        return {
            "format": FORMAT,
            "source": asdict(self.source),
            **({} if self.base is None else {"base": asdict(self.base)}),
            "seed": self.seed,
            "dtype": self.dtype,
            "calibration": None if self.calibration is None else dict(self.calibration),
            "versions": dict(self.versions),
            "steps": [step.to_dict() for step in self.steps],
        }

    def to_json(self) -> str:
        """Indented JSON with short lists on one line each."""
        return readable_json(self.to_dict())

    def digest(self) -> str:
        """SHA-256 of what decides the output: source, text, and each step's options and decisions."""
        steps = []
        for step in self.steps:
            decided = {name: value for name, value in (step.plan or {}).items() if name not in NOT_DECISIVE}
            if "layers" in decided:
                decided["layers"] = [[layer["groups"], layer.get("constants")] for layer in decided["layers"]]
            steps.append([step.name, dict(step.options), decided, (step.text or {}).get("sha256")])
        data = {name: (self.calibration or {}).get(name) for name in ("sha256", "heldout", "only")}
        facts = {"source": self.source.fingerprint, "steps": steps, "seed": self.seed, "text": data}
        if self.base is not None:
            facts["base"] = self.base.fingerprint
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()

    @classmethod
    def from_dict(cls, content: Mapping[str, Any], where: str = "plan") -> Self:
        """Read a plan back; raises `CompressionError` saying what is missing, unknown or impossible."""
        if content.get("format") != FORMAT:
            raise CompressionError(f"{where}: format is {content.get('format')!r}, this version reads {FORMAT!r}")
        try:
            if not isinstance(steps := content.get("steps"), list) or len(steps) > MOST_STEPS:
                raise CompressionError(f"steps should be a list of at most {MOST_STEPS}; restore it")
            few(content.get("versions"), "versions")
            for text in (content.get("calibration"), *(each.get("text") for each in steps if isinstance(each, dict))):
                few(text, "calibration")
                few(text.get("sources") if isinstance(text, dict) else None, "calibration's sources")
            return read_as(cls, {name: value for name, value in content.items() if name != "format"}, closed=True)
        except CompressionError as error:
            raise CompressionError(f"{where}: {error}") from error
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise CompressionError(f"{where} is not built like a plan ({error!r}); restore it or plan again") from error

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a plan file; raises `CompressionError` if it is missing, no JSON, or impossible."""
        content = read_json(path, "mend it or plan again", "name a plan file")
        if not isinstance(content, dict):
            raise CompressionError(f"{path} should hold a JSON object; plan again")
        return cls.from_dict(content, str(path))


def _split_by(step: PlannedStep | None) -> dict[str, Any] | None:
    """What a step has decided on parts of experts; None where they stay whole, or it has decided nothing."""
    return None if step is None or step.plan is None or step.plan.get("parts") == 1 else dict(step.plan)


def layer_to_dict(plan: LayerPlan) -> dict[str, Any]:
    usual = ("scale", 1.0), ("head", None)  # which a plan need not repeat
    groups = [
        {name: value for name, value in plain_json(each).items() if (name, value) not in usual} for each in plan.groups
    ]
    facts = ("module", "layer", *(LAYER_FACTS if plan.routing_groups > 1 else ("experts", "top_k")))
    return {
        **{name: getattr(plan, name) for name in facts},
        "groups": groups,
        "dropped": list(plan.dropped),
        **({"constants": list(plan.constants)} if plan.constants else {}),
        "upstream": plan.upstream,
        "decided_by": plan.decided_by,
        "figures": dict(plan.figures),
    }


def layer_from_dict(entry: Any) -> LayerPlan:
    """A layer's plan from JSON; raises `CompressionError` naming the layer and what is wrong."""
    if not isinstance(entry, dict):
        raise CompressionError(f"layers: {entry!r} stands where an object should")
    module = str(entry.get("module", "layers"))
    if value_as(entry.get("experts"), int, f"{module}.experts") > MOST_EXPERTS:
        raise CompressionError(f"{module}: {entry['experts']} experts are more than any layer has; restore it")
    few(entry.get("figures"), f"{module}: figures")
    content = {name: value for name, value in entry.items() if name != "dropped"}
    if isinstance(entry.get("constants"), list):
        content["constants"] = sorted(set(entry["constants"]))
    if isinstance(groups := entry.get("groups"), list):  # routers merge like weights unless the plan says otherwise
        content["groups"] = [
            {"router_coefficients": group.get("coefficients"), **group} if isinstance(group, dict) else group
            for group in groups
        ]
    try:
        plan = read_as(LayerPlan, content, closed=True)
    except CompressionError as error:
        raise CompressionError(str(error) if str(error).startswith(module) else f"{module}: {error}") from error
    grouped = plan.slots()
    for expert in entry.get("dropped") or ():
        if expert in grouped:
            fault = "is in a group and in 'dropped'; take it out of one of them"
            raise CompressionError(f"{module}: expert {expert} {fault}")
        if expert not in range(plan.experts):
            fault = f"which does not exist; experts are numbered 0 to {plan.experts - 1}"
            raise CompressionError(f"{module}: 'dropped' names expert {expert!r}, {fault}")
    return plan


def _refuse_crowds(layers: Any) -> None:
    if not isinstance(layers, list):
        return
    if len(layers) > MOST_LAYERS:
        raise CompressionError(f"{len(layers):,} layers are more than any model has; restore the plan")
    counts = (entry.get("experts") for entry in layers if isinstance(entry, dict))
    if sum(count for count in counts if isinstance(count, int) and 0 < count <= MOST_EXPERTS) > MOST_IN_ALL:
        raise CompressionError(f"its layers have more than {MOST_IN_ALL:,} experts together; restore the plan")


def few(content: Any, name: str) -> Any:
    """Return the object or list, refusing one with more entries than a plan's may have."""
    if isinstance(content, Mapping | Sequence) and not isinstance(content, str) and len(content) > MOST_FIGURES:
        raise CompressionError(f"{name}: {len(content):,} entries are more than {MOST_FIGURES}; take some out")
    return content


def decisions(plan: CompressionPlan) -> dict[str, Any]:
    """What a stage's prune or constants step decided, as its entry in the plan has it."""
    protected = {name: list(experts) for name, experts in plan.protected.items()}
    optional = {"protected": protected or None, "top_k": plan.top_k, "mtp": plan.mtp}
    return {
        "experts": plan.experts,
        **{name: value for name, value in optional.items() if value is not None},
        "layers": [layer_to_dict(layer) for layer in plan.layers],
    }


def _composed(first: CompressionPlan, second: CompressionPlan) -> CompressionPlan:
    """What two stages do one after the other, in terms of the first one's experts."""
    before = {layer.module: layer for layer in first.layers}

    def group(layer: LayerPlan, after: Group) -> Group:
        shares = zip(after.members, after.coefficients, after.router_coefficients, strict=True)
        parts = [(layer.groups[slot], share, routed) for slot, share, routed in shares]
        members = [member for own, _, _ in parts for member in own.members]
        mixed = [share * c for own, share, _ in parts for c in own.coefficients]
        routed = [share * c for own, _, share in parts for c in own.router_coefficients]
        scale = after.scale * (parts[0][0].scale if len(parts) == 1 else 1.0)
        return Group(tuple(members), tuple(mixed), tuple(routed), scale)

    layers = list[LayerPlan]()
    for layer in second.layers:
        if (own := before.get(layer.module)) is not None:
            groups = sorted((group(own, after) for after in layer.groups), key=lambda each: min(each.members))
            later = {name: getattr(layer, name) for name in ("upstream", "decided_by", "figures")}
            layer = replace(own, groups=tuple(groups), constants=(), **later)
        layers.append(layer)
    return replace(second, layers=tuple(layers), protected=first.protected, split=first.split)


def source_files(output: Path, sources: Sequence[str]) -> list[Path]:
    """plan.json, [wiki, org/code] -> plan.wiki.json, plan.org-code.json; numbered where two would be equal."""
    names = distinct(re.sub(r"[^\w.-]+", "-", source) for source in sources)
    return [output.with_name(f"{output.stem}.{name}{output.suffix}") for name in names]


def check_files(paths: Sequence[Path], overwrite: bool) -> None:
    """Refuse files that exist, that `overwrite` must not replace because they are no plans, or that have no folder."""
    for path in paths:
        if path.exists() and not overwrite:
            raise CompressionError(f"{path} exists already; name another file or pass --overwrite")
        if path.exists() and not str(json_object(path).get("format", "")).startswith("moe-compressor-plan/"):
            raise CompressionError(f"{path} is not a plan, so --overwrite will not replace it; name another file")
        if not path.parent.is_dir():
            raise CompressionError(f"{path.parent} does not exist; create it or name another file")


def write_plans(paths: Sequence[Path], plans: Sequence[Plan]) -> None:
    """Write each plan to its file, replacing what is there once all are complete; a fault leaves no new file."""
    absent = [path for path in paths if not path.exists()]
    try:
        with ExitStack() as complete:  # none is put in place before the last is written
            for path, plan in zip(paths, plans, strict=True):
                work = complete.enter_context(alone(path))
                fresh = complete.enter_context(replacing(path, work / path.name))
                fresh.write_text(plan.to_json(), encoding="utf-8")
    except BaseException:
        for path in absent:
            path.unlink(missing_ok=True)
        raise
