"""From a plan to the output's tensors: which bytes are copied, which rows are picked, which are mixed.

Nothing here is read before it is written: an `OutputTensor` says where its values come from, `pieces` yields them.
Merging acts on the stored tensors directly, since stock conversions (stacking, transposing) are linear; a quantised
checkpoint that must be mixed goes through the dequantised model instead (`compressor.surgery.conversion`).
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import torch

from compressor.checkpoint.reader import (
    DTYPE_NAMES,
    TORCH_DTYPES,
    Checkpoint,
    TensorInfo,
    is_finite,
    refuse_nan,
    tensor_bytes,
)
from compressor.errors import CompressionError
from compressor.model.architecture import MoeLayer
from compressor.model.layout import Layout, Role
from compressor.recipe.plan import CompressionPlan, Group, LayerPlan

STEP = 2.0**-7  # by which each further one of equal router rows is shorter: the precision of bfloat16
MAX_SHARD_BYTES = 5_000_000_000


@dataclass(frozen=True, slots=True)
class Portion:
    """A share of one output row: a stored tensor, or its slice `index` along the output tensor's `dim`."""

    tensor: str
    index: int | None
    coefficient: float


@dataclass(frozen=True, slots=True)
class OutputTensor:
    """One tensor of the output. With `dim` None there is one row, the whole tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    unit: str
    rows: tuple[tuple[Portion, ...], ...] = ()
    dim: int | None = None
    remap: tuple[int, ...] | None = None  # for tables of expert ids: the new slot by old id, -1 for dropped
    apart: int = 0  # so many rows of a router that was cut, of which none may be equal

    @classmethod
    def copy(cls, info: TensorInfo, unit: str) -> Self:
        """A stored tensor as it is."""
        return cls(info.name, info.dtype, info.shape, unit, ((Portion(info.name, None, 1.0),),))

    @property
    def nbytes(self) -> int:
        """Bytes on disk."""
        return tensor_bytes(self.dtype, self.shape)

    @property
    def parameters(self) -> int:
        """Number of stored elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class FileRange:
    """Bytes to copy from a file as they are."""

    path: Path
    offset: int
    length: int


Piece = FileRange | bytes | memoryview
Named = Iterator[tuple[str, Iterator[Piece]]]  # names of tensors, and their bytes in order


@dataclass(frozen=True, slots=True)
class OutputJob:
    """One checkpoint to write. `produce` yields, for a unit, each of its tensors' names and bytes."""

    outputs: tuple[OutputTensor, ...]
    units: tuple[str, ...]  # in order; "" is the rest of the model
    produce: Callable[[str], Named]
    files: Mapping[str, bytes | Path]  # config, tokenizer and so on: contents, or a file to copy
    verify: Callable[[Path], None]  # by the first process; raises CompressionError when the written folder is not good
    zeroed: tuple[str, ...] = ()  # config fields set to zero, as the tensors that they announce are left out

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(output.nbytes for output in self.outputs)


def weighted_members(group: Group, router: bool = False) -> list[tuple[int, float]]:
    """(member, coefficient) of what a group's merged expert, or its router row, is the sum of; none of them is 0."""
    coefficients = group.router_coefficients if router else (c * group.scale for c in group.coefficients)
    return [(expert, c) for expert, c in zip(group.members, coefficients, strict=True) if c != 0]


def mix(members: Iterable[tuple[torch.Tensor, float]], wide: torch.dtype = torch.float32) -> torch.Tensor:
    """sum(coefficient * member) of (member, coefficient), at least one, in the dtype `wide`; [...] each.

    Beside the sum, one member exists at a time if they are made as they are asked for.
    """
    total: torch.Tensor | None = None
    for member, coefficient in members:
        if total is None:
            total = member.to(wide, copy=True).mul_(coefficient)
        else:
            total.add_(member.to(wide), alpha=coefficient)
    assert total is not None
    return total


def in_order_of(units: Sequence[str], outputs: Iterable[OutputTensor]) -> list[OutputTensor]:
    """Tensors of no decoder layer, then those of each in turn; within one in the order given."""
    order = {unit: position for position, unit in enumerate(("", *units))}
    return sorted(outputs, key=lambda output: order[output.unit])


def plan_outputs(
    checkpoint: Checkpoint, layout: Layout, plan: CompressionPlan, units: tuple[str, ...]
) -> list[OutputTensor]:
    """Every tensor of the output in the order of the layers, stored as the source stores it."""
    plans = {layer_plan.module: layer_plan for layer_plan in plan.layers}
    families: dict[str, dict[int, str]] = {}
    for name, role in layout.roles.items():
        if role.kind == "expert":
            families.setdefault(role.family, {})[role.expert] = name
    outputs = []
    for name, role in layout.roles.items():
        layer_plan, info = plans.get(role.layer), checkpoint.tensors[name]
        copied = OutputTensor.copy(info, role.unit)
        if role.kind == "plain" or layer_plan is None:
            outputs.append(copied)
        elif role.kind == "table":
            outputs.append(replace(copied, remap=layer_plan.remap()))
        elif role.kind == "fused":
            outputs.append(_picked(info, role, layer_plan))
        elif role.expert < len(layer_plan.groups):
            members = weighted_members(layer_plan.groups[role.expert], role.is_router)
            row = tuple(Portion(families[role.family][expert], None, share) for expert, share in members)
            outputs.append(replace(copied, rows=(row,)))
    return in_order_of(units, outputs)


def _picked(info: TensorInfo, role: Role, plan: LayerPlan) -> OutputTensor:
    rows = [
        tuple(Portion(info.name, expert, share) for expert, share in weighted_members(group, role.is_router))
        for group in plan.groups
    ]
    rows += [(Portion(info.name, plan.experts + position, 1.0),) for position in range(role.extra)]
    shape = (*info.shape[: role.dim], len(rows), *info.shape[role.dim + 1 :])
    apart = len(plan.groups) if role.is_router and len(plan.groups) < plan.experts else 0
    return OutputTensor(info.name, info.dtype, shape, role.unit, tuple(rows), role.dim, apart=apart)


def stored_unit(checkpoint: Checkpoint, outputs: Sequence[OutputTensor], unit: str) -> Named:
    """Names and bytes of a unit's tensors, made from the stored ones."""
    return ((output.name, pieces(checkpoint, output)) for output in outputs if output.unit == unit)


def pieces(checkpoint: Checkpoint, output: OutputTensor) -> Iterator[Piece]:
    """The bytes of one output tensor in order; raises `CompressionError` naming a tensor that holds NaN."""
    dim = output.dim
    if output.remap is not None:
        yield tensor_bytes_view(remap_table(checkpoint.read(output.rows[0][0].tensor), output.remap))
    elif dim is None or (math.prod(output.shape[:dim]) == 1 and not output.apart):
        for row in output.rows:
            if not _untouched(row):
                yield tensor_bytes_view(_mixed(checkpoint, output, row))
                continue
            info, index = checkpoint.tensors[row[0].tensor], row[0].index or 0
            refuse_nan(info.name, info.file, _slice(checkpoint, row[0], dim))
            nbytes = info.nbytes if dim is None else tensor_bytes(info.dtype, info.shape[dim + 1 :])
            yield FileRange(checkpoint.path(info.name), info.begin + index * nbytes, nbytes)
    else:  # rows lie scattered, or are looked at together: small tensors such as biases [1, E] or gates [H, E]
        info = checkpoint.tensors[output.name]
        whole = checkpoint.read(info.name)
        refuse_nan(info.name, info.file, whole)
        rows = [
            whole.select(dim, row[0].index or 0) if _untouched(row) else _mixed(checkpoint, output, row)
            for row in output.rows
        ]
        made = torch.stack(rows, dim)
        yield tensor_bytes_view(told_apart(made, dim, output.apart) if output.apart else made)


def _untouched(row: tuple[Portion, ...]) -> bool:
    return len(row) == 1 and row[0].coefficient == 1.0


def _slice(checkpoint: Checkpoint, part: Portion, dim: int | None) -> torch.Tensor:
    whole = checkpoint.read(part.tensor)
    return whole if part.index is None or dim is None else whole.select(dim, part.index)


def _mixed(checkpoint: Checkpoint, output: OutputTensor, row: tuple[Portion, ...]) -> torch.Tensor:
    """An output row that is mixed, in float32 at least, cast once to the stored dtype."""
    dtype = TORCH_DTYPES[output.dtype]
    if not dtype.is_floating_point or dtype.itemsize == 1:
        raise CompressionError(
            f"tensor {output.name!r} is stored as {output.dtype}, which cannot be averaged; merging needs a plain dtype"
        )
    if not row:
        raise CompressionError(f"tensor {output.name!r}: all coefficients of a group are zero; give it a positive one")
    members = ((_slice(checkpoint, part, output.dim), part.coefficient) for part in row)
    total = mix(members, torch.promote_types(dtype, torch.float32))
    if not is_finite(made := total.to(dtype)):
        for part in row:
            refuse_nan(part.tensor, checkpoint.tensors[part.tensor].file, _slice(checkpoint, part, output.dim))
    return refuse_overflow(output.name, made)


def refuse_overflow(name: str, made: torch.Tensor) -> torch.Tensor:
    """A tensor that was computed, in the dtype it is written in; raises `CompressionError` if it holds Inf or NaN."""
    if not is_finite(made):
        dtype = str(made.dtype).removeprefix("torch.")
        raise CompressionError(
            f"tensor {name!r} overflows {dtype} when its experts are merged; plan with another merge or a smaller scale"
        )
    return made


def remap_table(table: torch.Tensor, remap: tuple[int, ...]) -> torch.Tensor:
    """Replace expert ids [V, K] by slots; a dropped id becomes the lowest slot that its row does not name yet."""
    slots = torch.tensor(remap, dtype=torch.long)
    ids = table.long()
    if ids.numel() and (int(ids.min()) < 0 or int(ids.max()) >= len(remap)):
        raise CompressionError(
            f"an expert table names expert {int(ids.max())} of {len(remap)}; the checkpoint is damaged"
        )
    mapped = slots[ids]
    count = int(slots.max()) + 1
    for row, column in (mapped < 0).nonzero().tolist():
        taken = set(mapped[row].tolist())
        mapped[row, column] = next(slot for slot in range(count) if slot not in taken)
    return mapped.to(table.dtype)


def is_cut(layer: MoeLayer, plan: LayerPlan) -> bool:
    """Whether a token may visit some of an expert's parts only: some go, or its top-k is no multiple of them."""
    return len(plan.groups) < layer.experts or layer.top_k % layer.parts != 0


def told_apart(value: torch.Tensor, dim: int, experts: int) -> torch.Tensor:
    """The tensor with each further one of equal router rows along `dim` shorter by `STEP`; itself if all differ.

    Rows are equal as those of an expert's parts are. While all parts are there, a token visits all or none of an
    expert's, whatever the order of equal logits. Once some are dropped, the edge of the top-k can fall between two
    equal logits, and which of the two experts runs would depend on how a program orders ties. `experts` rows are
    looked at, none of a bias. The first of equal rows then has the largest logit wherever that is positive.
    """
    before = equal_before(value, dim, experts)
    if not bool(before.any()):
        return value
    factors = torch.ones(value.shape[dim], device=value.device)
    factors[:experts] -= STEP * before
    shape = [1] * value.dim()
    shape[dim] = -1
    return (value.float() * factors.view(shape)).to(value.dtype)


def has_equal(value: torch.Tensor, dim: int, experts: int) -> bool:
    """Whether two of the first `experts` rows along `dim` are equal; no bias has any, nor has a tensor on meta."""
    return bool(equal_before(value, dim, experts).any())


def equal_before(value: torch.Tensor, dim: int, experts: int) -> torch.Tensor:
    """For each of the first `experts` rows along a dimension the number of rows before it that are equal."""
    if value.is_meta or value.numel() == value.shape[dim]:
        return torch.zeros(experts)
    rows = value.detach().narrow(dim, 0, experts).movedim(dim, 0).flatten(1)
    alike = (rows[:, None, :1] == rows[None, :, :1]).all(2)  # most rows differ in their first number
    for one, other in alike.tril(-1).nonzero().tolist():
        alike[one, other] = torch.equal(rows[one], rows[other])
    return alike.tril(-1).sum(1)


def tensor_bytes_view(tensor: torch.Tensor) -> memoryview:
    """A tensor's bytes in order, without a copy where it is contiguous and on the CPU."""
    flat = tensor.detach().cpu().contiguous().view(-1)
    if flat.stride(0) != 1:  # a single element counts as contiguous whatever its stride
        flat = flat.clone(memory_format=torch.contiguous_format)
    return memoryview(flat.view(torch.uint8).numpy().data) if flat.numel() else memoryview(b"")


def tensor_output(name: str, tensor: torch.Tensor, unit: str) -> OutputTensor:
    """The description of a tensor whose values are already known."""
    return OutputTensor(name, DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), unit)
