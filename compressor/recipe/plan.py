"""What the layerwise steps of a stage do to every expert: which stay, merge or go.

It checks itself on creation, before any weight is read.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from compressor.errors import CompressionError
from compressor.recipe.constants import fault_of_constants
from compressor.recipe.layer import LAYER_FACTS
from compressor.recipe.layer import Group as Group
from compressor.recipe.layer import LayerPlan as LayerPlan
from compressor.recipe.split import check_split

if TYPE_CHECKING:
    from compressor.model.architecture import MoeLayer


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


def check_source(source: Source, fingerprint: str) -> None:
    """Refuse a plan that was made for another model."""
    if source.fingerprint != fingerprint:
        raise CompressionError(
            "the plan was made for another model: its source fingerprint "
            f"{source.fingerprint[:12]} differs from this checkpoint's {fingerprint[:12]}; plan again for this one"
        )


def check_against(plan: CompressionPlan, layers: "Sequence[MoeLayer]", fingerprint: str) -> None:
    """Refuse a plan that was made for another model, or whose facts about the model were edited."""
    check_source(plan.source, fingerprint)
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
