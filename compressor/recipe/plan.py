"""The compression plan: which experts stay, merge or go, as JSON that a person can read and edit.

A plan and its source checkpoint are enough to rebuild the output bit for bit. It checks itself on creation, before any
weight is read.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from compressor.errors import CompressionError
from compressor.model.architecture import MoeLayer
from compressor.recipe.constants import fault_of_constants
from compressor.recipe.layer import LAYER_FACTS
from compressor.recipe.layer import Group as Group
from compressor.recipe.layer import LayerPlan as LayerPlan
from compressor.recipe.plan_json import (
    few,
    field_names,
    integer,
    layer_from_dict,
    layer_to_dict,
    protected_from_dict,
    readable_json,
    refuse_crowds,
    refuse_floods,
    refuse_unknown,
)
from compressor.recipe.split import check_split
from compressor.records import read_json

FORMAT = "moe-compressor-plan/1"


@dataclass(frozen=True, slots=True)
class Source:
    """The checkpoint that a plan was made for."""

    model: str  # local folder or Hub id
    revision: str | None
    fingerprint: str  # over all tensor names, dtypes and shapes and the routers' bytes


def touched(layer: LayerPlan, protected: Iterable[int]) -> list[int]:
    """The protected experts that a layer's plan merges, changes or drops."""
    untouched = {group.members[0] for group in layer.groups if group.untouched}
    return sorted(set(protected) - untouched)


@dataclass(frozen=True, slots=True)
class CompressionPlan:
    """A whole model's plan with its provenance."""

    source: Source
    experts: int  # per layer, in the output; where layers keep different numbers, their mean rounded down
    strategy: str
    options: Mapping[str, Any]
    calibration: Mapping[str, Any] | None  # source, digest, samples and seed; None when no data was read
    layers: tuple[LayerPlan, ...]
    seed: int = 0
    versions: Mapping[str, str] = field(default_factory=dict)
    sequential: bool = False  # each layer was planned on what the compressed earlier ones put out
    correction: Mapping[str, Any] | None = None  # what is refitted when the plan is carried out; None: nothing
    protected: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # by module, ascending: stay as they are
    bake: Mapping[str, Any] | None = None  # how the routers are moved in the end, on what text, and what came of it
    recover: Mapping[str, Any] | None = None  # how all is trained after that, on what text, and what came of it
    mtp: str | None = None  # "keep" or "drop": what is done with multi-token-prediction heads that are understood
    constants: Mapping[str, Any] | None = None  # which stand for the experts that are dropped, and the budget
    split: Mapping[str, Any] | None = None  # how each of the source's experts became several, which the plan numbers
    top_k: int | None = None  # experts that a token visits in the output, where they are fewer than before

    def __post_init__(self) -> None:
        if self.correction is not None and self.calibration is None:
            raise CompressionError("a correction needs calibration data; restore calibration or write null for both")
        if self.calibration is not None and not isinstance(self.calibration.get("source"), str):
            raise CompressionError("calibration should name its source; restore it, or write null if no data was read")
        asked = {"method": None, "dtype": "auto", **(self.correction or {"method": "none"})}
        for name in ("method", "dtype"):
            if not isinstance(asked[name], str):
                raise CompressionError(f"the correction's {name} should be text, it is {asked[name]!r}; restore it")
        for name, entry in (("bake", self.bake), ("recover", self.recover)):
            if entry is not None and not isinstance(entry.get("calibration"), Mapping):
                raise CompressionError(f"{name} should name its calibration; restore it, or write null for {name}")
            if entry is not None and not isinstance(entry.get("after", []), list):
                raise CompressionError(f"{name} should list what was done before it as 'after'; restore it")
        if self.split is not None:
            check_split(self.split)
        if self.mtp not in (None, "keep", "drop"):
            raise CompressionError(f"mtp is {self.mtp!r}; write keep or drop, or take it out")
        names = Counter(layer.module for layer in self.layers)
        for layer in self.layers:
            if names[layer.module] > 1:
                raise CompressionError(f"{layer.module} appears twice in the plan; keep one entry for each layer")
            if self.constants is None and len(layer.groups) != self.experts:
                raise CompressionError(
                    f"{layer.module}: {len(layer.groups)} groups, but the plan keeps {self.experts} experts in "
                    "every layer; make them equal"
                )
        if fault := fault_of_constants(self):
            raise CompressionError(fault)
        known = {layer.module: layer for layer in self.layers}
        for module, experts in self.protected.items():
            if (owner := known.get(module)) is None:
                raise CompressionError(f"protected names {module}, which the plan does not have; restore it")
            for expert in experts:
                if not 0 <= expert < owner.experts:
                    raise CompressionError(
                        f"{module}: protected expert {expert} does not exist; experts are numbered 0 to "
                        f"{owner.experts - 1}"
                    )
            if changed := touched(owner, experts):
                raise CompressionError(
                    f"{module}: expert {changed[0]} is protected, but is not kept as it is; give it an untouched group "
                    "of its own, or take it out of 'protected'"
                )

    @property
    def is_drop(self) -> bool:
        """Whether the whole plan is a pure drop (or keeps everything), and no weight is refitted."""
        return self.correction is None and all(layer.is_drop for layer in self.layers)

    @property
    def stored_as_is(self) -> bool:
        """Whether the output can be mixed from stored tensors: no neuron changes its place, nothing is refitted."""
        return self.correction is None and not any(group.aligned for layer in self.layers for group in layer.groups)

    @property
    def afterwards(self) -> tuple[str, ...]:
        """The entries of what was done to the finished output, in the order in which it was."""
        found = {"bake": self.bake, "recover": self.recover}
        names = [name for name, entry in found.items() if entry is not None]
        return tuple(sorted(names, key=lambda name: len((found[name] or {}).get("after", []))))

    @property
    def baked(self) -> bool:
        """Whether a bake has moved the routers of the output."""
        result = (self.bake or {}).get("result")
        told = result if isinstance(result, Mapping) else {}
        before, after = told.get("before"), told.get("after")
        return isinstance(before, int | float) and isinstance(after, int | float) and after < before

    @property
    def recovered(self) -> bool:
        """Whether a recovery has changed the output."""
        result = (self.recover or {}).get("result")
        return isinstance(result, Mapping) and result.get("changed") is True

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types, in the file's order."""
        protected = {name: list(experts) for name, experts in self.protected.items()}
        return {
            "format": FORMAT,
            "source": asdict(self.source),
            "strategy": self.strategy,
            "options": dict(self.options),
            "seed": self.seed,
            "calibration": None if self.calibration is None else dict(self.calibration),
            "sequential": self.sequential,
            "correction": None if self.correction is None else dict(self.correction),
            **({} if self.constants is None else {"constants": dict(self.constants)}),
            **({} if self.split is None else {"split": dict(self.split)}),
            **({} if self.top_k is None else {"top_k": self.top_k}),
            **({} if self.bake is None else {"bake": dict(self.bake)}),
            **({} if self.recover is None else {"recover": dict(self.recover)}),
            "versions": dict(self.versions),
            "experts": self.experts,
            **({"protected": protected} if protected else {}),
            **({} if self.mtp is None else {"mtp": self.mtp}),
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
        if self.correction is not None or self.constants is not None:
            data = {name: (self.calibration or {}).get(name) for name in ("sha256", "heldout", "only")}
            decisive["correction"] = {**(self.correction or {}), "calibration": data, "seed": self.seed}
        if self.constants is not None:
            decisive["constants"] = [list(layer.constants) for layer in self.layers]
        if self.split is not None:
            told = ("calibration", "neurons")  # the digest of the order stands for both
            decisive["split"] = {name: value for name, value in self.split.items() if name not in told}
        if self.top_k is not None:
            decisive["top_k"] = self.top_k
        for step, entry in (("bake", self.bake), ("recover", self.recover)):
            if entry is not None:
                facts = {name: value for name, value in entry.items() if name not in ("calibration", "result")}
                decisive[step] = {**facts, "sha256": entry["calibration"].get("sha256")}
        return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()

    @classmethod
    def from_dict(cls, content: Mapping[str, Any], where: str = "plan") -> Self:
        """Read a plan back; raises `CompressionError` saying what is missing, unknown or impossible."""
        if content.get("format") != FORMAT:
            raise CompressionError(f"{where}: format is {content.get('format')!r}, this version reads {FORMAT!r}")
        refuse_unknown(content, field_names(CompressionPlan, "format"), where)
        refuse_crowds(content.get("layers"))
        try:
            entries = [content.get(name) or {} for name in ("bake", "recover", "split")]
            for read in (content["calibration"], *(entry.get("calibration") for entry in entries)):
                _refuse_floods(read)
            return cls(
                source=_source_from_dict(content["source"]),
                experts=integer(content["experts"], "experts"),
                strategy=str(content["strategy"]),
                options=dict(few(content["options"], "options")),
                calibration=few(content["calibration"], "calibration"),
                layers=tuple(layer_from_dict(entry) for entry in content["layers"]),
                seed=integer(content["seed"], "seed"),
                versions=dict(few(content.get("versions"), "versions") or {}),
                sequential=bool(content.get("sequential", False)),
                correction=None if content.get("correction") is None else dict(content["correction"]),
                protected=protected_from_dict(content.get("protected", {})),
                mtp=content.get("mtp"),
                constants=None if content.get("constants") is None else dict(few(content["constants"], "constants")),
                split=None if content.get("split") is None else dict(content["split"]),
                top_k=None if content.get("top_k") is None else integer(content["top_k"], "top_k"),
                bake=None if content.get("bake") is None else dict(content["bake"]),
                recover=None if content.get("recover") is None else dict(content["recover"]),
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


def _refuse_floods(calibration: Any) -> None:
    """Refuse a calibration of more sources or tokens than can be read; a plan that is carried out may read it again."""
    if isinstance(calibration, dict):
        few(calibration.get("sources"), "calibration's sources")
        asked = calibration.get("asked")
        given = asked if isinstance(asked, dict) else {}
        for name in ("samples", "reserve"):
            refuse_floods(given.get(name), given.get("sequence_length"))


def _source_from_dict(entry: Any) -> Source:
    refuse_unknown(entry, field_names(Source), "source")
    source = Source(entry["model"], entry["revision"], entry["fingerprint"])
    if not (isinstance(source.model, str) and isinstance(source.fingerprint, str)):
        raise CompressionError("the source's model and fingerprint should be text; restore them")
    if not isinstance(source.revision, str | None):
        raise CompressionError(f"the source's revision should be text or null, it is {source.revision!r}")
    return source


def check_source(plan: CompressionPlan, fingerprint: str) -> None:
    """Refuse a plan that was made for another model."""
    if plan.source.fingerprint != fingerprint:
        raise CompressionError(
            "the plan was made for another model: its source fingerprint "
            f"{plan.source.fingerprint[:12]} differs from this checkpoint's {fingerprint[:12]}; plan again for this one"
        )


def check_against(plan: CompressionPlan, layers: Sequence[MoeLayer], fingerprint: str) -> None:
    """Refuse a plan that was made for another model, or whose facts about the model were edited."""
    check_source(plan, fingerprint)
    known = {layer.name: layer for layer in layers}
    for layer_plan in plan.layers:
        if (layer := known.get(layer_plan.module)) is None:
            raise CompressionError(
                f"the plan speaks of {layer_plan.module}, which this model does not have; plan again"
            )
        for fact in LAYER_FACTS:
            if getattr(layer_plan, fact) != getattr(layer, fact):
                raise CompressionError(
                    f"{layer.name}: the plan says {fact} {getattr(layer_plan, fact)}, the model has "
                    f"{getattr(layer, fact)}; restore it"
                )
    if missing := sorted(set(known) - {layer_plan.module for layer_plan in plan.layers}):
        raise CompressionError(f"the plan has no entry for {missing[0]}; every MoE layer needs one")
