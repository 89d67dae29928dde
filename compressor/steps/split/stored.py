"""Parts of a quantised checkpoint's experts, cut from its stored tensors where they are made of whole stored blocks.

Gate and up projections, and all that is stored beside them, count neurons along their rows; the down projection along
its columns. So a part takes its own entries, and no number is rounded anew. What the down projection is multiplied by
goes into its scales, which a power of two leaves exact.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from compressor.checkpoint.reader import TensorInfo, is_finite, modelopt_file
from compressor.errors import CompressionError
from compressor.model.experts import width_of
from compressor.model.layout import Role, expert_prefixes
from compressor.model.moe_layer import MoeLayer
from compressor.model.opened import OpenModel
from compressor.recipe.plan import ExpertPlan, LayerPlan
from compressor.steps.configuration import renumbered_quantization
from compressor.steps.cutting import cut_router
from compressor.steps.split.tensors import Factors, SplitModel, split_beside
from compressor.steps.tensors import OutputTensor, Piece, in_order_of, remap_table, tensor_bytes_view

PLAIN = ("F32", "BF16", "F16")
SCALES = (".weight_scale_inv", ".weight_scale")
GLOBAL = (".weight_scale_2", ".weight_global_scale")  # by which all scales are multiplied, or are divided
COMPANIONS = (*SCALES, *GLOBAL, ".weight_packed", ".weight_zero_point", ".input_scale", ".input_global_scale")
EXPONENTS = ("F8_E8M0", "U8")
METHODS = ("fp8", "mxfp4", "compressed-tensors", "modelopt")
FORMATS = (  # of compressed-tensors
    *("float-quantized", "int-quantized", "naive-quantized"),
    *("pack-quantized", "nvfp4-pack-quantized", "mxfp4-pack-quantized"),
)
MXFP4 = 32  # neurons under one scale of a down projection
PACKED = 8  # numbers of 4 bits in one of 32
FUSED = re.compile(r"\.(gate_up|down)_proj_(blocks|scales|bias)")


@dataclass(frozen=True, slots=True)
class Cut:
    """How one expert's stored tensor is shared out to its parts."""

    axis: int = 0  # the dimension that counts neurons
    neurons: int = 0  # under one entry along it; 0: every part has the whole tensor
    paired: bool = False  # the gate and up rows of a neuron stand beside each other
    factor: float = 1.0  # what plain numbers, scales and exponents are multiplied by
    says_shape: bool = False  # two numbers: the shape of the packed weight

    def shape(self, shape: tuple[int, ...], parts: int) -> tuple[int, ...]:
        """That of a part's tensor."""
        if not self.neurons:
            return shape
        return (*shape[: self.axis], shape[self.axis] // parts, *shape[self.axis + 1 :])

    def part(self, name: str, value: Tensor, neurons: Tensor) -> Tensor:
        """One expert's tensor for a part of these neurons [n], whole blocks in ascending order, times the factor."""
        if self.says_shape:
            shape = value.clone()
            shape[self.axis] = len(neurons)
            return shape
        if self.neurons:
            rows = neurons[:: self.neurons] // self.neurons
            rows = torch.stack([2 * rows, 2 * rows + 1], dim=1).flatten() if self.paired else rows
            raw = value.view(torch.uint8) if value.element_size() == 1 else value  # float8 has few operations
            value = raw.index_select(self.axis, rows).view(value.dtype)
        if self.factor == 1.0:
            return value
        if value.dtype == torch.uint8:
            exponents = value.int() + round(math.log2(self.factor))
            scaled, fits = exponents.to(torch.uint8), bool((exponents < 255).all())
        else:
            scaled = (value.float() * self.factor).to(value.dtype)
            fits = is_finite(scaled.float())
        if not fits:
            raise CompressionError(f"tensor {name!r} times {self.factor:g} overflows {value.dtype}; download it again")
        return scaled


@dataclass(frozen=True, slots=True)
class StoredParts:
    """How every expert's stored tensors are cut; `block` neighbouring neurons stay together."""

    factors: Factors
    block: int
    cuts: Mapping[str, Cut]

    def check(self, orders: Mapping[str, Tensor]) -> None:
        """Refuse orders of neurons [E, I] that tear a block apart."""
        for name, order in orders.items():
            runs = order.unflatten(1, (-1, self.block))
            first = runs[..., :1]
            if not bool(((first % self.block == 0) & (runs == first + torch.arange(self.block))).all()):
                raise CompressionError(f"{name}: its neurons are not dealt out in blocks of {self.block}; restore them")

    def cut(self, model: OpenModel, plan: ExpertPlan) -> list[OutputTensor]:
        """The output's tensors of a plan that keeps or drops parts; reading them needs the neurons' order."""
        checkpoint, roles, parts = model.checkpoint, model.layout.roles, self.factors.parts
        plans = {each.module: each for each in plan.layers}
        layers = {layer.name: layer for layer in model.architecture.layers}
        families: dict[str, dict[str, list[str]]] = {}  # of tensors of single experts, by layer
        for name, role in roles.items():
            if role.kind == "expert":
                families.setdefault(role.layer, {}).setdefault(role.family, []).append(name)
        outputs = list[OutputTensor]()
        for name, role in roles.items():
            info = checkpoint.tensors[name]
            output = OutputTensor.copy(checkpoint, name, role.unit)
            if role.kind == "plain":
                outputs.append(output)
                continue
            layer, cut_plan = layers[role.layer], plans[role.layer]
            members = [group.members[0] for group in cut_plan.groups]
            if role.kind == "table" or role.is_router:
                shape = list(info.shape)
                if role.kind == "table":
                    shape[-1] *= parts
                else:
                    shape[role.dim] = len(members) + role.extra
                content = partial(self._beside, model, name, layer, cut_plan)
                outputs.append(replace(output, shape=tuple(shape), content=content))
            elif role.kind == "fused":
                part_shape = self.cuts[name].shape(info.shape[1:], parts)
                content = partial(self._parts, model, role, [(name, member) for member in members])
                outputs.append(replace(output, shape=(len(members), *part_shape), content=content))
            elif own_families := families.pop(role.layer, None):
                prefix = expert_prefixes(model.layout, layer)[0]
                by_expert = [sorted(own, key=lambda name: roles[name].expert) for own in own_families.values()]
                for slot, member in enumerate(members):
                    for names in by_expert:
                        stored = checkpoint.tensors[names[member // parts]]
                        renamed = f"{prefix.rpartition('.')[0]}.{slot}{names[0].removeprefix(prefix)}"
                        part_shape = self.cuts[stored.name].shape(stored.shape, parts)
                        content = partial(self._parts, model, role, [(stored.name, member)])
                        outputs.append(OutputTensor(renamed, stored.dtype, part_shape, role.unit, content, stored.each))
        return in_order_of(model.architecture.units, outputs)

    def _parts(self, model: OpenModel, role: Role, wanted: Iterable[tuple[str, int]]) -> Iterator[Piece]:
        """The bytes of parts, each from a stored tensor by the part's number."""
        assert isinstance(model.partial, SplitModel) and model.partial.orders is not None
        order, read = model.partial.orders[role.layer].long(), dict[str, Tensor]()
        for name, member in wanted:
            if name not in read:
                read = {name: model.checkpoint.read_checked(name)}
            expert, part = divmod(member, self.factors.parts)
            value = read[name][expert] if role.kind == "fused" else read[name]
            yield tensor_bytes_view(self.cuts[name].part(name, value, order[expert].chunk(self.factors.parts)[part]))

    def _beside(self, model: OpenModel, name: str, layer: MoeLayer, plan: LayerPlan) -> Iterator[Piece]:
        """The bytes of a router's tensor, or of a table of expert ids."""
        assert model.whole is not None
        whole = next(each for each in model.whole.architecture.layers if each.name == layer.name)
        key, role = model.partial.plain_keys.targets[name], model.layout.roles[name]
        split = split_beside({key: model.checkpoint.read_checked(name)}, whole, [key], self.factors)[key]
        is_table = role.kind == "table"
        yield tensor_bytes_view(
            remap_table(split, plan.remap()) if is_table else cut_router(name, split, role.dim, layer, plan)
        )


def stored_parts(whole: OpenModel, factors: Factors) -> StoredParts:
    """How the stored tensors of a quantised model are cut; raises `CompressionError` saying why they cannot be."""
    layout, configs = whole.layout, [whole.checkpoint.quantization, modelopt_file(whole.checkpoint.folder)]
    method = str(configs[0].get("quant_method"))
    formats = set(_values(configs, "format")) - {None} if method == "compressed-tensors" else set()
    if not layout.regular or method not in METHODS or not formats <= set(FORMATS):
        raise CompressionError(f"how {method} stores experts is not known")
    if math.frexp(factors.output)[0] != 0.5:
        raise CompressionError(f"scales times {factors.output:g} are rounded")
    sizes = [
        value for name in ("weight_block_size", "group_size", "block_structure") for value in _values(configs, name)
    ]
    flat = [each for value in sizes for each in (value if isinstance(value, list) else [value])]
    blocks = {int(each) for each in flat if isinstance(each, int) and each > 0}
    layers = {layer.name: layer for layer in whole.architecture.layers}
    for layer in layers.values():
        _refuse_named(configs, whole, layer, factors.parts)
    suffixes = dict[str, set[str]]()
    for role in layout.roles.values():
        family, _, suffix = role.family.rpartition("|")
        suffixes.setdefault(family, set()).add(suffix)
    cuts = dict[str, Cut]()
    for name, role in layout.roles.items():
        if role.kind == "plain":
            continue
        info, module = whole.checkpoint.tensors[name], whole.partial.model.get_submodule(role.layer)
        if role.is_router or role.kind == "table":
            known = info.dtype in PLAIN or not role.is_router
            found = Cut() if known and whole.partial.plain_keys.patterns[name] is None else None
        elif role.kind == "expert":
            found = _cut_of_one(info, role, width_of(module), factors.output, suffixes)
        else:
            found = _cut_of_mxfp4(info, role, module, factors)
            blocks |= set() if name.endswith("_bias") else {MXFP4}
        if found is None:
            raise CompressionError(f"how {name} is stored is not known")
        cuts[name] = found
        blocks |= {PACKED} if name.endswith("_packed") else set()
    block = math.lcm(*blocks, *(cut.neurons or 1 for cut in cuts.values()))
    for name in layers:
        width = width_of(whole.partial.model.get_submodule(name)) // factors.parts
        if width % block:
            raise CompressionError(f"parts of {width} neurons are not made of whole blocks of {block}")
    return StoredParts(factors, block, cuts)


def _values(node: Any, wanted: str) -> Iterator[Any]:
    for key, value in node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ():
        if key == wanted:
            yield value
        yield from _values(value, wanted)


def _refuse_named(configs: list[Any], whole: OpenModel, layer: MoeLayer, parts: int) -> None:
    """Refuse names that do not count experts, and a quantisation that speaks of single ones, which become several."""
    prefixes = expert_prefixes(whole.layout, layer)
    for name, role in whole.layout.roles.items():
        if role.kind == "expert" and role.layer == layer.name and not name.startswith(f"{prefixes.get(role.expert)}."):
            raise CompressionError(f"the names of tensors of {layer.name} do not tell experts apart")
    for part in range(parts):
        renames = {old: f"{old.rpartition('.')[0]}.{expert * parts + part}" for expert, old in prefixes.items()}
        if renumbered_quantization(configs, renames) != configs:
            raise CompressionError("its quantization_config speaks of single experts")


def _cut_of_one(
    info: TensorInfo, role: Role, width: int, factor: float, suffixes: Mapping[str, set[str]]
) -> Cut | None:
    """That of a tensor which is one expert's alone; None where it is not known how it counts neurons."""
    family, _, suffix = role.family.rpartition("|")
    axis = int(".down_proj" in role.family.removeprefix(role.layer).partition("|")[0])
    is_plain, is_scale, is_weight = info.dtype in PLAIN, suffix in SCALES, suffix in ("", ".weight_packed")
    if suffix == ".weight_shape" and info.shape == (2,):
        return Cut(axis, says_shape=True)
    carrier = next((each for each in (*GLOBAL, *SCALES) if each in suffixes[family]), "")  # of the factor
    if suffix not in ("", *COMPANIONS) or (is_weight and bool(carrier) == is_plain):
        return None
    if is_scale and suffix == carrier and not is_plain and info.dtype not in EXPONENTS:
        return None
    own = factor if axis and suffix == carrier else 1.0
    own = 1 / own if suffix == ".weight_global_scale" else own
    if math.prod(info.shape) == 1 or (not is_weight and len(info.shape) == 2 and info.shape[axis] == 1):
        return Cut(axis, factor=own)  # the same for all neurons
    counts = len(info.shape) == 2 and width % info.shape[axis] == 0
    return Cut(axis, width // info.shape[axis], factor=own) if counts else None


def _cut_of_mxfp4(info: TensorInfo, role: Role, module: Any, factors: Factors) -> Cut | None:
    """That of a tensor which holds all experts: blocks [E, O, G, 16], scales [E, O, G], biases [E, O]."""
    matched, width = FUSED.fullmatch(info.name.removeprefix(info.name.rpartition(".")[0])), width_of(module)
    if matched is None or role.dim or role.extra or not module.has_gate or module.is_concatenated:
        return None
    name, kind = matched.groups()
    if name == "gate_up":
        return Cut(0, 1, paired=True) if info.shape[1] == 2 * width else None
    if kind == "bias":
        return Cut(factor=factors.output / factors.parts)
    counts = info.dtype == "U8" and info.shape[2] * MXFP4 == width
    return Cut(1, MXFP4, factor=factors.output if kind == "scales" else 1.0) if counts else None
