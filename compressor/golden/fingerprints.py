"""Fingerprints of weights, three numbers of each tensor and of each expert's: they name what was
moved, scaled or lost.

Rounding hardly changes them. N experts, or rows of a vocabulary, or 1; C tensors of a module.
"""

import base64
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from compressor.formatting import counted
from compressor.model.moe_layer import decoder_layer_of
from compressor.model.opened import OpenModel
from compressor.model.streaming import TINY

ROWS = 64  # of an embedding or a head that are told apart
TURNED = 0.3  # more than rounding changes a projection of weights of norm 1
SCALED = 0.04  # share of a norm, more than rounding changes it


def gate_and_up(experts: Any, value: Tensor) -> tuple[Tensor, int]:
    """Return a fused gate and up parameter [E, ...] with a dimension for the two, and the number of
    that."""
    dim = 2 if experts.is_transposed and value.dim() > 2 else 1
    if experts.is_concatenated:
        return value.unflatten(dim, (2, -1)), dim
    return value.unflatten(dim, (-1, 2)), dim + 1


def _text(value: Tensor) -> str:
    """Return the norm of each row's weights, and two projections of them at norm 1, in base64 of
    bfloat16: [N, ...] -> [N, 3]."""
    rows = value.detach().reshape(len(value), -1, value.shape[-1] if value.dim() > 1 else 1)
    lines, columns = (
        torch.randn(length, 2, generator=torch.Generator().manual_seed(0))
        for length in rows.shape[1:]
    )
    numbers = torch.empty(len(rows), 3)
    for row, matrix in zip(numbers, rows, strict=True):
        matrix = matrix.float().cpu()
        row[0] = matrix.norm()
        row[1:] = (matrix @ columns * lines).sum(0) / row[0].clamp_min(TINY)
    return base64.b64encode(numbers.bfloat16().view(torch.int16).numpy().tobytes()).decode()


def fingerprints(model: OpenModel) -> dict[str, str]:
    """Return a model's fingerprints by tensor; one decoder layer is in memory at a time."""
    partial = model.partial
    layers = model.architecture.layers
    of_experts = {tensor.key: (layer, tensor) for layer in layers for tensor in layer.tensors}
    by_module = dict[str, list[str]]()
    for key, value in partial.empty.items():
        module = decoder_layer_of(key, model.architecture.decoder_layers) or key.rpartition(".")[0]
        if key not in partial.tied and value.is_floating_point():
            by_module.setdefault(module, []).append(key)
    texts = dict[str, str]()
    for module, keys in by_module.items():
        partial.load(keys)
        for key in keys:
            value = partial.model.get_parameter_or_buffer(key)
            if key not in of_experts:
                is_vocabulary = value.dim() > 1 and len(value) == model.vocabulary
                texts[key] = _text(value[:ROWS] if is_vocabulary else value[None])
                continue
            layer, tensor = of_experts[key]
            value = value.movedim(tensor.dim, 0)[: layer.experts]
            if "gate_up_proj" not in key:
                texts[key] = _text(value)
                continue
            pair, dim = gate_and_up(partial.model.get_submodule(layer.name), value)
            for number, name in enumerate(("gate", "up")):
                texts[key.replace("gate_up", name)] = _text(pair.select(dim, number))
        partial.release(module)
    return texts


def _cause_in(
    module: str, names: Sequence[str], old: Tensor, new: Tensor
) -> tuple[str, str] | None:
    """Return what has happened to the tensors of a module, whose numbers are [N, C, 3]: the kind,
    and a sentence."""
    lost = (new[..., 0] == 0) & (old[..., 0] > 0)
    if lost.all(0).any():
        return "missing", f"{names[int(lost.all(0).int().argmax())]} is zero"
    if lost.any():
        return "zero", f"expert {int(lost.any(1).int().argmax())} of {module} is zero"
    is_turned = (new - old)[..., 1:].abs().amax(-1) > TURNED
    columns = is_turned.any(0)
    if not columns.any():
        ratios = new[..., 0] / old[..., 0].clamp_min(TINY)
        is_scaled = (old[..., 0] > 0) & ((ratios - 1).abs() > SCALED)
        for row, column in is_scaled.nonzero()[:1].tolist():
            whose = "" if is_scaled[:, column].all() else f" of expert {row}"
            times = f"{ratios[row, column]:.3g}"
            return "scale", f"{names[column]}{whose} is multiplied by about {times}"
        return None
    before, after = (numbers[:, columns, 1:].flatten(1) for numbers in (old, new))
    count = len(old)
    how = None
    apart, sources = torch.cdist(after, before, p=torch.inf).min(1)
    if len(sources.unique()) == count > 1 and apart.amax() <= TURNED:
        how = "permuted"
    for step in range(count - 1, 0, -1):
        is_there = (after - before.roll(step, 0)).abs().amax(1) <= TURNED
        if int(is_there.sum()) >= count - 1:  # one row of a vocabulary comes from the rest of it
            how = f"shifted by {step - count if step > count // 2 else step}"
    if how is not None and any("down_proj" in name for name in names):
        return how, f"the experts of {module} are {how} against their router"
    if how is not None:
        return how, f"the rows of {module} are {how}"
    for gate, name in enumerate(names):
        partner = name.replace("gate_proj", "up_proj")
        if partner != name and partner in names:
            apart = new[:, names.index(partner)] - old[:, gate]
            if not (apart[:, 1:].abs() > TURNED).any():
                return "swapped", f"gate and up projections are swapped in {module}"
    return "others", f"{module} holds other weights"


def cause_of_weights(golden: Mapping[str, str], own: Mapping[str, str]) -> str | None:
    """Return what has happened to weights since golden answers were written; None for nothing, or
    for other shapes."""
    groups = dict[tuple[str, int], list[str]]()
    for name, text in golden.items():
        if name not in own:
            return f"{name} is missing"
        if len(own[name]) != len(text):
            return None
        groups.setdefault((name.rpartition(".")[0], len(text)), []).append(name)
    sentences = dict[str, list[str]]()  # by kind
    for (module, _), names in groups.items():
        numbers = list[Tensor]()
        for texts in (golden, own):
            stored = bytearray(b"".join(base64.b64decode(texts[name]) for name in names))
            values = torch.frombuffer(stored, dtype=torch.bfloat16).float()
            numbers.append(values.view(len(names), -1, 3).transpose(0, 1))
        cause = _cause_in(module, names, *numbers)
        if cause is not None:
            kind, sentence = cause
            sentences.setdefault(kind, []).append(sentence)
    first, *more = max(sentences.values(), key=len, default=[None])
    return f"{first}; so in {counted(len(more), 'more module')}" if more else first
