"""The plan: the recipe's steps with what each decided and, after the run, what came of it; JSON to read and edit.

A plan and its source checkpoint are enough to rebuild the output bit for bit.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any, Self

from compressor.errors import CompressionError
from compressor.recipe.layer import Group, LayerPlan
from compressor.recipe.plan import CompressionPlan, Source
from compressor.recipe.plan_json import (
    few,
    field_names,
    integer,
    layer_from_dict,
    layer_to_dict,
    protected_from_dict,
    readable_json,
    refuse_crowds,
    refuse_unknown,
)
from compressor.records import read_json

FORMAT = "moe-compressor-plan/2"
SPLIT, PRUNE, CONSTANTS, CORRECT = "split", "prune", "constants", "correct"
KEPT_WHOLE = "none"  # the strategy of a stage that drops and merges nothing
MOST_STEPS = 100
NOT_DECISIVE = ("neurons", "calibration")  # of a split: the digest of the order stands for both
PRUNED = ("experts", "protected", "top_k", "mtp", "upstream", "layers", "budget")


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """A step as the plan has it: its options, what it decided, what came of it. None: not yet."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    plan: Mapping[str, Any] | None = None
    result: Mapping[str, Any] | None = None
    text: Mapping[str, Any] | None = None  # identity of a text of its own
    stage: int = 0  # number of its stage: layerwise steps that are done together, or one on the whole model

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types, without what is not there."""
        found: dict[str, Any] = {"name": self.name, "options": dict(self.options)}
        found["stage"] = self.stage
        more = {"plan": self.plan, "result": self.result, "text": self.text}
        return found | {name: dict(value) for name, value in more.items() if value is not None}

    @classmethod
    def from_dict(cls, entry: Any, where: str) -> Self:
        """Read one back; raises `CompressionError` naming what is wrong."""
        refuse_unknown(entry, field_names(PlannedStep), where)
        if not isinstance(entry.get("name"), str):
            raise CompressionError(f"{where} has no name; restore it")
        for name in ("options", "plan", "result", "text"):
            if not isinstance(entry.get(name), Mapping | None):
                raise CompressionError(f"{where}: {name} should be an object; restore it")
        few(entry.get("options"), f"{where}: options")
        return cls(
            entry["name"],
            dict(entry.get("options") or {}),
            entry.get("plan"),
            entry.get("result"),
            entry.get("text"),
            integer(entry.get("stage", 0), f"{where}: stage"),
        )


@dataclass(frozen=True)
class Plan:
    """What was or shall be done to a source checkpoint, step by step, with its provenance."""

    source: Source
    steps: tuple[PlannedStep, ...]
    calibration: Mapping[str, Any] | None = None  # identity of the text: sources, sizes, digests; None: none was read
    seed: int = 0
    dtype: str = "auto"  # for computing
    versions: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.calibration is not None and not isinstance(self.calibration.get("source"), str):
            raise CompressionError("calibration should name its source; restore it, or write null if no data was read")
        for stage in self.stages:  # which check themselves
            self.staged(stage)

    @cached_property
    def stages(self) -> tuple[tuple[int, ...], ...]:
        """Numbers of the steps of each stage: layerwise ones that follow each other, or one on the whole model."""
        return tuple(
            tuple(number for number, _ in group)
            for _, group in groupby(enumerate(self.steps), key=lambda pair: pair[1].stage)
        )

    def staged(self, numbers: Sequence[int]) -> CompressionPlan | None:
        """What the layerwise steps of a stage do to every expert; None where it is not decided, or of another kind."""
        own = {self.steps[number].name: self.steps[number] for number in numbers}
        chosen = own.get(PRUNE) or own.get(CONSTANTS)
        if chosen is None or chosen.plan is None:
            return None
        return stage_plan(self, own, chosen)

    @cached_property
    def stage(self) -> CompressionPlan:
        """What becomes of the source's experts over all stages together, for those who show it."""
        found = [made for stage in self.stages if (made := self.staged(stage)) is not None]
        if not found:
            split = next((dict(step.plan) for step in self.steps if step.name == SPLIT and step.plan), None)
            experts = 0 if split is None else int(split["experts"]) * int(split["parts"])
            return CompressionPlan(self.source, experts, KEPT_WHOLE, {}, self.calibration, (), split=split)
        whole = found[0]
        for after in found[1:]:
            whole = _composed(whole, after)
        return whole

    def of(self, name: str) -> tuple[PlannedStep, ...]:
        """All steps of a name, in order."""
        return tuple(step for step in self.steps if step.name == name)

    def with_entry(self, number: int, **changes: Any) -> "Plan":
        """The plan with other contents of one step."""
        changed = replace(self.steps[number], **changes)
        return replace(self, steps=(*self.steps[:number], changed, *self.steps[number + 1 :]))

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types, in the file's order."""
        return {
            "format": FORMAT,
            "source": asdict(self.source),
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
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()

    @classmethod
    def from_dict(cls, content: Mapping[str, Any], where: str = "plan") -> Self:
        """Read a plan back; raises `CompressionError` saying what is missing, unknown or impossible."""
        if content.get("format") != FORMAT:
            raise CompressionError(f"{where}: format is {content.get('format')!r}, this version reads {FORMAT!r}")
        refuse_unknown(content, field_names(Plan, "format"), where)
        try:
            entries = content["steps"]
            if not isinstance(entries, list) or len(entries) > MOST_STEPS:
                raise CompressionError(f"{where}: steps should be a list of at most {MOST_STEPS}; restore it")
            steps = tuple(
                PlannedStep.from_dict(entry, f"{where}: steps[{number}]") for number, entry in enumerate(entries)
            )
            for text in (content["calibration"], *(step.text for step in steps)):
                few((text or {}).get("sources"), "calibration's sources")
            return cls(
                source=_source_from_dict(content["source"]),
                steps=steps,
                calibration=few(content["calibration"], "calibration"),
                seed=integer(content["seed"], "seed"),
                dtype=str(content.get("dtype", "auto")),
                versions=dict(few(content.get("versions"), "versions") or {}),
            )
        except KeyError as error:
            raise CompressionError(f"{where}: field {error.args[0]!r} is missing; restore it") from error
        except (TypeError, ValueError, AttributeError, OverflowError) as error:
            raise CompressionError(f"{where} is not built like a plan ({error}); restore it or plan again") from error

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a plan file; raises `CompressionError` if it is missing, no JSON, or impossible."""
        content = read_json(path, "mend it or plan again", "name a plan file")
        if not isinstance(content, dict):
            raise CompressionError(f"{path} should hold a JSON object; plan again")
        return cls.from_dict(content, str(path))


def stage_plan(plan: Plan, own: Mapping[str, PlannedStep], chosen: PlannedStep) -> CompressionPlan:
    """The experts' disposition in a stage, of its steps by name; `chosen` is the one that decides who stays."""
    decided = chosen.plan or {}
    refuse_unknown(decided, frozenset({*PRUNED, "figures", "experts_total", "format"}), f"the plan of {chosen.name}")
    refuse_crowds(decided.get("layers"))
    refit, split = own.get(CORRECT), own.get(SPLIT)
    constants = None
    if chosen.name == CONSTANTS:
        named = ("format", "budget", "experts_total")
        constants = {name: decided[name] for name in named} | {"dtype": plan.dtype} | dict(decided.get("figures") or {})
    options = chosen.options
    return CompressionPlan(
        source=plan.source,
        experts=integer(decided["experts"], "experts"),
        strategy=str(options.get("strategy", chosen.name)),
        options=dict(options.get("options") or {}),
        calibration=plan.calibration,
        layers=tuple(layer_from_dict(entry) for entry in decided["layers"]),
        seed=plan.seed,
        versions=plan.versions,
        sequential=bool(options.get("sequential")),
        correction=None if refit is None else {**_refit(refit.options), "dtype": plan.dtype},
        protected=protected_from_dict(decided.get("protected", {})),
        mtp=decided.get("mtp"),
        constants=constants,
        split=None if split is None or split.plan is None else dict(split.plan),
        top_k=decided.get("top_k"),
    )


def _refit(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name != "calibration"}


def decisions(made: CompressionPlan) -> dict[str, Any]:
    """What a stage's prune or constants step decided, as its entry in the plan has it."""
    protected = {name: list(experts) for name, experts in made.protected.items()}
    return {
        "experts": made.experts,
        **({"protected": protected} if protected else {}),
        **({} if made.top_k is None else {"top_k": made.top_k}),
        **({} if made.mtp is None else {"mtp": made.mtp}),
        "layers": [layer_to_dict(layer) for layer in made.layers],
    }


def _composed(first: CompressionPlan, second: CompressionPlan) -> CompressionPlan:
    """What two stages do one after the other, in terms of the first one's experts."""
    before = {layer.module: layer for layer in first.layers}
    layers = tuple(
        _composed_layer(before[layer.module], layer) if layer.module in before else layer for layer in second.layers
    )
    return replace(second, layers=layers, protected=first.protected, split=first.split)


def _composed_layer(first: LayerPlan, second: LayerPlan) -> LayerPlan:
    def group(after: Group) -> Group:
        shares = zip(after.members, after.coefficients, after.router_coefficients, strict=True)
        parts = [(first.groups[slot], share, routed) for slot, share, routed in shares]
        members = [member for own, _, _ in parts for member in own.members]
        mixed = [share * c for own, share, _ in parts for c in own.coefficients]
        routed = [share * c for own, _, share in parts for c in own.router_coefficients]
        scale = after.scale * (parts[0][0].scale if len(parts) == 1 else 1.0)
        return Group(tuple(members), tuple(mixed), tuple(routed), scale)

    facts = {
        name: getattr(first, name)
        for name in ("module", "layer", "experts", "top_k", "routing_groups", "chosen_groups", "experts_per_group")
    }
    groups = tuple(sorted(map(group, second.groups), key=lambda each: min(each.members)))
    return LayerPlan(
        **facts, groups=groups, upstream=second.upstream, decided_by=second.decided_by, figures=second.figures
    )


def _source_from_dict(entry: Any) -> Source:
    refuse_unknown(entry, field_names(Source), "source")
    source = Source(entry["model"], entry["revision"], entry["fingerprint"])
    if not (isinstance(source.model, str) and isinstance(source.fingerprint, str)):
        raise CompressionError("the source's model and fingerprint should be text; restore them")
    if not isinstance(source.revision, str | None):
        raise CompressionError(f"the source's revision should be text or null, it is {source.revision!r}")
    return source
