"""One layer's part of a plan: which experts stay, merge or go. It checks itself on creation."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from compressor.errors import CompressionError

if TYPE_CHECKING:  # plans are read without torch
    from compressor.model.architecture import MoeLayer

SUM_TOLERANCE = 1e-6
LARGEST, SMALLEST = (2 - 2**-23) * 2.0**127, 2.0**-126  # that float32 holds in full, in which experts are mixed
LAYER_FACTS = ("experts", "top_k", "routing_groups", "chosen_groups", "experts_per_group")  # which a plan repeats


@dataclass(frozen=True, slots=True)
class Group:
    """Experts that become one: the merged expert is scale * sum(coefficients * members).

    Equations 6 and 7 of Zhang et al. 2024, arXiv:2407.09590. Router rows merge with `router_coefficients`, and without
    the scale. With a `head`, one of the members, the others' neurons are first put in its order
    (`compressor.surgery.alignment`).
    """

    members: tuple[int, ...]
    coefficients: tuple[float, ...]
    router_coefficients: tuple[float, ...]
    scale: float = 1.0
    head: int | None = None

    def __post_init__(self) -> None:
        where, count = f"group {list(self.members)} has", len(self.members)
        for label, values in (("coefficients", self.coefficients), ("router_coefficients", self.router_coefficients)):
            if len(values) != count:
                raise CompressionError(f"{where} {len(values)} {label} for {count} members; give one each")
            if not all(abs(value) <= LARGEST for value in values) or abs(sum(values) - 1.0) > SUM_TOLERANCE:
                raise CompressionError(f"{where} {label} that sum to {sum(values):.6g}; they must sum to 1")
        if not SMALLEST <= self.scale <= LARGEST:
            raise CompressionError(f"{where} scale {self.scale}; it must be a positive number that float32 holds")
        if not all(abs(value * self.scale) <= LARGEST for value in self.coefficients):
            raise CompressionError(f"{where} scale {self.scale}; times its coefficients it is more than float32 holds")
        if self.head is not None and self.head not in self.members:
            raise CompressionError(f"{where} head {self.head}, which is none of its members; name one of them")

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
    constants: tuple[int, ...] = ()  # experts for which a constant stands; the router keeps all its rows then

    def __post_init__(self) -> None:
        if fault := self._fault_of_members() or self._fault_of_constants():
            raise CompressionError(f"{self.module}: {fault}")
        if self.constants:
            return  # the router stays as it is
        from compressor.model.routers import check_count

        check_count(self, len(self.groups), self.module)
        if self.routing_groups > 1 and (fault := self._fault_of_routing_groups()):
            raise CompressionError(f"{self.module}: {fault}")

    def _fault_of_members(self) -> str:
        seen = set[int]()
        for group in self.groups:
            if not group.members:
                return "a group has no members; remove it"
            for expert in group.members:
                if isinstance(expert, bool) or not isinstance(expert, int) or not 0 <= expert < self.experts:
                    return f"expert {expert!r} does not exist; experts are numbered 0 to {self.experts - 1}"
                if expert in seen:
                    return f"expert {expert} is in two groups; an expert may be in one at most"
                seen.add(expert)
        return ""

    def _fault_of_constants(self) -> str:
        if not self.constants:
            return ""
        if self.constants != self.dropped:
            gone = list(self.dropped)
            return f"constants stand for {list(self.constants)}, but {gone} are in no group; make these lists equal"
        if not self.is_drop:
            return "constants stand beside merged experts; give every expert that is kept an untouched group of its own"
        if len(self.groups) < self.top_k:
            return f"{len(self.groups)} experts are fewer than the top-k of {self.top_k}; keep at least {self.top_k}"
        return ""

    def _fault_of_routing_groups(self) -> str:
        size, homes = self.experts // self.routing_groups, list[int]()
        for group in self.groups:
            inside = {expert // size for expert in group.members}
            if len(inside) > 1:
                return f"group {list(group.members)} mixes experts of different routing groups; keep it within one"
            homes.extend(inside)
        found = Counter(homes)
        counts = [found[home] for home in range(self.routing_groups)]
        if len(set(counts)) > 1:
            return f"its routing groups would keep unequal numbers of experts, {counts}; keep equally many in each"
        in_order = homes == sorted(homes)
        return "" if in_order else "its groups are not in the order of the routing groups; order them by their members"

    @classmethod
    def keep(cls, layer: "MoeLayer", experts: Sequence[int], **details: Any) -> Self:
        """Keep these experts as they are and drop the others."""
        return cls.of(layer, [Group.single(expert) for expert in sorted(experts)], **details)

    @classmethod
    def of(cls, layer: "MoeLayer", groups: Sequence[Group], **details: Any) -> Self:
        """A plan with these groups, put in the order of their smallest members."""
        ordered = tuple(sorted(groups, key=lambda group: min(group.members, default=-1)))
        facts = {name: getattr(layer, name) for name in LAYER_FACTS}
        return cls(module=layer.name, layer=layer.index, groups=ordered, **facts, **details)

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


def correction_of(layer: LayerPlan) -> Mapping[str, Any]:
    """A layer's figures of its correction; empty if there are none."""
    figures = layer.figures.get("correction")
    return figures if isinstance(figures, Mapping) else {}
