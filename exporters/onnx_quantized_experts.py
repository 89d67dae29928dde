"""One `com.microsoft.QMoE` node for each MoE layer: experts of 8 or 4 bits, everything else as it was.

The activations stay what they are: the node dequantises 8 bits per row itself, and at accuracy level 0 4 bits in
blocks too. So the stock model with its rounded weights computes what the node does, and is what the graph is held to.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from compressor.errors import CompressionError
from compressor.model.experts import parameter_names
from exporters.onnx_activation import Activation, supported
from exporters.onnx_experts import PLAIN, MoeNode, WeightFormat, first_rows, moe_node, node_tensors
from exporters.onnx_quantize import SCHEMES, Scheme, codes, pack, rounded
from exporters.onnx_reference import Reference

SCALES = "onnx_scales"  # an experts module's attribute: scales [E, rows, B] of each rounded weight, rows in stock order


@torch.no_grad()
def round_experts(experts: Any, scheme: Scheme) -> None:
    """Replace a module's weights by the rounded ones, one expert at a time; the scales are kept with the module.

    A module that no node can express is left as it is.
    """
    names = parameter_names(experts)[:2]
    if supported(experts, getattr(experts, names[0]).dtype == torch.float16) is not None:
        return
    kept = {}
    for name in names:
        old = getattr(experts, name)
        new, scales = torch.empty_like(old), []  # new memory: a loaded tensor may lie in a file that is only read
        for expert, (weight, place) in enumerate(zip(old, new, strict=True)):
            rows, filled = (weight.T, place.T) if experts.is_transposed else (weight, place)  # [outputs, inputs]
            if not bool(torch.isfinite(rows).all()):
                raise CompressionError(
                    f"{name} of expert {expert} holds a value that is not finite, so it has no scale; "
                    "export the checkpoint with --quantize none"
                )
            value, found = rounded(rows, scheme)
            filled.copy_(value)
            scales.append(found)
        experts._parameters[name] = torch.nn.Parameter(new, requires_grad=False)
        kept[name] = torch.stack(scales)
    setattr(experts, SCALES, kept)


def outline_experts(experts: Any, scheme: Scheme) -> None:
    """What `round_experts` does to a module whose weights are absent: their scales are absent too."""
    names = parameter_names(experts)[:2]
    if supported(experts, getattr(experts, names[0]).dtype == torch.float16) is not None:
        return
    kept = {}
    for name in names:
        weight = getattr(experts, name)
        rows = weight.transpose(1, 2) if experts.is_transposed else weight  # [E, outputs, inputs]
        width = rows.shape[-1]
        count = (width + scheme.padding(width)) // (scheme.block or width)
        kept[name] = rows.new_empty(*rows.shape[:2], count, dtype=torch.float32)
    setattr(experts, SCALES, kept)


def _filled(value: Tensor, *sides: int, by: float = 0) -> Tensor:
    """A tensor with so many entries more at the end of its last axes, the last one first."""
    return pad(value, [count for side in sides for count in (0, side)], value=by) if any(sides) else value


def qmoe_tensors(experts: Any, scheme: Scheme) -> dict[str, Tensor]:
    """A rounded module's tensors as the node wants them, zeros added so that both widths are whole blocks.

    Packed codes [E, 2I, H] or [E, I, H] and [E, H, I] (half as wide for 4 bits), scales float32 [E, rows] or
    [E, rows, B] by the weight's name and `_scales`, the biases if any. What the added rows of the first projection
    give is multiplied by the added columns of the second, which are 0; the added rows of the second are cut off.
    """
    first, second, *biases = parameter_names(experts)
    plain, scales = node_tensors(experts), getattr(experts, SCALES)
    hidden, inner = (scheme.padding(plain[name].shape[-1]) for name in (first, second))
    inner_rows = inner * (2 if experts.has_gate else 1)
    found = {}
    for name, columns, rows in ((first, hidden, inner_rows), (second, inner, hidden)):
        own = first_rows(experts, scales[name]) if name == first else scales[name]
        found[name] = pack(_filled(codes(plain[name].float(), own, scheme), columns, rows), scheme)
        own = _filled(own, 0, rows, by=1)
        found[f"{name}_scales"] = own if scheme.block else own[..., 0]
    for name, rows in zip(biases, (inner_rows, hidden), strict=False):
        found[name] = _filled(plain[name], rows)
    return {name: value.contiguous() for name, value in found.items()}


def qmoe_node(experts: Any, kind: Activation, scheme: Scheme) -> tuple[MoeNode, dict[str, Tensor]]:
    """The QMoE node of a rounded module (weights, scales, biases of each projection), and its tensors."""
    if not hasattr(experts, SCALES):
        return moe_node(experts, kind)
    first, second, *biases = parameter_names(experts)
    first_bias, second_bias = biases or (None, None)
    attributes: dict[str, Any] = {**kind.attributes(), "expert_weight_bits": scheme.bits, "weights_prepacked": 0}
    if scheme.block is not None:
        attributes |= {"block_size": scheme.block, "accuracy_level": 0}
    names = (first, f"{first}_scales", first_bias, second, f"{second}_scales", second_bias)
    width = getattr(experts, second).shape[1 if not experts.is_transposed else 2]
    node = MoeNode("QMoE", names, tuple(attributes.items()), scheme.padding(width))
    return node, qmoe_tensors(experts, scheme)


def _rounded(scheme: Scheme) -> WeightFormat:
    node, rounding = partial(qmoe_node, scheme=scheme), partial(round_experts, scheme=scheme)
    return WeightFormat(
        node, rounding, partial(outline_experts, scheme=scheme), f"experts rounded to {scheme.describe()}"
    )


FORMATS: Mapping[str, WeightFormat] = {"none": PLAIN, **{name: _rounded(scheme) for name, scheme in SCHEMES.items()}}


@dataclass(frozen=True, slots=True)
class RoundingCost:
    """What rounding the experts changes: the stock model's logits before and after."""

    largest_difference: float
    largest_logit: float  # before
    same_choice: float  # the share of the tokens after which the most likely token is the same


def rounding_cost(before: Reference, after: Reference) -> RoundingCost:
    """Compare the cases that both references hold, at real tokens only."""
    later = {case.name: case.logits for case in after.cases}
    shared = [case for case in before.cases if case.name in later]
    one = torch.cat([case.logits[case.mask.bool()] for case in shared])  # [T, V]
    two = torch.cat([later[case.name][case.mask.bool()] for case in shared])
    return RoundingCost(
        largest_difference=float((one - two).abs().max()),
        largest_logit=float(one.abs().max()),
        same_choice=float((one.argmax(-1) == two.argmax(-1)).float().mean()),
    )
