"""What a model is made of and what compressing it would take, from its config and safetensors headers alone."""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from compressor.checkpoint.reader import Checkpoint, TensorInfo, tensor_bytes
from compressor.checkpoint.source import fetch_headers, is_local, locate
from compressor.errors import CompressionError
from compressor.model.architecture import MoeLayer, build_meta, check_count, discover, load_config, most_parts
from compressor.model.constant_experts import NOT_STOCK, SUFFIX, SubstitutedCheckpoint, declared
from compressor.model.layout import Layout, find_layout
from compressor.model.loading import PartialModel
from compressor.model.opened import advice_on, pick_dtype, quantization_of, served_as
from compressor.serving.advice import Advice

PARTS = ("routed experts", "routers", "shared experts", "attention", "embeddings", "other")


@dataclass(frozen=True, slots=True)
class Part:
    """Stored elements and bytes of one kind of tensor."""

    name: str
    parameters: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """What keeping `experts` per layer would leave."""

    experts: int
    parameters: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Inspection:
    """The report of `inspect`."""

    model: str
    revision: str | None
    family: str
    model_class: str
    moe_layers: int
    layers: int
    experts: int
    top_k: int
    routing: str
    quantization: str | None
    parameters: int
    bytes: int
    parts: tuple[Part, ...]
    outcomes: tuple[Outcome, ...]
    largest_layer_bytes: int  # of the loaded layer, in the dtype that it is computed in
    peak_memory: int  # bytes above the bare interpreter, calibration activations aside
    export_memory: int  # bytes of the whole model in float32, to verify an ONNX export in one piece
    bytes_read: int
    bytes_written: int
    left_out: tuple[str, ...]
    module_of_layers: tuple[str, ...]
    servers: tuple[Advice, ...] = ()  # what servers make of the model as it is, and of every outcome
    constants: str | None = None  # that experts are constants, and what that means


def stored_with(tensors: Mapping[str, TensorInfo], layout: Layout, experts: int) -> Outcome:
    """Parameters and bytes of the stored tensors when every MoE layer keeps `experts`."""
    parameters = nbytes = 0
    for name, role in layout.roles.items():
        info, shape = tensors[name], tensors[name].shape
        if role.kind == "fused":
            shape = (*shape[: role.dim], experts + role.extra, *shape[role.dim + 1 :])
        if role.kind != "expert" or role.expert < experts:
            parameters, nbytes = parameters + math.prod(shape), nbytes + tensor_bytes(info.dtype, shape)
    return Outcome(experts, parameters, nbytes)


def _part_of(target: str, role: Any, embeddings: frozenset[str], blocks: tuple[str, ...]) -> str:
    if role.layer:
        return "routers" if role.is_router or role.kind == "table" else "routed experts"
    if target.rpartition(".")[0] in embeddings:
        return "embeddings"
    inside = next((block for block in blocks if target.startswith(f"{block}.")), None)
    if inside is not None and "shared" in target.removeprefix(inside):
        return "shared experts"
    return "attention" if "attn" in target or "attention" in target else "other"


def candidates(layers: Sequence[MoeLayer], experts: int | None) -> list[int]:
    """Numbers of experts to show: the one that was asked for, or three quarters, a half and a quarter of them all."""
    layer = layers[0]
    if experts is not None:
        for entry in layers:
            check_count(entry, experts, entry.name)
        return [experts]
    wanted = []
    for share in (0.75, 0.5, 0.25):
        count = math.ceil(layer.experts * share)
        count += -count % layer.routing_groups
        with suppress(CompressionError):  # the router cannot take that many
            check_count(layer, count, layer.name)
            wanted.append(count)
    return wanted


def inspect_model(model: str, revision: str | None = None, experts: int | None = None) -> Inspection:
    """The report for a local folder or a Hub id; reads no tensor. `experts` asks for one outcome instead of three."""
    if is_local(model):
        source = locate(model, revision)
        checkpoint = Checkpoint(source.folder)
        if declared(checkpoint.raw_config):
            checkpoint = SubstitutedCheckpoint(source.folder)
        return _report(model, None, checkpoint, load_config(source.folder), experts)
    checkpoint = fetch_headers(model, revision)
    return _report(model, checkpoint.folder.name, checkpoint, load_config(checkpoint.folder), experts)


def _report(model: str, revision: str | None, checkpoint: Checkpoint, config: Any, experts: int | None) -> Inspection:
    architecture = discover(config, build_meta(config, most=most_parts(checkpoint)))
    dtype = pick_dtype("auto", config, checkpoint)
    partial = PartialModel(checkpoint, config, dtype, torch.device("cpu"))
    layout = find_layout(checkpoint, architecture, partial)
    stock = partial.model
    ends = (stock.get_input_embeddings(), stock.get_output_embeddings())
    embeddings = frozenset(name for name, module in stock.named_modules() if any(module is end for end in ends))
    blocks = tuple(layer.block for layer in architecture.layers)
    totals = {part: [0, 0] for part in PARTS}
    stored = checkpoint.stored if isinstance(checkpoint, SubstitutedCheckpoint) else checkpoint.tensors
    for name, role in layout.roles.items():
        if (info := checkpoint.tensors[name]) is not stored.get(name):
            continue  # of an expert that is a constant
        entry = totals[_part_of(partial.plain_keys.targets.get(name, name), role, embeddings, blocks)]
        entry[0], entry[1] = entry[0] + info.parameters, entry[1] + info.nbytes
    layers = [sum(partial.empty[key].nbytes for key in partial.keys_under(unit)) for unit in architecture.units]
    first, tensors, constants = architecture.layers[0], stored, None
    counts = candidates(architecture.layers, experts)
    if isinstance(checkpoint, SubstitutedCheckpoint):
        gone = [info for name, info in stored.items() if name.endswith(SUFFIX)]
        totals[PARTS[0]] = [
            totals[PARTS[0]][0] + sum(info.parameters for info in gone),
            totals[PARTS[0]][1] + sum(info.nbytes for info in gone),
        ]
        every = sum(layer.experts for layer in architecture.layers)
        constants, counts = f"for {len(gone)} of {every} experts; {NOT_STOCK}", []
    outcomes = [stored_with(checkpoint.tensors, layout, count) for count in counts]
    routing = f"top-{first.top_k} of {first.experts} ({type(stock.get_submodule(first.router)).__name__})"
    if first.routing_groups > 1:
        routing += f", {first.routing_groups} routing groups of which a token may use {first.chosen_groups}"
    total = sum(info.nbytes for info in tensors.values())
    written = outcomes[0].bytes if outcomes else total
    quantization = quantization_of(checkpoint.raw_config)
    served = served_as(architecture, stock, quantization)
    largest = max(layers)
    return Inspection(
        model=model,
        revision=revision,
        family=architecture.family,
        model_class=architecture.model_class,
        moe_layers=len({layer.unit for layer in architecture.layers}),
        layers=len(architecture.units),
        experts=architecture.experts,
        top_k=first.top_k,
        routing=routing,
        quantization=quantization or None,
        parameters=sum(info.parameters for info in tensors.values()),
        bytes=total,
        parts=tuple(Part(name, *totals[name]) for name in PARTS if totals[name][0]),
        outcomes=tuple(outcomes),
        largest_layer_bytes=largest,
        peak_memory=2 * largest,
        export_memory=4 * sum(value.numel() for value in partial.empty.values()),
        bytes_read=total + written,
        bytes_written=written,
        left_out=layout.left_out,
        module_of_layers=tuple(layer.name for layer in architecture.layers),
        servers=tuple(
            advice_on(served, architecture.layers, count)
            for count in dict.fromkeys([first.experts, *(outcome.experts for outcome in outcomes)])
        ),
        constants=constants,
    )
