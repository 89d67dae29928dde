"""Plans of layerwise steps: which experts stay, merge or go.

Plans check themselves on creation, before any weight is read.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from compressor.errors import CompressionError, without_tokens
from compressor.frozen import frozen
from compressor.model.moe_layer import MoeLayer, check_count
from compressor.records import Json, value_as

if TYPE_CHECKING:  # plans are read without torch
    from compressor.model.opened import OpenModel

SUM_TOLERANCE = 1e-6
LARGEST = (2 - 2**-23) * 2.0**127
SMALLEST = 2.0**-126  # that float32 holds in full, in which experts are mixed
# which a plan repeats
LAYER_FACTS = ("experts", "top_k", "routing_groups", "chosen_groups", "experts_per_group")
MOST_PARTS = 64  # of an expert
UNEVEN = "uneven"  # the budget of layers that keep different numbers of experts
KEPT_WHOLE = "none"  # the strategy of a plan that drops and merges nothing


@frozen
class Group:
    """Experts that become one: scale * sum(coefficients * members), equations 6 and 7 of
    arXiv:2407.09590.

    Router rows merge with `router_coefficients`, and without the scale. With a `head`, one of the
    members, the others' neurons are first put in its order (`compressor.steps.cutting`)."""

    members: tuple[int, ...]
    coefficients: tuple[float, ...]
    router_coefficients: tuple[float, ...]
    scale: float = 1.0
    head: int | None = None

    def __post_init__(self) -> None:
        where = f"group {list(self.members)} has"
        count = len(self.members)
        for label in ("coefficients", "router_coefficients"):
            values = getattr(self, label)
            if len(values) != count:
                raise CompressionError(
                    f"{where} {len(values)} {label} for {count} members; give one each"
                )
            is_finite = all(abs(value) <= LARGEST for value in values)
            if not is_finite or abs(sum(values) - 1) > SUM_TOLERANCE:
                raise CompressionError(
                    f"{where} {label} that sum to {sum(values):.6g}; they must sum to 1"
                )
        if not SMALLEST <= self.scale <= LARGEST:
            raise CompressionError(
                f"{where} scale {self.scale}; it must be a positive number that float32 holds"
            )
        if not all(abs(value * self.scale) <= LARGEST for value in self.coefficients):
            raise CompressionError(
                f"{where} scale {self.scale}; times its coefficients it is more than float32 holds"
            )
        if self.head is not None and self.head not in self.members:
            raise CompressionError(
                f"{where} head {self.head}, which is none of its members; name one of them"
            )

    @classmethod
    def single(cls, expert: int) -> Self:
        """A group of one expert, kept as it is."""
        return cls((expert,), (1.0,), (1.0,))

    @property
    def untouched(self) -> bool:
        """True if the merged expert is bit for bit one member."""
        return self.coefficients == self.router_coefficients == (1.0,) and self.scale == 1.0

    @property
    def aligned(self) -> bool:
        """True if neurons change their order: there is a head, and more than one member counts."""
        return (
            self.head is not None and sum(coefficient != 0 for coefficient in self.coefficients) > 1
        )


@frozen
class LayerPlan:
    """The plan of one MoE layer: slot n of the output holds group n, and experts in no group are
    dropped."""

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
    figures: Json = field(default_factory=dict)
    # experts for which a constant stands; the router keeps all its rows then
    constants: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for message in self._faults():
            raise CompressionError(f"{self.module}: {message}")

    def _faults(self) -> Iterator[str]:
        members = [expert for group in self.groups for expert in group.members]
        for expert, count in Counter(members).items():
            if expert not in range(self.experts):
                yield (
                    f"expert {expert!r} does not exist; experts are numbered 0 to "
                    f"{self.experts - 1}"
                )
            if count > 1:
                yield f"expert {expert} is in two groups; an expert may be in one at most"
        if self.constants:  # the router stays as it is
            if self.constants != self.dropped:
                gone = list(self.dropped)
                yield (
                    f"constants stand for {list(self.constants)}, but {gone} are in no group; "
                    "make these lists equal"
                )
            if not self.is_drop:
                hint = "give every expert that is kept an untouched group of its own"
                yield f"constants stand beside merged experts; {hint}"
            if len(self.groups) < self.top_k:
                yield (
                    f"{len(self.groups)} experts are fewer than the top-k of {self.top_k}; keep "
                    f"at least {self.top_k}"
                )
            return
        check_count(self, len(self.groups), self.module)
        if self.routing_groups == 1:
            return
        size = self.experts // self.routing_groups
        kept = len(self.groups) // self.routing_groups
        for slot, group in enumerate(self.groups):
            homes = {expert // size for expert in group.members}
            if homes != {slot // kept}:
                yield (
                    f"group {list(group.members)} has a place of routing group {slot // kept}; "
                    "keep equally many experts of each routing group, in order, and mix none"
                )

    @classmethod
    def keep(cls, layer: MoeLayer, experts: Sequence[int], **details: Any) -> Self:
        """Keep these experts as they are and drop the others."""
        return cls.of(layer, [Group.single(expert) for expert in sorted(experts)], **details)

    @classmethod
    def of(cls, layer: MoeLayer, groups: Sequence[Group], **details: Any) -> Self:
        """A plan with these groups, put in the order of their smallest members."""
        ordered = tuple(sorted(groups, key=lambda group: min(group.members, default=-1)))
        facts = {name: getattr(layer, name) for name in LAYER_FACTS}
        return cls(module=layer.name, layer=layer.index, groups=ordered, **facts, **details)

    @property
    def dropped(self) -> tuple[int, ...]:
        """Experts in no group."""
        return tuple(expert for expert, slot in enumerate(self.remap()) if slot < 0)

    @property
    def merged(self) -> tuple[tuple[int, ...], ...]:
        """Members of the groups of several experts."""
        return tuple(group.members for group in self.groups if len(group.members) > 1)

    @property
    def is_drop(self) -> bool:
        """True if no weight changes: every group is one untouched expert."""
        return all(group.untouched for group in self.groups)

    def slots(self) -> dict[int, int]:
        """Slot of the output by expert of the source, for experts that are in a group."""
        return {expert: slot for slot, group in enumerate(self.groups) for expert in group.members}

    def remap(self) -> tuple[int, ...]:
        """Slot of the output by expert of the source, -1 for a dropped one."""
        slots = self.slots()
        return tuple(slots.get(expert, -1) for expert in range(self.experts))


def correction_of(layer: LayerPlan) -> Json:
    """Return a layer's figures of its correction; empty if there are none."""
    figures = layer.figures.get("correction")
    return figures if isinstance(figures, Mapping) else {}


def touched(layer: LayerPlan, protected: Iterable[int]) -> list[int]:
    """Return the protected experts that a layer's plan merges, changes or drops."""
    untouched = {group.members[0] for group in layer.groups if group.untouched}
    return sorted(set(protected) - untouched)


@frozen
class Source:
    """The checkpoint that a plan was made for."""

    model: str  # local folder or Hub id
    revision: str | None
    fingerprint: str  # over all tensor names, dtypes and shapes and the routers' bytes

    @classmethod
    def of(cls, model: "OpenModel") -> Self:
        """Return the source of an opened model."""
        return cls(model.source.name, model.source.revision, model.fingerprint)

    @property
    def label(self) -> str:
        """The name without the machine's folders, and without an access token that it may hold."""
        return without_tokens(self.model if self.revision else Path(self.model).name)


@frozen
class ExpertPlan:
    """The decision of a step on all experts of a model: which stay, merge or go, or become
    constants."""

    experts: int  # per layer, in the output; beside constants, their mean rounded down
    layers: tuple[LayerPlan, ...]
    # by module, ascending: stay as they are
    protected: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    # of each of the input's experts into several, which are then the experts of the layers
    split: Json | None = None
    # experts that a token is routed to in the output, where they are fewer than before
    top_k: int | None = None
    # what is done with multi-token-prediction heads that are understood
    mtp: Literal["keep", "drop"] | None = None
    head_experts: int | None = None  # of these heads in the output, if others than of the layers
    format: Literal["mone"] | None = None  # constants stand for experts that are dropped
    budget: str | None = None  # of constants: even or uneven over layers
    experts_total: int | None = None  # that stay beside constants, over all layers
    # of how constants were divided over layers
    figures: Json = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.split is not None and self.split.get("parts") != 1:
            check_split(self.split)
        for message in self._faults():
            raise CompressionError(message)

    def _faults(self) -> Iterator[str]:
        known = self.by_module
        for layer in self.layers:
            if known[layer.module] is not layer:
                yield f"{layer.module} appears twice in the plan; keep one entry for each layer"
            if self.format is not None:
                if layer.dropped and not layer.constants:
                    hint = "name them in 'constants'"
                    yield (
                        f"{layer.module} drops experts without constants, which this format "
                        f"cannot; {hint}"
                    )
                continue
            if layer.constants:
                yield (
                    f"{layer.module} has constants, but the plan is not of that format; restore "
                    "'format'"
                )
            if len(layer.groups) not in (self.experts, self.head_experts):
                what = (
                    f"{len(layer.groups)} groups, but the plan keeps {self.experts} experts in "
                    "every layer"
                )
                yield (
                    f"{layer.module}: {what}; make them equal, or use the step constants "
                    "(--format mone)"
                )
        if self.format is not None:
            kept = sum(len(layer.groups) for layer in self.layers)
            mean = kept // len(self.layers) if self.layers else self.experts
            if (kept, mean) != (self.experts_total, self.experts):
                promised = f"{self.experts_total!r} in all and {self.experts} in each"
                yield (
                    f"its layers keep {kept} experts, {mean} in each, but the plan says "
                    f"{promised}; make them equal"
                )
        for module, experts in self.protected.items():
            owner = known.get(module)
            if owner is None:
                yield f"protected names {module}, which the plan does not have; restore it"
                continue
            changed = touched(owner, experts)
            if changed:
                hint = "give it an untouched group of its own, or take it out of 'protected'"
                yield (
                    f"{module}: expert {changed[0]} is protected, but is not kept as it is; {hint}"
                )

    @property
    def by_module(self) -> dict[str, LayerPlan]:
        """Plans of layers by their experts module."""
        return {layer.module: layer for layer in self.layers}

    @property
    def has_constants(self) -> bool:
        """True if constants stand for experts that are dropped."""
        return self.format is not None

    @property
    def is_drop(self) -> bool:
        """True if it is a pure drop, or keeps everything."""
        return all(layer.is_drop for layer in self.layers)

    @property
    def reorders(self) -> bool:
        """True if neurons of an expert change their places."""
        return any(group.aligned for layer in self.layers for group in layer.groups)

    @classmethod
    def of(cls, layers: Sequence[LayerPlan], head_experts: int | None = None) -> Self:
        """A plan of these layers, which keep equally many experts, except heads, which come
        last."""
        experts = len(layers[0].groups)
        other = None if head_experts == experts else head_experts
        return cls(experts, tuple(layers), head_experts=other)

    @classmethod
    def whole(cls, model: "OpenModel") -> Self:
        """A plan that keeps every expert of a model as it is."""
        return cls.of(
            [LayerPlan.keep(layer, range(layer.experts)) for layer in model.architecture.layers]
        )


def check_split(split: Json) -> None:
    """Raise `CompressionError` for an entry that cannot be of any model."""
    parts = value_as(split.get("parts"), int, "the split's parts")
    maps = split.get("neurons"), split.get("calibration") or {}
    if not 2 <= parts <= MOST_PARTS or not all(isinstance(value, Mapping) for value in maps):
        raise CompressionError(
            f"the split should have 2 to {MOST_PARTS} parts, say for each module where its "
            "neurons go, and have an object or null as calibration; restore it, or plan again"
        )


def describe_split(split: Json) -> str:
    """Return a sentence on the split of every expert."""
    how = "by what they do on text" if split.get("calibration") else "by the norms of their weights"
    neurons = f", neurons dealt out {how}" if "calibration" in split else ""
    return f"each of {split.get('experts')} experts into {split.get('parts')} parts{neurons}"


def parts_of(split: Json | None) -> int:
    """Parts that each expert became; 1 without a split."""
    return 1 if split is None else int(split["parts"])


def check_source(source: Source, fingerprint: str) -> None:
    if source.fingerprint != fingerprint:
        differs = (
            f"its source fingerprint {source.fingerprint[:12]} differs from this "
            f"checkpoint's {fingerprint[:12]}"
        )
        raise CompressionError(
            f"the plan was made for another model: {differs}; plan again for this one"
        )


def check_layers(plan: ExpertPlan, layers: "Sequence[MoeLayer]") -> None:
    """Refuse a plan whose facts about the model are not those of the model."""
    known = {layer.name: layer for layer in layers}
    for planned in plan.layers:
        layer = known.pop(planned.module, None)
        if layer is None:
            raise CompressionError(
                f"the plan speaks of {planned.module}, which this model does not have; plan again"
            )
        for fact in LAYER_FACTS:
            stated = getattr(planned, fact)
            actual = getattr(layer, fact)
            if stated != actual:
                message = f"the plan says {fact} {stated}, the model has {actual}"
                raise CompressionError(f"{layer.name}: {message}; restore it")
    if known:
        raise CompressionError(f"the plan has no entry for {min(known)}; every MoE layer needs one")
