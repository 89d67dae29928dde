"""The parts of a model and the cost of compressing it, from its config and safetensors headers
alone."""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress

import transformers

from compressor.checkpoint.loader_fault import block_fault, loader_fault
from compressor.checkpoint.reader import Checkpoint, Size, TensorInfo, tensor_bytes
from compressor.checkpoint.source import ModelSource, fetch_headers, locate
from compressor.errors import CompressionError
from compressor.files import is_local
from compressor.frozen import frozen
from compressor.model.constant_experts import NOT_STOCK, SubstitutedCheckpoint, declared
from compressor.model.layout import Layout
from compressor.model.moe_layer import MoeLayer, resolve_count
from compressor.model.opened import OpenModel, advice_on, open_checkpoint, served_model
from compressor.model.serving import Advice
from compressor.model.verification import stock_report

PARTS = ("routed experts", "routers", "shared experts", "attention", "embeddings", "other")


@frozen
class Part:
    """Stored elements and bytes of one kind of tensor."""

    name: str
    parameters: int
    bytes: int


@frozen
class SmallerSize:
    """The size of the model with `experts` per layer."""

    experts: int
    parameters: int
    bytes: int


@frozen
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
    outcomes: tuple[SmallerSize, ...]
    largest_layer_bytes: int  # of the loaded layer, in the dtype for computing
    peak_memory: int  # bytes, without the interpreter and calibration activations
    export_memory: int  # bytes of the whole model in float32, to verify an ONNX export in one piece
    bytes_read: int
    bytes_written: int
    left_out: tuple[str, ...]
    module_of_layers: tuple[str, ...]
    servers: tuple[Advice, ...] = ()  # on the model as it is and on every outcome
    constants: str | None = None  # a sentence on experts that are constants, if any
    # a sentence on quantised experts that stock transformers mistreats, if any
    loader_fault: str | None = None


def stored_with(tensors: Mapping[str, TensorInfo], layout: Layout, experts: int) -> Size:
    """Return the parameters and bytes of the stored tensors when every MoE layer keeps
    `experts`."""
    parameters = nbytes = 0
    for name, role in layout.roles.items():
        info = tensors[name]
        shape = info.shape
        if role.kind == "fused":
            shape = (*shape[: role.dim], experts + role.extra, *shape[role.dim + 1 :])
        if role.kind != "expert" or role.expert < experts:
            parameters += int(math.prod(shape) * info.density)
            nbytes += tensor_bytes(info.dtype, shape)
    return Size(parameters, nbytes)


def _parts(model: OpenModel) -> dict[str, str]:
    """Return the part in `PARTS` of each stored tensor."""
    stock = model.partial.model
    targets = model.partial.plain_keys.targets
    ends = [stock.get_input_embeddings(), stock.get_output_embeddings()]
    embeddings = {name for name, module in stock.named_modules() if module in ends}
    blocks = [layer.block for layer in model.architecture.layers]
    parts = {}
    for name, role in model.layout.roles.items():
        target = targets.get(name, name)
        block = next((block for block in blocks if target.startswith(f"{block}.")), None)
        if role.layer:
            parts[name] = "routers" if role.is_router or role.kind == "table" else "routed experts"
        elif target.rpartition(".")[0] in embeddings:
            parts[name] = "embeddings"
        elif block is not None and "shared" in target.removeprefix(block):
            parts[name] = "shared experts"
        else:
            parts[name] = "attention" if "attn" in target or "attention" in target else "other"
    return parts


def candidates(layers: Sequence[MoeLayer], experts: int | None) -> list[int]:
    """Return the numbers of experts to show: the requested one, or three quarters, a half and a
    quarter of all."""
    if experts is not None:
        return [resolve_count(layers, experts, None)]
    counts = []
    for ratio in (0.25, 0.5, 0.75):
        with suppress(CompressionError):  # the router cannot take that many
            counts.append(resolve_count(layers, None, ratio))
    return counts


def read_headers(model: str, revision: str | None = None) -> tuple[ModelSource, Checkpoint]:
    """Return the checkpoint of a local folder or a Hub id; of the latter, only headers are
    fetched."""
    if is_local(model):
        source = locate(model, revision)
        return source, Checkpoint(source.folder)
    checkpoint = fetch_headers(model, revision)
    return ModelSource(model, checkpoint.folder.name, checkpoint.folder), checkpoint


def stock_fault(model: OpenModel) -> str | None:
    """Return a sentence on how stock transformers mistreats a quantised model; None if it does not,
    as far as known."""
    quantization = model.checkpoint.quantization
    fault = None
    layers = set[str]()
    for name, role in model.layout.roles.items():
        is_first = role.family.endswith("weight_scale") and role.layer not in layers
        if not is_first or fault is not None:
            continue
        layers.add(role.layer)
        fault = loader_fault(quantization, name.rpartition(".")[0])
        if fault is not None and len(layers) > 1:
            fault = (
                f"transformers {transformers.__version__} reads the experts of all layers in one "
                "number format, and these have several"
            )
    if fault is None and quantization.get("quant_method") == "compressed-tensors":
        fault = stock_report(model)
    return fault or block_fault(model.checkpoint)


def inspect(model: str, revision: str | None = None, experts: int | None = None) -> Inspection:
    """Return the report on a local folder or a Hub id, without reading a tensor.

    With `experts`, it has this outcome instead of three.
    """
    source, checkpoint = read_headers(model, revision)
    if source.revision is None and declared(checkpoint.raw_config):
        checkpoint = SubstitutedCheckpoint(source.folder)
    opened = open_checkpoint(source, checkpoint, "auto", "cpu")
    architecture = opened.architecture
    layout = opened.layout
    first = architecture.layers[0]
    tensors = checkpoint.tensors
    constants = None
    counts = candidates(architecture.layers, experts)
    parts: dict[str, list[TensorInfo]] = {part: [] for part in PARTS}
    if isinstance(checkpoint, SubstitutedCheckpoint):
        tensors = checkpoint.stored
        counts = []
        parts["routed experts"] += checkpoint.constants.values()
        every = sum(layer.experts for layer in architecture.layers)
        constants = f"for {len(checkpoint.constants)} of {every} experts; {NOT_STOCK}"
    for name, part in _parts(opened).items():
        info = checkpoint.tensors[name]
        if info is tensors.get(name):  # or its expert is a constant
            parts[part].append(info)
    sizes = {part: Size.of(infos) for part, infos in parts.items()}
    left = {count: stored_with(checkpoint.tensors, layout, count) for count in counts}
    router = type(opened.partial.model.get_submodule(first.router)).__name__
    routing = f"top-{first.top_k} of {first.experts} ({router})"
    if first.routing_groups > 1:
        chosen = f"of which a token may use {first.chosen_groups}"
        routing += f", {first.routing_groups} routing groups {chosen}"
    total = Size.of(tensors.values())
    served = served_model(opened)
    largest = opened.largest_layer
    written = next(iter(left.values()), total).bytes
    shown = dict.fromkeys([first.experts, *left])
    return Inspection(
        model=model,
        revision=source.revision,
        family=architecture.family,
        model_class=architecture.model_class,
        moe_layers=len({layer.decoder_layer for layer in architecture.layers}),
        layers=len(architecture.decoder_layers),
        experts=architecture.experts,
        top_k=first.top_k,
        routing=routing,
        quantization=served.quantization or None,
        parameters=total.parameters,
        bytes=total.bytes,
        parts=tuple(
            Part(part, size.parameters, size.bytes)
            for part, size in sizes.items()
            if size.parameters
        ),
        outcomes=tuple(
            SmallerSize(count, size.parameters, size.bytes) for count, size in left.items()
        ),
        largest_layer_bytes=largest,
        peak_memory=2 * largest,
        export_memory=4 * sum(value.numel() for value in opened.partial.empty.values()),
        bytes_read=total.bytes + written,
        bytes_written=written,
        left_out=layout.left_out,
        module_of_layers=tuple(layer.name for layer in architecture.layers),
        servers=tuple(advice_on(served, architecture.layers, count) for count in shown),
        constants=constants,
        loader_fault=stock_fault(opened),
    )
