"""A model's view for compression: experts split, neurons in order, and the output's top-k.

E experts, I neurons of each, H hidden, S parts, n tokens that were sent to an expert. An order [I]
is S runs of equal length. The first run holds what matters most, so that pruning experts afterwards
takes the last ones. Within a run neurons stand as they did, so that a plan need only say the part
of each: those of a layer [E, I] stand in it as ceil(log2 S) bits each, row by row, in base64."""

import base64
import copy
import logging
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from compressor.data.batches import Calibration
from compressor.devices import as_float64
from compressor.distributed import ranks
from compressor.errors import CompressionError
from compressor.formatting import joined
from compressor.model.experts import projections, width_of
from compressor.model.mtp import known_heads
from compressor.model.opened import OpenModel, served_model
from compressor.progress import Progress
from compressor.recipe.plan import MOST_PARTS, check_split
from compressor.records import Json
from compressor.statistics.statistics import WEIGHTS, LayerStatistics, collect
from compressor.steps.configuration import fields_set
from compressor.steps.cutting import Tensors
from compressor.steps.prune.options import Prune
from compressor.steps.split.quantized import stored_parts
from compressor.steps.split.shape import SplitShape, split_shape, top_k_fields, widths
from compressor.steps.split.tensors import SplitModel

PARTS = (2, 3, 4)  # tried in this order if the number is left open
WIDTH = 64  # neurons: sub-experts of a multiple of it suit kernels
PLAIN = "plain because"  # in a model's facts: why parts are not cut from quantised tensors
REMEDY = "restore the plan or make it anew"

logger = logging.getLogger(__name__)


@torch.no_grad()
def energy_of_weights(experts: Any) -> Tensor:
    """|gate row| * |up row| * |down column| of every neuron, [E, I] float64; without a gate, of the
    other two."""
    energy = torch.empty(int(experts.num_experts), width_of(experts), dtype=torch.float64)
    for expert in range(len(energy)):
        view = projections(experts, expert)
        product = as_float64(view.up).norm(dim=1) * as_float64(view.down).norm(dim=0)
        if view.gate is not None:
            product = product * as_float64(view.gate).norm(dim=1)
        energy[expert] = product.cpu()
    return energy


def neuron_energies(stats: LayerStatistics) -> Tensor:
    """Return the energies of a layer's neurons, [E, I] float64.

    The energy of neuron i is the sum over its expert's tokens of g^2 z_i^2 |down_i|^2: g is the
    token's gate weight, z enters the down projection, so it is the squared norm of what the neuron
    adds to the output. An expert that no token reached has the energies of its weights, and so have
    all without text."""
    experts = stats.weights.experts
    energies = energy_of_weights(experts)
    if "squared_neuron_sum" in stats.values:
        for expert, squares in enumerate(stats.squared_neuron_sum):
            if squares.any():
                down = as_float64(projections(experts, expert).down.detach())
                energies[expert] = squares * down.norm(dim=0).cpu().square()
    return energies


def order_of(energy: Tensor, parts: int, block: int = 1) -> Tensor:
    """The order of a layer's neurons by falling energy, [E, I] -> [E, I] int32; the lower number
    first of equals.

    `block` neighbours stay together, and count as one of their summed energy.
    """
    blocks = energy.unflatten(1, (-1, block)).sum(-1)
    falling = blocks.argsort(dim=1, descending=True, stable=True)
    order = parts_of_neurons(falling, parts).argsort(dim=1, stable=True).int()
    return (block * order[..., None] + torch.arange(block, dtype=torch.int32)).flatten(1)


def parts_of_neurons(order: Tensor, parts: int) -> Tensor:
    """Return the part that each neuron goes to, from an order cut into equal runs: [E, I] -> [E, I]
    int32."""
    run = torch.arange(order.shape[1]) // (order.shape[1] // parts)
    return torch.empty_like(order, dtype=torch.int32).scatter_(
        1, order.long(), run.int().expand_as(order)
    )


def seen_as(model: OpenModel, parts: int, top_k: int | None = None) -> OpenModel:
    """The model with each expert as `parts`, their neurons in no order yet, whose smaller versions
    write `top_k`.

    Raises `CompressionError` where experts cannot be split exactly, and for a top-k that the model
    has not."""
    if parts == 1:
        return with_top_k(model, top_k)
    if not 1 <= parts <= MOST_PARTS:
        raise CompressionError(
            f"--split {parts} is not 1 to {MOST_PARTS}; give another number of parts"
        )
    known = f"split in {parts}"
    if known not in model.cached:  # once, as it runs blocks
        model.cached[known] = split_shape(model.architecture, parts)
    shape: SplitShape = model.cached[known]
    stored = copy.copy(model.checkpoint)
    stored.raw_config = fields_set(stored.raw_config, model.config, shape.fields)
    written = {**model.architecture.written, **shape.fields}
    written.pop(model.architecture.count_field)
    layers = tuple(replace(layer, parts=parts) for layer in shape.architecture.layers)
    architecture = replace(shape.architecture, layers=layers, written=written)
    split = replace(
        model,
        whole=model,
        cached={},
        config=architecture.config,
        checkpoint=stored,
        architecture=architecture,
        partial=SplitModel(
            model.partial, model.architecture.layers, architecture.config, shape.factors
        ),
    )
    if model.layout.quantized:
        try:
            split = replace(split, stored_parts=stored_parts(model, shape.factors))
        except CompressionError as error:
            split.cached[PLAIN] = str(error)
    return with_top_k(split, top_k)


def with_top_k(model: OpenModel, top_k: int | None) -> OpenModel:
    """Return the model whose smaller versions route a token to `top_k` experts, or to fewer where a
    layer does now."""
    if top_k is None:
        return model
    architecture = model.architecture
    most = max(layer.top_k for layer in architecture.layers)
    if not 1 <= top_k <= most:
        raise CompressionError(
            f"--top-k {top_k} is not between 1 and the {most} experts that a token is routed to now"
        )
    layers = tuple(replace(layer, top_k=min(layer.top_k, top_k)) for layer in architecture.layers)
    top_k_by_layer = {layer.name: layer.top_k for layer in layers}
    fields, _ = top_k_fields(
        architecture.config, architecture, top_k_by_layer, lambda count: min(count, top_k)
    )
    smaller = replace(architecture, layers=layers, written={**architecture.written, **fields})
    return replace(model, architecture=smaller, top_k=top_k, whole=model.whole or model)


def chosen_parts(model: OpenModel, prune: Prune) -> tuple[int, str]:
    """Return the number of parts for the stored `model` where it is left open, and why.

    It is the first of 2, 3 and 4 with sub-experts of a multiple of 64 neurons. Without the strategy
    `auto`, which alone gains by sub-experts, there is nothing to choose, and no reason."""
    if prune.strategy != "auto" or prune.keeps_all:
        return 1, ""
    if prune.top_k is not None:
        return 1, "--top-k counts whole experts"
    if model.layout.quantized:
        return 1, "they are stored quantised"
    if prune.mtp != "drop" and known_heads(model):
        return 1, "a split would leave out the multi-token-prediction head"
    if prune.is_sized:
        try:
            prune.count(model.architecture.layers)
        except CompressionError:
            return 1, ""  # the number is refused when it is checked
    all_widths = sorted(set(widths(model.partial.model).values()))
    uneven = dict[int, list[str]]()  # numbers of parts that a width of experts does not make
    chosen = 1
    for parts in PARTS:
        width = next((width for width in all_widths if width % (parts * WIDTH)), None)
        if width is None:
            chosen = parts
            break
        uneven.setdefault(width, []).append(str(parts))
    reasons = [
        f"{width} neurons do not make {joined(numbers, 'or')} parts of a multiple of {WIDTH}"
        for width, numbers in uneven.items()
    ]
    if chosen == 1:
        return 1, "; ".join(reasons)
    try:
        seen_as(model, chosen)
    except CompressionError as error:
        return 1, str(error)
    return chosen, "; ".join([*reasons, "it loses less than whole experts"])


def partitioned(
    model: OpenModel, text: Calibration | None, progress: Progress, seed: int, changed: bool
) -> OpenModel:
    """Return the split model with its neurons in the order of their energy on the text, or by their
    weights alone.

    Where a quantised checkpoint's bytes can be cut, neurons stay in whole blocks, unless experts
    will be `changed`; a warning says why they do not."""
    if model.layout.quantized and (changed or not model.stored_parts):
        reason = "what changes experts needs one" if changed else model.cached[PLAIN]
        logger.warning(
            "%s is stored quantised; its parts are written in a plain dtype: %s",
            model.source.label,
            reason,
        )
        model = replace(model, stored_parts=None)
    assert model.whole is not None
    whole = model.whole
    parts = model.architecture.layers[0].parts
    block = model.stored_parts.block if model.stored_parts else 1
    needs = WEIGHTS if text is None else WEIGHTS | {"squared_neuron_sum"}

    def order(stats: LayerStatistics) -> Tensor:
        return order_of(neuron_energies(stats), parts, block)

    orders = {
        stats.layer.name: ranks().broadcast(partial(order, stats))
        for stats in collect(
            whole, needs, None if text is None else text.without_heldout(), progress, seed
        )
    }
    facts = {"calibration": None if text is None else text.identity}
    return with_neuron_order(model, orders, facts)


def shapes(whole: OpenModel, parts: int) -> dict[str, Any]:
    """Return the parts of each expert, and what they change in the config, as it is stored."""
    served = served_model(whole)
    return {"parts": parts, "experts": served.experts, "top_k": served.top_k, "width": served.width}


def with_neuron_order(model: OpenModel, orders: Tensors, facts: Json) -> OpenModel:
    """Return the split model with the order [E, I] of each layer's neurons, by its name.

    `facts` join the plan's entry.
    """
    seen = model.partial
    assert isinstance(seen, SplitModel) and model.whole is not None
    factors = seen.factors
    parts = factors.parts
    entry = shapes(model.whole, parts)
    if model.stored_parts:
        entry["block"] = model.stored_parts.block
    neurons = {
        name: packed(parts_of_neurons(order, parts), parts) for name, order in orders.items()
    }
    entry |= {
        "output_factor": factors.output,
        "selection_factor": factors.selection,
        **facts,
        "neurons": neurons,
    }
    ordered = SplitModel(seen.stored, seen.layers.values(), seen.config, factors, orders)
    return replace(model, partial=ordered, split=entry)


def as_decided(model: OpenModel, split: Json | None, top_k: int | None) -> OpenModel:
    """Return the model split as a plan's entry says, and with this top-k; refuses a split that does
    not fit."""
    if (model.split, model.top_k) == (split, top_k):
        return model
    stored = model.whole or model
    if split is None:
        return with_top_k(stored, top_k)
    check_split(split)
    parts = int(split["parts"])
    view = seen_as(stored, parts, top_k)
    if "block" not in split:
        view = replace(view, stored_parts=None)
    orders = {}
    for layer in stored.architecture.layers:
        width = width_of(stored.partial.model.get_submodule(layer.name))
        neurons = unpacked(
            split["neurons"].get(layer.name), layer.experts, width, parts, layer.name
        )
        orders[layer.name] = neurons.argsort(dim=1, stable=True).int()
    facts = {name: split[name] for name in ("calibration", "why") if name in split}
    return with_neuron_order(view, orders, facts)


def packed(part_of_neuron: Tensor, parts: int) -> str:
    """Return the part of each neuron, [E, I] below `parts`, as text."""
    positions = np.arange((parts - 1).bit_length())
    bits = (part_of_neuron.flatten().numpy()[:, None] >> positions) & 1
    data = np.packbits(bits.astype(np.uint8)).tobytes()
    return base64.b64encode(data).decode()


def unpacked(text: Any, experts: int, width: int, parts: int, where: str) -> Tensor:
    """Return the part of each neuron, [E, I] int32; raises `CompressionError` for text that does
    not say it of all."""
    count = experts * width
    bits = (parts - 1).bit_length()
    try:
        data = np.frombuffer(base64.b64decode(text, validate=True), dtype=np.uint8)
        flags = np.unpackbits(data)[: count * bits].reshape(count, bits)
    except (TypeError, ValueError) as error:
        raise CompressionError(
            f"{where}: the record of its neurons' parts is damaged; {REMEDY}"
        ) from error
    numbers = flags.astype(np.int32) << np.arange(bits, dtype=np.int32)
    return torch.from_numpy(numbers.sum(1)).int().view(experts, width)
