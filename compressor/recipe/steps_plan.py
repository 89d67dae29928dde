"""The plan: the recipe's steps with the decision of each and, after the run, its result; JSON to
read and edit.

A plan and its source checkpoint are enough to rebuild the output bit for bit.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial, reduce
from pathlib import Path
from typing import Any, Self

from compressor.errors import CompressionError
from compressor.files import json_object, write_file
from compressor.frozen import frozen
from compressor.recipe.plan import (
    KEPT_WHOLE,
    LAYER_FACTS,
    ExpertPlan,
    Group,
    LayerPlan,
    Source,
)
from compressor.records import Json, plain_json, read_as, read_json, readable_json, value_as

FORMAT = "moe-compressor-plan/3"
PRUNE = "prune"
CONSTANTS = "constants"
QUANTIZE = "quantize"
MOST_EXPERTS = 2**12  # of a layer: more than any has
Decision = ExpertPlan | Json  # on experts, or any other as JSON


@frozen
class PlannedStep:
    """A step in a plan: its options, decision and result; None before they exist."""

    name: str
    options: Json = field(default_factory=dict)
    decision: Decision | None = None
    result: Json | None = None
    text: Json | None = None  # identity of a text of its own

    @property
    def expert_plan(self) -> ExpertPlan | None:
        """Its decision on experts; None if it has made none."""
        return self.decision if isinstance(self.decision, ExpertPlan) else None

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types without absent values; the decision is named `plan`."""
        decided = None if self.decision is None else decision_to_dict(self.decision)
        given = {"plan": decided, "result": self.result, "text": self.text}
        content = {"name": self.name, "options": self.options, **given}
        return {name: value for name, value in content.items() if value is not None}

    @classmethod
    def from_dict(cls, content: Any, where: str = "steps") -> Self:
        """Read a step back; raises `CompressionError` saying what is missing, unknown or
        impossible."""
        fields = value_as(content, Json, where)
        decided = fields.pop("plan", None)
        step = read_as(cls, fields, where, closed=True)
        return (
            step
            if decided is None
            else replace(step, decision=decision_from_dict(decided, step.name))
        )


@dataclass(frozen=True)
class Plan:
    """The steps done, or to be done, to a source checkpoint, with its provenance."""

    source: Source
    steps: tuple[PlannedStep, ...]
    # identity of the text: sources, sizes, digests; None: none was read
    calibration: Json | None = None
    seed: int = 0
    dtype: str = "auto"  # for computing
    versions: Mapping[str, str] = field(default_factory=dict)
    # the model to compare with and train toward, if that is not the source
    base: Source | None = None

    def __post_init__(self) -> None:
        if self.calibration is not None and not isinstance(self.calibration.get("source"), str):
            raise CompressionError(
                "calibration should name its source; restore it, or write null if no data was read"
            )
        pruning = self.pruning
        read = self.calibration or (None if pruning is None else pruning.text)
        if read is None and self.correction is not None:
            raise CompressionError(
                "a correction needs calibration data; restore calibration, or take out correct"
            )
        if read is None and self.expert_plan.has_constants:
            raise CompressionError(
                "constants are measured on calibration data; restore calibration or plan again"
            )

    @cached_property
    def expert_plan(self) -> ExpertPlan:
        """The source's experts in the output, over all steps together, for display."""
        plans = [step.expert_plan for step in self.steps if step.expert_plan is not None]
        return reduce(_composed, plans) if plans else ExpertPlan(0, ())

    @property
    def text(self) -> Json | None:
        """The run's text, if a step has read it; one that was only evaluated on has no sequence."""
        text = self.calibration
        return None if text is None or text.get("samples") == 0 else text

    @property
    def pruning(self) -> PlannedStep | None:
        """The last step that decided on experts."""
        return next((step for step in reversed(self.steps) if step.expert_plan is not None), None)

    @property
    def _asked(self) -> Json:
        """Options of that step."""
        return {} if self.pruning is None else self.pruning.options

    @property
    def strategy(self) -> str:
        """The strategy of the last step that chose experts."""
        if self.pruning is None or self._asked.get("ratio") == 0:
            return KEPT_WHOLE
        return str(self._asked.get("strategy", self.pruning.name))

    @property
    def strategy_options(self) -> dict[str, Any]:
        """Options of the strategy."""
        return dict(self._asked.get("options") or {})

    @property
    def sequential(self) -> bool:
        """True if each layer was planned on what the compressed earlier ones output."""
        return bool(self._asked.get("sequential"))

    @property
    def split(self) -> Json | None:
        """The split of the source's experts; None if they stayed whole."""
        plans = [step.expert_plan for step in self.steps if step.expert_plan is not None]
        splits = (plan.split for plan in plans if plan.split and plan.split.get("parts") != 1)
        return next(splits, None)

    @property
    def correction(self) -> dict[str, Any] | None:
        """The correction in the step that decided on experts; None if there was none."""
        asked = self._asked.get("correct") or {}
        return {**asked, "dtype": self.dtype} if asked.get("method", "none") != "none" else None

    @property
    def constants(self) -> dict[str, Any] | None:
        """Format and budget of constants, with the figures of how they were divided over layers."""
        plan = self.expert_plan
        if not plan.has_constants:
            return None
        named = {"format": plan.format, "budget": plan.budget, "experts_total": plan.experts_total}
        return {**named, "dtype": self.dtype, **plan.figures}

    def of(self, name: str) -> tuple[PlannedStep, ...]:
        """Return all steps of a name, in order."""
        return tuple(step for step in self.steps if step.name == name)

    def with_entry(self, number: int, **changes: Any) -> "Plan":
        steps = list(self.steps)
        steps[number] = replace(steps[number], **changes)
        return replace(self, steps=tuple(steps))

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types, in the order of the file."""
        return {
            "format": FORMAT,
            "source": asdict(self.source),
            **({} if self.base is None else {"base": asdict(self.base)}),
            "seed": self.seed,
            "dtype": self.dtype,
            "calibration": self.calibration,
            "versions": self.versions,
            "steps": [step.to_dict() for step in self.steps],
        }

    def to_json(self) -> str:
        """Return indented JSON with short lists on one line each."""
        return readable_json(self.to_dict())

    def digest(self) -> str:
        """Return the SHA-256 of everything that decides the output: source, text, options and
        decisions."""
        steps = []
        for step in self.steps:
            decided = {} if step.decision is None else decision_to_dict(step.decision)
            if "split" in decided:
                decided["split"] = {**decided["split"], "calibration": None}
            if "layers" in decided:
                decided["layers"] = [
                    [layer["groups"], layer.get("constants")] for layer in decided["layers"]
                ]
            steps.append([step.name, dict(step.options), decided, (step.text or {}).get("sha256")])
        data = {name: (self.calibration or {}).get(name) for name in ("sha256", "heldout")}
        facts = {"source": self.source.fingerprint, "steps": steps, "seed": self.seed, "text": data}
        if self.base is not None:
            facts["base"] = self.base.fingerprint
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()

    @classmethod
    def from_dict(cls, content: Json, where: str = "plan") -> Self:
        """Read a plan back; raises `CompressionError` saying what is missing, unknown or
        impossible."""
        if content.get("format") != FORMAT:
            raise CompressionError(
                f"{where}: format is {content.get('format')!r}, this version reads {FORMAT!r}; "
                "plan again"
            )
        try:
            steps = value_as(content.get("steps"), tuple[Any, ...], "steps")
            others = {name: value for name, value in content.items() if name != "format"}
            plan = read_as(cls, {**others, "steps": []}, closed=True)
            sources = (plan.calibration or {}).get("sources", [])
            for source in value_as(sources, tuple[Json, ...], "calibration's sources"):
                value_as(source.get("source"), str, "calibration's source")
            read = [
                PlannedStep.from_dict(entry, f"steps[{number}]")
                for number, entry in enumerate(steps)
            ]
            return replace(plan, steps=tuple(read))
        except CompressionError as error:
            raise CompressionError(f"{where}: {error}") from error
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise CompressionError(
                f"{where} is not built like a plan; restore it or plan again"
            ) from error

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a plan file; raises `CompressionError` if it is missing, no JSON, or impossible."""
        content = read_json(path, "mend it or plan again", "name a plan file")
        if not isinstance(content, dict):
            raise CompressionError(f"{path} should hold a JSON object; plan again")
        return cls.from_dict(content, str(path))


def decision_to_dict(decision: Decision) -> dict[str, Any]:
    """Return a step's decision as JSON, without absent values."""
    if not isinstance(decision, ExpertPlan):
        return dict(decision)
    names = ["experts"]
    if decision.has_constants:
        names += ["format", "budget", "experts_total", "figures"]
    if decision.protected:
        names.append("protected")
    content = {
        name: getattr(decision, name) for name in (*names, "split", "top_k", "mtp", "head_experts")
    }
    given = {name: plain_json(value) for name, value in content.items() if value is not None}
    return {**given, "layers": [layer_to_dict(layer) for layer in decision.layers]}


def decision_from_dict(content: Any, name: str) -> Decision:
    """Return the decision of the step of that name from JSON; one with layers is on experts."""
    where = f"the plan of {name}"
    decision: Json = value_as(content, Json, where)
    layers = decision.get("layers")
    if isinstance(layers, list):
        decision = {**decision, "layers": [layer_from_dict(entry) for entry in layers]}
    elif layers is None and name not in (PRUNE, CONSTANTS):
        return decision
    return read_as(ExpertPlan, decision, where, closed=True)


def layer_to_dict(plan: LayerPlan) -> dict[str, Any]:
    groups = [plain_json(group) for group in plan.groups]
    for group in groups:
        for name, usual in (("scale", 1.0), ("head", None)):  # which a plan need not repeat
            if group[name] == usual:
                del group[name]
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
    """Return a layer's plan from JSON; raises `CompressionError` naming the layer and what is
    wrong."""
    content = value_as(entry, Json, "layers")
    module = str(content.get("module", "layers"))
    if value_as(content.get("experts"), int, f"{module}.experts") > MOST_EXPERTS:
        raise CompressionError(
            f"{module}: {content['experts']} experts are more than any layer has; restore it"
        )
    dropped = value_as(content.pop("dropped", None) or [], tuple[int, ...], f"{module}.dropped")
    for group in value_as(content.get("groups"), tuple[Any, ...], f"{module}.groups"):
        if isinstance(group, dict):  # routers merge like weights by default
            group.setdefault("router_coefficients", group.get("coefficients"))
    try:
        plan = read_as(LayerPlan, content, closed=True)
    except CompressionError as error:
        raise CompressionError(
            str(error) if str(error).startswith(module) else f"{module}: {error}"
        ) from error
    for expert in {*dropped} - {*plan.dropped}:
        raise CompressionError(
            f"{module}: 'dropped' names expert {expert}, which is in a group, or does not exist; "
            "take it out"
        )
    return plan


def _composed(first: ExpertPlan, second: ExpertPlan) -> ExpertPlan:
    """Return one plan for two steps in sequence, in terms of the first one's experts."""
    before = first.by_module
    layers = []
    for layer in second.layers:
        earlier = before.get(layer.module)
        if earlier is not None and len(earlier.groups) == layer.experts:  # not split in between
            groups = [_composed_group(earlier, group) for group in layer.groups]
            groups.sort(key=lambda group: min(group.members))
            later = {name: getattr(layer, name) for name in ("upstream", "decided_by", "figures")}
            layer = replace(earlier, groups=tuple(groups), constants=(), **later)
        layers.append(layer)
    split = first.split or second.split
    return replace(second, layers=tuple(layers), protected=first.protected, split=split)


def _composed_group(earlier: LayerPlan, group: Group) -> Group:
    """Return a group of an earlier plan's slots as a group of that plan's experts."""
    members = list[int]()
    mixed = []
    routed = []
    for slot, share, router_share in zip(
        group.members, group.coefficients, group.router_coefficients, strict=True
    ):
        inner = earlier.groups[slot]
        members += inner.members
        mixed += [share * coefficient for coefficient in inner.coefficients]
        routed += [router_share * coefficient for coefficient in inner.router_coefficients]
    single = len(group.members) == 1
    scale = group.scale * (earlier.groups[group.members[0]].scale if single else 1.0)
    return Group(tuple(members), tuple(mixed), tuple(routed), scale)


def check_file(path: Path, overwrite: bool) -> None:
    """Refuse a file that exists, that `overwrite` must not replace because it is no plan, or that
    has no folder."""
    if path.exists() and not overwrite:
        raise CompressionError(f"{path} exists already; name another file or pass --overwrite")
    if path.exists() and not str(json_object(path).get("format", "")).startswith(
        "moe-compressor-plan/"
    ):
        raise CompressionError(
            f"{path} is not a plan, so --overwrite will not replace it; name another file"
        )
    if not path.parent.is_dir():
        raise CompressionError(f"{path.parent} does not exist; create it or name another file")


def write_plan(path: Path, plan: Plan, overwrite: bool = False) -> None:
    """Write a plan to a file atomically."""
    write_file(path, plan.to_json(), partial(check_file, path, overwrite))
