"""The compression plan: which experts stay, merge or go, as JSON that a person can read and edit.

A plan and its source checkpoint are enough to rebuild the output bit for bit. `LayerPlan` checks itself on creation,
before any weight is read.
"""

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Self

from compressor.architecture import MoeLayer
from compressor.errors import CompressionError
from compressor.limits import check_groups

FORMAT = "moe-compressor-plan/1"
SUM_TOLERANCE = 1e-6
ROUTING_FIELDS = ("routing_groups", "chosen_groups", "experts_per_group")


@dataclass(frozen=True, slots=True)
class Group:
    """Experts that become one: the merged expert is scale * sum(coefficients * members).

    Equations 6 and 7 of Zhang et al. 2024, arXiv:2407.09590. Router rows merge with `router_coefficients`, and without
    the scale. With a `head`, one of the members, the others' neurons are first put in its order
    (`compressor.alignment`).
    """

    members: tuple[int, ...]
    coefficients: tuple[float, ...]
    router_coefficients: tuple[float, ...]
    scale: float = 1.0
    head: int | None = None

    def __post_init__(self) -> None:
        for label, values in (("coefficients", self.coefficients), ("router_coefficients", self.router_coefficients)):
            if len(values) != len(self.members):
                raise CompressionError(
                    f"group {list(self.members)} has {len(values)} {label} for {len(self.members)} members; "
                    "give one each"
                )
            if not all(math.isfinite(value) for value in values) or abs(sum(values) - 1.0) > SUM_TOLERANCE:
                raise CompressionError(
                    f"group {list(self.members)} has {label} that sum to {sum(values):.6g}; they must sum to 1"
                )
        if not math.isfinite(self.scale) or self.scale <= 0:
            raise CompressionError(f"group {list(self.members)} has scale {self.scale}; it must be a positive number")
        if self.head is not None and self.head not in self.members:
            raise CompressionError(
                f"group {list(self.members)} has head {self.head}, which is none of its members; name one of them"
            )

    @classmethod
    def single(cls, expert: int) -> Self:
        """A group of one expert, kept as it is."""
        return cls((expert,), (1.0,), (1.0,))

    @property
    def untouched(self) -> bool:
        """Whether the merged expert is bit for bit one member."""
        return (
            len(self.members) == 1
            and self.coefficients == (1.0,)
            and self.router_coefficients == (1.0,)
            and self.scale == 1.0
        )

    @property
    def aligned(self) -> bool:
        """Whether neurons change their order: there is a head, and more than one member counts."""
        return self.head is not None and sum(coefficient != 0 for coefficient in self.coefficients) > 1


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """What happens to one MoE layer; experts in no group are dropped. Slot n of the output holds group n."""

    module: str  # the experts module's full name
    layer: int  # the decoder layer's number
    experts: int
    top_k: int
    groups: tuple[Group, ...]
    routing_groups: int = 1
    chosen_groups: int = 1
    experts_per_group: int = 1
    upstream: str = "original"  # what the earlier layers were while this one was planned
    decided_by: str = ""  # the statistic that decided
    figures: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_groups(self)

    @classmethod
    def keep(cls, layer: MoeLayer, experts: Sequence[int], **details: Any) -> Self:
        """Keep these experts as they are and drop the others."""
        return cls.of(layer, [Group.single(expert) for expert in sorted(experts)], **details)

    @classmethod
    def of(cls, layer: MoeLayer, groups: Sequence[Group], **details: Any) -> Self:
        """A plan with these groups, put in the order of their smallest members."""
        ordered = tuple(sorted(groups, key=lambda group: min(group.members, default=-1)))
        return cls(
            module=layer.name,
            layer=layer.index,
            experts=layer.experts,
            top_k=layer.top_k,
            groups=ordered,
            routing_groups=layer.routing_groups,
            chosen_groups=layer.chosen_groups,
            experts_per_group=layer.experts_per_group,
            **details,
        )

    @property
    def dropped(self) -> tuple[int, ...]:
        """Experts in no group."""
        grouped = {expert for group in self.groups for expert in group.members}
        return tuple(expert for expert in range(self.experts) if expert not in grouped)

    @property
    def is_drop(self) -> bool:
        """Whether no weight changes: every group is one untouched expert."""
        return all(group.untouched for group in self.groups)

    def slots(self) -> dict[int, int]:
        """Slot of the output by expert of the source, for experts that are in a group."""
        return {expert: slot for slot, group in enumerate(self.groups) for expert in group.members}

    def remap(self) -> tuple[int, ...]:
        """Slot of the output by expert of the source, -1 for a dropped one."""
        slots = self.slots()
        return tuple(slots.get(expert, -1) for expert in range(self.experts))


@dataclass(frozen=True, slots=True)
class Source:
    """The checkpoint that a plan was made for."""

    model: str  # local folder or Hub id
    revision: str | None
    fingerprint: str  # over all tensor names, dtypes and shapes and the routers' bytes


@dataclass(frozen=True, slots=True)
class CompressionPlan:
    """A whole model's plan with its provenance."""

    source: Source
    experts: int  # per layer, in the output
    strategy: str
    options: Mapping[str, Any]
    calibration: Mapping[str, Any] | None  # source, digest, samples and seed; None when no data was read
    layers: tuple[LayerPlan, ...]
    seed: int = 0
    versions: Mapping[str, str] = field(default_factory=dict)
    sequential: bool = False  # each layer was planned on what the compressed earlier ones put out
    correction: Mapping[str, Any] | None = None  # what is refitted when the plan is carried out; None: nothing

    def __post_init__(self) -> None:
        if self.correction is not None and self.calibration is None:
            raise CompressionError("a correction needs calibration data; restore calibration or write null for both")
        if self.calibration is not None and not isinstance(self.calibration.get("source"), str):
            raise CompressionError("calibration should name its source; restore it, or write null if no data was read")
        names = [layer.module for layer in self.layers]
        for name in names:
            if names.count(name) > 1:
                raise CompressionError(f"{name} appears twice in the plan; keep one entry for each layer")
        for layer in self.layers:
            if len(layer.groups) != self.experts:
                raise CompressionError(
                    f"{layer.module}: {len(layer.groups)} groups, but the plan keeps {self.experts} experts in "
                    "every layer; make them equal"
                )

    @property
    def is_drop(self) -> bool:
        """Whether the whole plan is a pure drop (or keeps everything), and no weight is refitted."""
        return self.correction is None and all(layer.is_drop for layer in self.layers)

    @property
    def stored_as_is(self) -> bool:
        """Whether the output can be mixed from stored tensors: no neuron changes its place, nothing is refitted."""
        return self.correction is None and not any(group.aligned for layer in self.layers for group in layer.groups)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types, in the file's order."""
        return {
            "format": FORMAT,
            "source": asdict(self.source),
            "strategy": self.strategy,
            "options": dict(self.options),
            "seed": self.seed,
            "calibration": None if self.calibration is None else dict(self.calibration),
            "sequential": self.sequential,
            "correction": None if self.correction is None else dict(self.correction),
            "versions": dict(self.versions),
            "experts": self.experts,
            "layers": [layer_to_dict(layer) for layer in self.layers],
        }

    def to_json(self) -> str:
        """Indented JSON with short lists on one line each."""
        return readable_json(self.to_dict())

    def digest(self) -> str:
        """SHA-256 of what decides the output: source, groups, and what they are corrected on."""
        decisive: dict[str, Any] = {
            "source": self.source.fingerprint,
            "layers": [layer_to_dict(layer)["groups"] for layer in self.layers],
        }
        if self.correction is not None:
            data = (self.calibration or {}).get("sha256")
            decisive["correction"] = {**self.correction, "calibration": data, "seed": self.seed}
        return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()

    @classmethod
    def from_dict(cls, content: Mapping[str, Any], where: str = "plan") -> Self:
        """Read a plan back; raises `CompressionError` saying what is missing, unknown or impossible."""
        if content.get("format") != FORMAT:
            raise CompressionError(f"{where}: format is {content.get('format')!r}, this version reads {FORMAT!r}")
        _refuse_unknown(content, _names(CompressionPlan, "format"), where)
        try:
            return cls(
                source=_source_from_dict(content["source"]),
                experts=_integer(content["experts"], "experts"),
                strategy=str(content["strategy"]),
                options=dict(content["options"]),
                calibration=content["calibration"],
                layers=tuple(layer_from_dict(entry) for entry in content["layers"]),
                seed=_integer(content["seed"], "seed"),
                versions=dict(content.get("versions") or {}),
                sequential=bool(content.get("sequential", False)),
                correction=None if content.get("correction") is None else dict(content["correction"]),
            )
        except KeyError as error:
            raise CompressionError(f"{where}: field {error.args[0]!r} is missing; restore it") from error
        except (TypeError, ValueError, AttributeError, OverflowError) as error:
            raise CompressionError(f"{where} is not built like a plan ({error}); restore it or plan again") from error

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a plan file; raises `CompressionError` if it is missing, no JSON, or impossible."""
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise CompressionError(f"{path} cannot be read ({error.strerror}); name a plan file") from error
        except (ValueError, RecursionError) as error:
            raise CompressionError(f"{path} is not valid JSON ({error}); mend it or plan again") from error
        if not isinstance(content, dict):
            raise CompressionError(f"{path} should hold a JSON object; plan again")
        return cls.from_dict(content, str(path))


def _names(stored: type, *more: str) -> frozenset[str]:
    """Names that the JSON of a dataclass may have."""
    return frozenset(entry.name for entry in fields(stored)) | set(more)


def _integer(value: Any, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise CompressionError(f"{name} should be a whole number, it is {value!r}")
    return value


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise CompressionError(f"{value!r} stands where a number should")
    return float(value)


def _refuse_unknown(entry: Any, known: frozenset[str], where: str) -> None:
    if not isinstance(entry, dict):
        raise CompressionError(f"{where}: {entry!r} stands where an object with {', '.join(sorted(known))} should")
    if unknown := sorted(set(entry) - known):
        raise CompressionError(f"{where} has an unknown field {unknown[0]!r}; known are {', '.join(sorted(known))}")


def _source_from_dict(entry: Any) -> Source:
    _refuse_unknown(entry, _names(Source), "source")
    source = Source(entry["model"], entry["revision"], entry["fingerprint"])
    if not (isinstance(source.model, str) and isinstance(source.fingerprint, str)):
        raise CompressionError("the source's model and fingerprint should be text; restore them")
    if not isinstance(source.revision, str | None):
        raise CompressionError(f"the source's revision should be text or null, it is {source.revision!r}")
    return source


def layer_to_dict(plan: LayerPlan) -> dict[str, Any]:
    groups = [
        {
            "members": list(group.members),
            "coefficients": list(group.coefficients),
            "router_coefficients": list(group.router_coefficients),
            **({"scale": group.scale} if group.scale != 1.0 else {}),
            **({"head": group.head} if group.head is not None else {}),
        }
        for group in plan.groups
    ]
    return {
        "module": plan.module,
        "layer": plan.layer,
        "experts": plan.experts,
        "top_k": plan.top_k,
        **(
            {
                "routing_groups": plan.routing_groups,
                "chosen_groups": plan.chosen_groups,
                "experts_per_group": plan.experts_per_group,
            }
            if plan.routing_groups > 1
            else {}
        ),
        "groups": groups,
        "dropped": list(plan.dropped),
        "upstream": plan.upstream,
        "decided_by": plan.decided_by,
        "figures": dict(plan.figures),
    }


def _group_from_dict(entry: Mapping[str, Any]) -> Group:
    _refuse_unknown(entry, _names(Group), f"group {entry.get('members')}" if isinstance(entry, dict) else "groups")
    members = tuple(entry["members"])
    coefficients = tuple(_number(value) for value in entry["coefficients"])
    router = tuple(_number(value) for value in entry.get("router_coefficients", coefficients))
    head = entry.get("head")
    scale = _number(entry.get("scale", 1.0))
    return Group(members, coefficients, router, scale, None if head is None else _integer(head, "head"))


def layer_from_dict(entry: Mapping[str, Any]) -> LayerPlan:
    module = str(entry["module"]) if isinstance(entry, dict) else "layers"
    _refuse_unknown(entry, _names(LayerPlan, "dropped"), module)
    try:
        groups = tuple(_group_from_dict(group) for group in entry["groups"])
    except CompressionError as error:
        raise CompressionError(f"{module}: {error}") from error
    plan = LayerPlan(
        module=module,
        layer=_integer(entry["layer"], "layer"),
        experts=_integer(entry["experts"], "experts"),
        top_k=_integer(entry["top_k"], "top_k"),
        groups=groups,
        **{name: _integer(entry.get(name, 1), name) for name in ROUTING_FIELDS},
        upstream=str(entry.get("upstream", "original")),
        decided_by=str(entry.get("decided_by", "")),
        figures=dict(entry.get("figures") or {}),
    )
    for expert in entry.get("dropped") or ():
        if expert in plan.slots():
            raise CompressionError(
                f"{module}: expert {expert} is in a group and in 'dropped'; take it out of one of them"
            )
        if expert not in plan.dropped:
            raise CompressionError(
                f"{module}: 'dropped' names expert {expert!r}, which does not exist; "
                f"experts are numbered 0 to {plan.experts - 1}"
            )
    return plan


def readable_json(content: Mapping[str, Any]) -> str:
    """Indented JSON in which lists of plain values stand on one line, so that a person can read it."""

    def one_line(match: re.Match[str]) -> str:
        return "[" + re.sub(r"\s*\n\s*", " ", match.group(1)) + "]"

    return re.sub(r"\[\s+([^\[\]{}]*?)\s+\]", one_line, json.dumps(content, indent=2, ensure_ascii=False)) + "\n"
