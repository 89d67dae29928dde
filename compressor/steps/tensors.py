"""The output's tensors of a plan: bytes that are copied, rows that are picked, rows that are mixed.

Nothing here is read before it is written: the `content` of an `OutputTensor` yields its bytes.
Merging acts on the stored tensors directly, since stock conversions (stacking, transposing) are
linear; a quantised checkpoint that must be mixed goes through the dequantised model instead
(`compressor.steps.cutting`)."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from fractions import Fraction
from functools import partial, reduce
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from compressor.checkpoint.reader import (
    DTYPE_NAMES,
    TORCH_DTYPES,
    Checkpoint,
    TensorInfo,
    is_finite,
    refuse_nan,
    tensor_bytes,
)
from compressor.devices import as_float64
from compressor.errors import CompressionError
from compressor.frozen import frozen
from compressor.model.layout import Role
from compressor.model.mtp import Head
from compressor.recipe.plan import ExpertPlan, Group, LayerPlan

# by which each further one of equal router rows is shorter: the precision of bfloat16
STEP = 2.0**-7
MAX_SHARD_BYTES = 5_000_000_000


Piece = bytes | memoryview
Weighted = Sequence[tuple[Tensor, float]]  # (member, coefficient)
Named = Iterator[tuple[str, Iterator[Piece]]]  # names of tensors, and their bytes in order


@frozen
class OutputTensor:
    """One tensor of the output. `content` yields its bytes in order; None: they are made with its
    decoder layer.

    `density` is how many of the model's weights an element stands for.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    decoder_layer: str
    content: Callable[[], Iterator[Piece]] | None = field(default=None, repr=False, compare=False)
    density: Fraction = Fraction(1)

    @classmethod
    def copy(cls, checkpoint: Checkpoint, name: str, decoder_layer: str) -> Self:
        """A stored tensor as it is."""
        info = checkpoint.tensors[name]
        content = partial(_mixed, checkpoint, name, [(name, 1.0)])
        return cls(name, info.dtype, info.shape, decoder_layer, content, info.density)

    @property
    def nbytes(self) -> int:
        """Bytes on disk."""
        return tensor_bytes(self.dtype, self.shape)

    @property
    def parameters(self) -> int:
        """Number of the model's weights."""
        return int(math.prod(self.shape) * self.density)


@frozen
class OutputJob:
    """One checkpoint to write. `produce` yields the names and bytes of a decoder layer's
    tensors."""

    outputs: tuple[OutputTensor, ...]
    decoder_layers: tuple[str, ...]  # in order; "" is the rest of the model
    produce: Callable[[str], Named]
    files: Mapping[str, bytes | Path]  # config, tokenizer and so on: contents, or a file to copy
    # by the first process; raises CompressionError when the written folder is not good
    verify: Callable[[Path], None]
    # config fields set to zero, as the tensors that they announce are left out
    zeroed: tuple[str, ...] = ()
    # tensors of the input that no part of the stock model, nor of a head that is kept, loads
    left_out: tuple[str, ...] = ()
    heads: tuple[Head, ...] = ()  # multi-token-prediction heads that are kept


def weighted_members(group: Group, router: bool = False) -> list[tuple[int, float]]:
    """Return the (member, coefficient) pairs of a group's merged expert, or of its router row,
    without zeros."""
    coefficients = group.router_coefficients
    if not router:
        coefficients = tuple(share * group.scale for share in group.coefficients)
    pairs = zip(group.members, coefficients, strict=True)
    return [(expert, share) for expert, share in pairs if share != 0]


def mix(members: Iterable[tuple[Tensor, float]]) -> Tensor:
    """sum(coefficient * member) of (member, coefficient), at least one, in float32 at the least;
    [...] each.

    Beside the sum, one member exists at a time if they are made as they are asked for.
    """
    total: Tensor | None = None
    for member, coefficient in members:
        wide = member.to(torch.promote_types(member.dtype, torch.float32), copy=total is None)
        total = wide.mul_(coefficient) if total is None else total.add_(wide, alpha=coefficient)
    assert total is not None
    return total


def mixed(name: str, members: Weighted) -> Tensor:
    """Return one row: the sum of (member, coefficient), cast once to the widest dtype; a single
    member as it is."""
    if not members:
        raise CompressionError(
            f"tensor {name!r}: all coefficients of a group are zero; give it a positive one"
        )
    if len(members) == 1 and members[0][1] == 1:
        return members[0][0]
    row = mix(members).to(reduce(torch.promote_types, [member.dtype for member, _ in members]))
    if not is_finite(row) and not all(is_finite(member) for member, _ in members):
        raise CompressionError(
            f"tensor {name!r} holds infinity for an expert that is to be merged, as a selection "
            "bias that switches it "
            "off does; use a strategy that drops experts, such as reap, or --protect it"
        )
    return refuse_overflow(name, row)


def mixed_rows(name: str, value: Tensor, dim: int, plan: LayerPlan, router: bool) -> Tensor:
    """Return a tensor in which the groups' rows along `dim` stand, then those of no routed
    expert."""
    rows = []
    for group in plan.groups:
        members = weighted_members(group, router)
        slices = [(value.select(dim, expert), share) for expert, share in members]
        rows.append(mixed(name, slices))
    rows += value.unbind(dim)[plan.experts :]
    return torch.stack(rows, dim)


def in_order_of(layer_names: Sequence[str], outputs: Iterable[OutputTensor]) -> list[OutputTensor]:
    """Tensors of no decoder layer, then those of each in turn; within one in the order given."""
    order = {decoder_layer: position for position, decoder_layer in enumerate(("", *layer_names))}
    return sorted(outputs, key=lambda output: order[output.decoder_layer])


def plan_outputs(
    checkpoint: Checkpoint,
    roles: Mapping[str, Role],
    plan: ExpertPlan,
    layer_names: Sequence[str],
) -> list[OutputTensor]:
    """Return the output's tensors with these roles in the order of the layers, stored as the base
    stores them."""
    plans = plan.by_module
    outputs = []
    for name, role in roles.items():
        layer_plan = plans.get(role.layer)
        info = checkpoint.tensors[name]
        if role.kind == "plain" or layer_plan is None:
            outputs.append(OutputTensor.copy(checkpoint, name, role.decoder_layer))
        elif role.kind in ("table", "fused"):
            shape = info.shape
            if role.kind == "fused":
                for group in layer_plan.groups:
                    _refuse_mixing([info], weighted_members(group, role.is_router))
                count = len(layer_plan.groups) + role.extra
                shape = (*shape[: role.dim], count, *shape[role.dim + 1 :])
            content = partial(_of_all_experts, checkpoint, info, role, layer_plan)
            outputs.append(
                OutputTensor(name, info.dtype, shape, role.decoder_layer, content, info.density)
            )
    for name, role, _, stored in expert_slots(roles, plans):
        infos = [checkpoint.tensors[member] for member, _ in stored] or [checkpoint.tensors[name]]
        _refuse_mixing(infos, stored)
        content = partial(_mixed, checkpoint, name, stored)
        dtype = widest(infos)
        outputs.append(
            OutputTensor(name, dtype, infos[0].shape, role.decoder_layer, content, infos[0].density)
        )
    return in_order_of(layer_names, outputs)


def expert_slots(
    roles: Mapping[str, Role], plans: Mapping[str, LayerPlan], parts: int = 1
) -> Iterator[tuple[str, Role, Group, list[tuple[str, float]]]]:
    """Yield the tensors of experts that are stored by themselves: name, role, group and stored
    members with shares.

    Members are the `parts` of stored experts. A group has no tensor, such as a scale, that none of
    its members has."""
    families: dict[str, dict[int, str]] = {}
    for name, role in roles.items():
        if role.kind == "expert" and role.layer in plans:
            families.setdefault(role.family, {})[role.expert] = name
    for names in families.values():
        role = roles[next(iter(names.values()))]
        for slot, group in enumerate(plans[role.layer].groups):
            members = [
                (member // parts, share)
                for member, share in weighted_members(group, role.is_router)
            ]
            stored = [(names[expert], share) for expert, share in members if expert in names]
            if not stored and members:
                continue
            name = names.get(slot, "")
            if not name:  # the name of another expert with its number
                words = stored[0][0].split(".")
                expert = members[0][0]
                *_, place = (
                    place
                    for place, word in enumerate(words)
                    if word.isdecimal() and int(word) == expert
                )
                words[place] = str(slot)
                name = ".".join(words)
            yield name, role, group, stored


def _refuse_mixing(infos: Iterable[TensorInfo], members: Sequence[tuple[object, float]]) -> None:
    """Refuse to average stored tensors that are not plain numbers."""
    is_picked = len(members) == 1 and members[0][1] == 1
    for info in infos:
        if not info.is_plain and not is_picked:
            raise CompressionError(
                f"tensor {info.name!r} is stored as {info.dtype}, which cannot be averaged; "
                "merging needs a plain dtype"
            )


def widest(infos: Iterable[TensorInfo]) -> str:
    """Return the dtype that holds every number of these stored tensors: their own if they are
    alike."""
    names = {info.dtype for info in infos}
    if len(names) == 1:
        return names.pop()
    return DTYPE_NAMES[reduce(torch.promote_types, [TORCH_DTYPES[name] for name in names])]


def stored_decoder_layer(outputs: Iterable[OutputTensor], decoder_layer: str) -> Named:
    """Return the names and bytes of a decoder layer's tensors that have their own contents."""
    for output in outputs:
        if output.decoder_layer == decoder_layer and output.content is not None:
            yield output.name, output.content()


def _mixed(
    checkpoint: Checkpoint, name: str, members: Sequence[tuple[str, float]]
) -> Iterator[Piece]:
    """Yield the bytes of a mean of stored tensors, or of a single one as it lies in its mapped
    file."""
    rows = [(checkpoint.read_checked(member), share) for member, share in members]
    yield tensor_bytes_view(mixed(name, rows))


def _of_all_experts(
    checkpoint: Checkpoint, info: TensorInfo, role: Role, plan: LayerPlan
) -> Iterator[Piece]:
    """Yield the bytes of a tensor of all experts: row by row, or at once where it is a table of
    them, or rows lie scattered or are compared."""
    dim = role.dim
    value = checkpoint.read(info.name)
    if role.kind == "table":
        yield tensor_bytes_view(remap_table(value, plan.remap()))
        return
    apart = role.is_router and len(plan.groups) < plan.experts
    # small tensors such as biases [1, E] or gates [H, E]
    if apart or math.prod(info.shape[:dim]) > 1:
        refuse_nan(info.name, info.file, value)
        rows = mixed_rows(info.name, value, dim, plan, role.is_router)
        yield tensor_bytes_view(distinct_rows(rows, dim, len(plan.groups)) if apart else rows)
        return
    row_members = [weighted_members(group, role.is_router) for group in plan.groups]
    row_members += [[(plan.experts + extra, 1.0)] for extra in range(role.extra)]
    for members in row_members:
        slices = [(value.select(dim, expert), share) for expert, share in members]
        for part, _ in slices:
            refuse_nan(info.name, info.file, part)
        yield tensor_bytes_view(mixed(info.name, slices))


def refuse_overflow(name: str, computed: Tensor) -> Tensor:
    """Return a tensor that was computed, in the dtype it is written in.

    Raises `CompressionError` if it holds Inf or NaN.
    """
    if not is_finite(computed):
        dtype = str(computed.dtype).removeprefix("torch.")
        raise CompressionError(
            f"tensor {name!r} overflows {dtype} when its experts are merged; plan with another "
            "merge or a smaller scale"
        )
    return computed


def remap_table(table: Tensor, remap: tuple[int, ...]) -> Tensor:
    """Replace expert ids [V, K] by slots; a dropped id becomes the lowest slot that its row does
    not name yet."""
    slots = torch.tensor(remap, dtype=torch.long)
    mapped = slots[table.long()]
    count = int(slots.max()) + 1
    for row, column in (mapped < 0).nonzero().tolist():
        taken = set(mapped[row].tolist())
        mapped[row, column] = next(slot for slot in range(count) if slot not in taken)
    return mapped.to(table.dtype)


def distinct_rows(value: Tensor, dim: int, experts: int) -> Tensor:
    """Return the tensor with each further one of equal router rows along `dim` shorter by `STEP`;
    itself if all differ.

    Rows are equal as those of an expert's parts are. While all parts are there, a token is routed
    to all or none of them, whatever the order of equal logits. Once some are dropped, the edge of
    the top-k can fall between two equal logits, and which of the two experts runs would depend on
    how a program orders ties. `experts` rows are compared, none of a bias. The first of equal rows
    then has the largest logit wherever that is positive."""
    before = equal_rows_before(value, dim, experts)
    if not bool(before.any()):
        return value
    factors = torch.ones(value.shape[dim], device=value.device)
    factors[:experts] -= STEP * before
    shape = [1] * value.dim()
    shape[dim] = -1
    return (value.float() * factors.view(shape)).to(value.dtype)


def equal_rows_before(value: Tensor, dim: int, experts: int) -> Tensor:
    """Return for each of the first `experts` rows along a dimension the number of equal rows before
    it.

    No row of a bias has any, nor one of a tensor on meta.
    """
    if value.is_meta or value.numel() == value.shape[dim]:
        return torch.zeros(experts)
    rows = value.detach().narrow(dim, 0, experts).movedim(dim, 0).flatten(1)
    kinds: Tensor = as_float64(rows).unique(dim=0, return_inverse=True)[1].to(value.device)
    return (kinds[:, None] == kinds).tril(-1).sum(1)


def tensor_bytes_view(tensor: Tensor) -> memoryview:
    """Return a tensor's bytes in order, without a copy where it is contiguous and on the CPU."""
    flat = tensor.detach().cpu().contiguous().view(-1)
    if flat.stride(0) != 1:  # a single element counts as contiguous whatever its stride
        flat = flat.clone(memory_format=torch.contiguous_format)
    return memoryview(flat.view(torch.uint8).numpy().data)


def tensor_output(name: str, tensor: Tensor, decoder_layer: str) -> OutputTensor:
    """Return the description of a tensor whose values are already known."""
    return OutputTensor(name, DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), decoder_layer)
