"""Parts of a quantised checkpoint's experts, cut from its stored tensors where they are made of
whole stored blocks.

Gate and up projections, and all that is stored beside them, count neurons along their rows; the
down projection along its columns. So a part takes its own entries, and no number is rounded anew.
What the down projection is multiplied by goes into its scales, which a power of two leaves exact.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from compressor.checkpoint.reader import TensorInfo, modelopt_file
from compressor.errors import CompressionError
from compressor.frozen import frozen
from compressor.model.experts import width_of
from compressor.model.layout import Role, expert_prefixes
from compressor.model.moe_layer import MoeLayer
from compressor.model.opened import OpenModel
from compressor.recipe.plan import ExpertPlan, LayerPlan
from compressor.steps.configuration import renumbered_quantization
from compressor.steps.cutting import cut_router
from compressor.steps.split.tensors import Factors, SplitModel, split_beside
from compressor.steps.tensors import (
    OutputTensor,
    Piece,
    expert_slots,
    in_order_of,
    refuse_overflow,
    remap_table,
    tensor_bytes_view,
)

PLAIN = ("F32", "BF16", "F16")
SCALES = (".weight_scale_inv", ".weight_scale")
GLOBAL = (".weight_scale_2", ".weight_global_scale")  # multiplies or divides all scales
COMPANIONS = (
    *SCALES,
    *GLOBAL,
    ".weight_packed",
    ".weight_zero_point",
    ".input_scale",
    ".input_global_scale",
)
EXPONENTS = ("F8_E8M0", "U8")
METHODS = ("fp8", "mxfp4", "compressed-tensors", "modelopt")
BLOCK_SIZES = ("weight_block_size", "group_size", "block_structure")  # in a quantisation's JSON
MXFP4 = 32  # neurons under one scale of a down projection
PACKED = 8  # numbers of 4 bits in one of 32
FUSED = re.compile(r"\.(gate_up|down)_proj_(blocks|scales|bias)")


@frozen
class Cut:
    """The way in which one expert's stored tensor is divided among its parts."""

    axis: int = 0  # the dimension that counts neurons
    neurons: int = 0  # under one entry along it; 0: every part has the whole tensor
    paired: bool = False  # the gate and up rows of a neuron stand beside each other
    factor: float = 1.0  # multiplies plain numbers, scales and exponents
    says_shape: bool = False  # two numbers: the shape of the packed weight

    def shape(self, shape: tuple[int, ...], parts: int) -> tuple[int, ...]:
        """Return the shape of a part's tensor."""
        if not self.neurons:
            return shape
        return (*shape[: self.axis], shape[self.axis] // parts, *shape[self.axis + 1 :])

    def part(self, name: str, value: Tensor, neurons: Tensor) -> Tensor:
        """One expert's tensor for a part of these neurons [n], whole blocks in ascending order,
        times the factor."""
        if self.says_shape:
            shape = value.clone()
            shape[self.axis] = len(neurons)
            return shape
        if self.neurons:
            rows = neurons[:: self.neurons] // self.neurons
            if self.paired:
                rows = torch.stack([2 * rows, 2 * rows + 1], dim=1).flatten()
            # float8 has few operations
            raw = value.view(torch.uint8) if value.element_size() == 1 else value
            value = raw.index_select(self.axis, rows).view(value.dtype)
        if self.factor == 1.0:
            return value
        if value.dtype == torch.uint8:
            return value + round(math.log2(self.factor))  # exponents
        scaled = (value.float() * self.factor).to(value.dtype)
        refuse_overflow(name, scaled.float())
        return scaled


@frozen
class StoredParts:
    """The cuts of every expert's stored tensors of the `whole` model; `block` neighbouring neurons
    stay together."""

    whole: OpenModel
    factors: Factors
    block: int
    cuts: Mapping[str, Cut]

    def cut(self, model: OpenModel, plan: ExpertPlan) -> list[OutputTensor]:
        """Return the output's tensors of a plan that keeps or drops parts; reading them needs the
        neurons' order."""
        roles = model.layout.roles
        plans = plan.by_module
        layers = {layer.name: layer for layer in model.architecture.layers}
        parts = self.factors.parts
        finished = set[str]()  # layers whose experts are stored by themselves
        outputs = []
        for name, role in roles.items():
            output = OutputTensor.copy(model.checkpoint, name, role.decoder_layer)
            if role.kind == "plain":
                outputs.append(output)
                continue
            layer_plan = plans[role.layer]
            if role.kind == "table" or role.is_router:
                shape = list(output.shape)
                if role.kind == "table":
                    shape[-1] *= parts
                else:
                    shape[role.dim] = len(layer_plan.groups) + role.extra
                content = partial(self._beside, model, name, layers[role.layer], layer_plan)
                outputs.append(replace(output, shape=tuple(shape), content=content))
            elif role.kind == "fused":
                experts = [(name, group.members[0]) for group in layer_plan.groups]
                cut_shape = self.cuts[name].shape(output.shape[1:], parts)
                content = partial(self._parts, model, role, experts)
                outputs.append(replace(output, shape=(len(experts), *cut_shape), content=content))
            elif role.layer not in finished:
                finished.add(role.layer)
                single = {key: value for key, value in roles.items() if value.layer == role.layer}
                slots = expert_slots(single, {role.layer: layer_plan}, parts)
                for part_name, _, group, members in slots:
                    stored = model.checkpoint.tensors[members[0][0]]
                    experts = [(stored.name, group.members[0])]
                    outputs.append(
                        OutputTensor(
                            part_name,
                            stored.dtype,
                            self.cuts[stored.name].shape(stored.shape, parts),
                            layers[role.layer].decoder_layer,
                            partial(self._parts, model, roles[stored.name], experts),
                            stored.density,
                        )
                    )
        return in_order_of(model.architecture.decoder_layers, outputs)

    def _beside(
        self, model: OpenModel, name: str, layer: MoeLayer, plan: LayerPlan
    ) -> Iterator[Piece]:
        """Yield a router's tensor, or a table of expert ids, for the parts that stay."""
        role = model.layout.roles[name]
        (whole,) = (whole for whole in self.whole.architecture.layers if whole.name == layer.name)
        key = model.partial.plain_keys.targets[name]
        split = split_beside(key, model.checkpoint.read_checked(name), whole, self.factors)
        if role.kind == "table":
            yield tensor_bytes_view(remap_table(split, plan.remap()))
        else:
            yield tensor_bytes_view(cut_router(name, split, role.dim, layer, plan))

    def _parts(
        self, model: OpenModel, role: Role, members: Iterable[tuple[str, int]]
    ) -> Iterator[Piece]:
        """Yield the bytes of parts, each from a stored tensor by the part's number."""
        assert isinstance(model.partial, SplitModel) and model.partial.orders is not None
        order = model.partial.orders[role.layer].long()
        read = {}
        for name, member in members:
            if name not in read:
                read = {name: model.checkpoint.read_checked(name)}
            expert, part = divmod(member, self.factors.parts)
            value = read[name][expert] if role.kind == "fused" else read[name]
            neurons = order[expert].chunk(self.factors.parts)[part]
            yield tensor_bytes_view(self.cuts[name].part(name, value, neurons))


def stored_parts(whole: OpenModel, factors: Factors) -> StoredParts:
    """Find how to cut the stored tensors of a quantised model; raises `CompressionError` saying why
    they cannot be."""
    configs = [whole.checkpoint.quantization, modelopt_file(whole.checkpoint.folder)]
    method = configs[0].get("quant_method")
    if not whole.layout.regular or method not in METHODS:
        raise CompressionError(f"how {method} stores experts is not known")
    if math.frexp(factors.output)[0] != 0.5:
        raise CompressionError(f"scales times {factors.output:g} are rounded")
    for layer in whole.architecture.layers:
        # of single experts, which become several
        renames = {
            old: f"{old.rpartition('.')[0]}.{expert * factors.parts + 1}"
            for expert, old in expert_prefixes(whole.layout, layer).items()
        }
        if renumbered_quantization(configs, renames) != configs:
            raise CompressionError("its quantization_config speaks of single experts")
    suffixes = dict[str, set[str]]()  # of what is stored beside a weight
    for role in whole.layout.roles.values():
        family, _, suffix = role.family.rpartition("|")
        suffixes.setdefault(family, set()).add(suffix)
    cuts = {}
    blocks = {*_block_sizes(configs)}
    for name, role in whole.layout.roles.items():
        if role.kind == "plain":
            continue
        info = whole.checkpoint.tensors[name]
        cut = _cut_of(whole, info, role, factors, suffixes)
        if cut is None:
            raise CompressionError(f"how {name} is stored is not known")
        cuts[name] = cut
        blocks.add(cut.neurons or 1)
        if role.kind == "fused" and not role.is_router and not name.endswith("_bias"):
            blocks.add(MXFP4)
        if name.endswith("_packed"):
            blocks.add(PACKED)
    block = math.lcm(*blocks)
    for layer in whole.architecture.layers:
        width = width_of(whole.partial.model.get_submodule(layer.name)) // factors.parts
        if width % block:
            raise CompressionError(
                f"parts of {width} neurons are not made of whole blocks of {block}"
            )
    return StoredParts(whole, factors, block, cuts)


def _block_sizes(node: Any) -> Iterator[int]:
    """Yield the numbers along a dimension that share a scale, as a quantisation's JSON says
    anywhere in it."""
    if isinstance(node, list):
        for value in node:
            yield from _block_sizes(value)
    elif isinstance(node, dict):
        for key, value in node.items():
            if key in BLOCK_SIZES:
                sizes = value if isinstance(value, list) else [value]
                yield from (size for size in sizes if isinstance(size, int) and size > 0)
            else:
                yield from _block_sizes(value)


def _cut_of(
    whole: OpenModel,
    info: TensorInfo,
    role: Role,
    factors: Factors,
    suffixes: Mapping[str, set[str]],
) -> Cut | None:
    """Find how to cut a tensor; None if it is stored in no known way.

    One that holds all experts has blocks [E, O, G, 16], scales [E, O, G] or biases [E, O].
    """
    if role.is_router or role.kind == "table":
        readable = info.dtype in PLAIN or not role.is_router
        return Cut() if readable and whole.partial.plain_keys.patterns[info.name] is None else None
    module = whole.partial.model.get_submodule(role.layer)
    width = width_of(module)
    if role.kind == "fused":
        matched = FUSED.fullmatch(info.name.removeprefix(info.name.rpartition(".")[0]))
        if matched is None or role.dim or role.extra:
            return None
        if not module.has_gate or module.is_concatenated:
            return None
        projection, kind = matched.groups()
        if projection == "gate_up":
            return Cut(0, 1, paired=True) if info.shape[1] == 2 * width else None
        if kind == "bias":
            return Cut(factor=factors.output / factors.parts)
        if info.dtype != "U8" or info.shape[2] * MXFP4 != width:
            return None
        return Cut(1, MXFP4, factor=factors.output if kind == "scales" else 1.0)
    family, _, suffix = role.family.rpartition("|")
    axis = int(".down_proj" in family)
    if suffix == ".weight_shape" and info.shape == (2,):
        return Cut(axis, says_shape=True)
    is_weight = suffix in ("", ".weight_packed")
    is_plain = info.dtype in PLAIN
    # of the factor
    carrier = next((name for name in (*GLOBAL, *SCALES) if name in suffixes[family]), "")
    if suffix not in ("", *COMPANIONS) or (is_weight and bool(carrier) == is_plain):
        return None
    if suffix == carrier and suffix in SCALES and not is_plain and info.dtype not in EXPONENTS:
        return None
    factor = 1.0
    if axis and suffix == carrier:
        factor = factors.output
        if suffix == ".weight_global_scale":
            factor = 1 / factor
    is_matrix = len(info.shape) == 2
    if math.prod(info.shape) == 1 or (not is_weight and is_matrix and info.shape[axis] == 1):
        return Cut(axis, factor=factor)  # the same for all neurons
    if is_matrix and width % info.shape[axis] == 0:
        return Cut(axis, width // info.shape[axis], factor=factor)
    return None
