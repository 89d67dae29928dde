"""From a plan to the output's tensors: which bytes are copied, which rows are picked, which are mixed.

Nothing here is read before it is written: an `OutputTensor` says where its values come from, `pieces` yields them.
Merging acts on the stored tensors directly, since stock conversions (stacking, transposing) are linear; a quantised
checkpoint that must be mixed goes through the dequantised model instead (`compressor.surgery.conversion`).
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from compressor.checkpoint.headers import DTYPE_NAMES, TORCH_DTYPES, tensor_bytes
from compressor.checkpoint.reader import Checkpoint, contains_nan, refuse_nan
from compressor.errors import CompressionError
from compressor.model.architecture import MoeLayer
from compressor.model.layout import Layout, Role
from compressor.plans.plan import CompressionPlan, Group, LayerPlan


@dataclass(frozen=True, slots=True)
class Part:
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
    rows: tuple[tuple[Part, ...], ...] = ()
    dim: int | None = None
    remap: tuple[int, ...] | None = None  # for tables of expert ids: the new slot by old id, -1 for dropped

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


def _row(group: Group, router: bool, names: Mapping[int, str] | None, fused: str) -> tuple[Part, ...]:
    coefficients = group.router_coefficients if router else tuple(c * group.scale for c in group.coefficients)
    if names is not None:
        parts = [Part(names[e], None, c) for e, c in zip(group.members, coefficients, strict=True)]
    else:
        parts = [Part(fused, e, c) for e, c in zip(group.members, coefficients, strict=True)]
    return tuple(part for part in parts if part.coefficient != 0.0)


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
        layer_plan = plans.get(role.layer)
        if role.kind == "plain" or layer_plan is None:
            outputs.append(_copied(checkpoint, name, role))
        elif role.kind == "table":
            outputs.append(_remapped(checkpoint, name, role, layer_plan))
        elif role.kind == "fused":
            outputs.append(_picked(checkpoint, name, role, layer_plan))
        elif role.expert < len(layer_plan.groups):
            family = families[role.family]
            info = checkpoint.tensors[name]
            row = _row(layer_plan.groups[role.expert], role.is_router, family, "")
            outputs.append(OutputTensor(name, info.dtype, info.shape, role.unit, (row,)))
    order = {unit: position for position, unit in enumerate(("", *units))}
    return sorted(outputs, key=lambda output: order[output.unit])  # stable: the source's order within a unit


def _copied(checkpoint: Checkpoint, name: str, role: Role) -> OutputTensor:
    info = checkpoint.tensors[name]
    return OutputTensor(name, info.dtype, info.shape, role.unit, ((Part(name, None, 1.0),),))


def _picked(checkpoint: Checkpoint, name: str, role: Role, plan: LayerPlan) -> OutputTensor:
    info = checkpoint.tensors[name]
    rows = [_row(group, role.is_router, None, name) for group in plan.groups]
    rows += [(Part(name, plan.experts + position, 1.0),) for position in range(role.extra)]
    shape = (*info.shape[: role.dim], len(rows), *info.shape[role.dim + 1 :])
    return OutputTensor(name, info.dtype, shape, role.unit, tuple(rows), role.dim)


def _remapped(checkpoint: Checkpoint, name: str, role: Role, plan: LayerPlan) -> OutputTensor:
    info = checkpoint.tensors[name]
    return OutputTensor(name, info.dtype, info.shape, role.unit, ((Part(name, None, 1.0),),), remap=plan.remap())


def pieces(checkpoint: Checkpoint, output: OutputTensor) -> Iterator[Piece]:
    """The bytes of one output tensor in order; raises `CompressionError` naming a tensor that holds NaN."""
    if output.remap is not None:
        yield tensor_bytes_view(remap_table(checkpoint.read(output.rows[0][0].tensor), output.remap))
    elif output.dim is None:
        yield from _whole(checkpoint, output)
    else:
        yield from _along(checkpoint, output, output.dim)


def _untouched(row: tuple[Part, ...]) -> bool:
    return len(row) == 1 and row[0].coefficient == 1.0


def _whole(checkpoint: Checkpoint, output: OutputTensor) -> Iterator[Piece]:
    row = output.rows[0]
    if _untouched(row):
        info = checkpoint.tensors[row[0].tensor]
        refuse_nan(info.name, info.file, checkpoint.read(info.name))
        yield FileRange(checkpoint.path(info.name), info.begin, info.nbytes)
    else:
        yield tensor_bytes_view(_mix(checkpoint, output, row))


def _along(checkpoint: Checkpoint, output: OutputTensor, dim: int) -> Iterator[Piece]:
    name = output.rows[0][0].tensor
    info = checkpoint.tensors[name]
    outer, inner = math.prod(output.shape[:dim]), tensor_bytes(info.dtype, info.shape[dim + 1 :])
    if outer == 1:
        for row in output.rows:
            if _untouched(row):
                source = row[0]
                refuse_nan(name, info.file, _slice(checkpoint, source, dim))
                yield FileRange(checkpoint.path(name), info.begin + int(source.index or 0) * inner, inner)
            else:
                yield tensor_bytes_view(_mix(checkpoint, output, row))
        return
    whole = checkpoint.read(name)  # rows lie scattered: small tensors such as biases [1, E] or gates [H, E]
    refuse_nan(name, info.file, whole)
    rows = [
        whole.select(dim, int(row[0].index or 0)) if _untouched(row) else _mix(checkpoint, output, row)
        for row in output.rows
    ]
    yield tensor_bytes_view(torch.stack(rows, dim))


def _slice(checkpoint: Checkpoint, part: Part, dim: int | None) -> torch.Tensor:
    whole = checkpoint.read(part.tensor)
    return whole if part.index is None or dim is None else whole.select(dim, part.index)


def _mix(checkpoint: Checkpoint, output: OutputTensor, row: tuple[Part, ...]) -> torch.Tensor:
    """sum(coefficient * part) in float32, cast once to the stored dtype."""
    dtype = TORCH_DTYPES[output.dtype]
    if not dtype.is_floating_point or dtype.itemsize == 1:
        raise CompressionError(
            f"tensor {output.name!r} is stored as {output.dtype}, which cannot be averaged; merging needs a plain dtype"
        )
    if not row:
        raise CompressionError(f"tensor {output.name!r}: all coefficients of a group are zero; give it a positive one")
    wide = torch.promote_types(dtype, torch.float32)
    total = _slice(checkpoint, row[0], output.dim).to(wide, copy=True).mul_(row[0].coefficient)
    for part in row[1:]:
        total.add_(_slice(checkpoint, part, output.dim).to(wide), alpha=part.coefficient)
    if contains_nan(total):
        for part in row:
            refuse_nan(part.tensor, checkpoint.tensors[part.tensor].file, _slice(checkpoint, part, output.dim))
        raise CompressionError(f"tensor {output.name!r} overflows when its experts are merged; plan with another merge")
    return total.to(dtype)


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
    for row in (mapped < 0).any(dim=1).nonzero().flatten().tolist():
        taken = {int(slot) for slot in mapped[row] if slot >= 0}
        for column in (mapped[row] < 0).nonzero().flatten().tolist():
            free = next(slot for slot in range(count) if slot not in taken)
            mapped[row, column] = free
            taken.add(free)
    return mapped.to(table.dtype)


def tensor_bytes_view(tensor: torch.Tensor) -> memoryview:
    """A tensor's bytes in order, without a copy where it is contiguous and on the CPU."""
    flat = tensor.detach().cpu().contiguous().view(-1)
    if flat.stride(0) != 1:  # a single element counts as contiguous whatever its stride
        flat = flat.clone(memory_format=torch.contiguous_format)
    return memoryview(flat.view(torch.uint8).numpy().data) if flat.numel() else memoryview(b"")


def tensor_output(name: str, tensor: torch.Tensor, unit: str) -> OutputTensor:
    """The description of a tensor whose values are already known."""
    return OutputTensor(name, DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), unit)


def mix_rows(value: torch.Tensor, dim: int, extra: int, layer: MoeLayer, plan: LayerPlan, router: bool) -> torch.Tensor:
    """Surgery on a tensor in the model's own layout: the groups' rows along `dim`, then the extra rows."""
    rows = []
    for group in plan.groups:
        row = _row(group, router, None, "")
        if _untouched(row):
            rows.append(value.select(dim, int(row[0].index or 0)))
            continue
        first, *others = row  # added up as `_mix` does: the same bits
        total = value.select(dim, int(first.index or 0)).to(torch.float32, copy=True).mul_(first.coefficient)
        for part in others:
            total.add_(value.select(dim, int(part.index or 0)).float(), alpha=part.coefficient)
        rows.append(total.to(value.dtype))
    rows += [value.select(dim, layer.experts + position) for position in range(extra)]
    return torch.stack(rows, dim)
