"""A model seen as it is to be compressed: its experts split, neurons in order, and with the top-k that is written.

A plan says into how many parts experts are split, how neurons were partitioned, and for every neuron its part: the
parts of a layer's neurons [E, I] stand as ceil(log2 S) bits each, row by row, in base64.
"""

import base64
import copy
import hashlib
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from compressor.data.batches import Calibration
from compressor.distributed import here
from compressor.errors import CompressionError
from compressor.model.architecture import build_meta
from compressor.model.opened import OpenModel, resolve_count, served_model
from compressor.model.serving import broken
from compressor.progress import Progress
from compressor.recipe.plan import CLUSTERS, ENERGY, MOST_PARTS, WEIGHTS, CompressionPlan, check_source, check_split
from compressor.recipe.step import Step
from compressor.steps.configuration import fields_set
from compressor.steps.split.neurons import measured, order_of, order_of_parts, parts_of
from compressor.steps.split.shape import SplitShape, split_shape, top_k_fields, widths
from compressor.steps.split.step import Split
from compressor.steps.split.stored import stored_parts
from compressor.steps.split.tensors import SplitModel

PARTS = 2  # where the number is left open
WIDTH = 64  # neurons: sub-experts of a multiple of it suit kernels
REMEDY = "restore the plan or make it anew"

logger = logging.getLogger(__name__)


def seen_as(model: OpenModel, parts: int = 1, top_k: int | None = None) -> OpenModel:
    """The model with each expert as `parts`, their neurons in no order yet, whose smaller versions write `top_k`.

    Raises `CompressionError` where experts cannot be split exactly, and for a top-k that the model has not.
    """
    if parts == 1:
        return with_top_k(model, top_k)
    if parts > MOST_PARTS:
        raise CompressionError(f"--split {parts} is more than {MOST_PARTS} parts; give fewer")
    if (known := f"split in {parts}") not in model.found:  # once, for blocks are run for that
        model.found[known] = split_shape(model.architecture, parts)
    shape: SplitShape = model.found[known]
    stored = copy.copy(model.checkpoint)
    stored.raw_config = fields_set(stored.raw_config, model.config, shape.fields)
    written = {path: value for path, value in shape.fields.items() if path != model.architecture.count_field}
    layers = tuple(replace(layer, parts=parts) for layer in shape.architecture.layers)
    architecture = replace(shape.architecture, layers=layers, written=written)
    split = replace(
        model,
        whole=model,
        found={},
        config=architecture.config,
        checkpoint=stored,
        architecture=architecture,
        partial=SplitModel(model.partial, model.architecture.layers, architecture.config, shape.factors),
    )
    if model.layout.quantized:
        with suppress(CompressionError):  # `cut_as_stored` gives the reason once it matters
            split = replace(split, stored_parts=stored_parts(model, shape.factors))
    return with_top_k(split, top_k)


def with_top_k(model: OpenModel, top_k: int | None) -> OpenModel:
    """The model whose smaller versions route a token to `top_k` experts, or to fewer where a layer does now."""
    if top_k is None:
        return model
    architecture = model.architecture
    most = max(layer.top_k for layer in architecture.layers)
    if not 1 <= top_k <= most:
        raise CompressionError(f"--top-k {top_k} is not between 1 and the {most} experts that a token is routed to now")
    layers = tuple(replace(layer, top_k=min(layer.top_k, top_k)) for layer in architecture.layers)
    wanted = {layer.name: layer.top_k for layer in layers}
    fields, _ = top_k_fields(architecture.config, architecture, wanted, lambda each: min(each, top_k))
    smaller = replace(architecture, layers=layers, written={**architecture.written, **fields})
    return replace(model, architecture=smaller, top_k=top_k, whole=model.whole or model)


def resolved_parts(split: Split, model: OpenModel, steps: Sequence[Step]) -> int:
    """The number of parts for the stored `model`; `steps` are all of the stage.

    Where it is left open, the strategy `auto` splits experts in two if that is exact, in the dtype that is stored, with
    sub-experts of a multiple of 64 neurons, without a multi-token-prediction head that it would leave out, and if no
    server does worse.
    """
    if split.parts != "auto":
        if not 1 <= split.parts <= MOST_PARTS:
            raise CompressionError(f"--split {split.parts} is not 1 to {MOST_PARTS}; give another number of parts")
        return split.parts
    prune: Any = next((step for step in steps if step.name == "prune"), None)
    if prune is None or prune.strategy != "auto" or prune.top_k is not None:
        return 1
    layers, layout = model.architecture.layers, model.layout
    if layout.quantized or layout.left_out:
        return 1
    if any(width % (PARTS * WIDTH) for width in widths(build_meta(model.config)).values()):
        return 1
    try:
        split_model = seen_as(model, PARTS)
        searched = prune.experts is None and prune.ratio is None
        kept = layers[0].experts if searched else resolve_count(layers, prune.experts, prune.ratio)
    except CompressionError:
        return 1  # the reason is given where a split is asked for, or the number checked
    before, after = (
        {(rule.server, rule.needs.words) for rule in broken(replace(served_model(each), experts=parts * kept))}
        for each, parts in ((model, 1), (split_model, PARTS))
    )
    return PARTS if after <= before else 1


def dealt(
    model: OpenModel,
    text: Calibration | None,
    by: str,
    progress: Progress,
    seed: int,
    changed: bool = False,
) -> OpenModel:
    """The split model with its neurons in order: measured on the text, held-out sequences excepted, or on the weights.

    Where a quantised checkpoint's bytes can be cut, neurons stay in whole blocks, unless experts will be `changed`.
    """
    model = cut_as_stored(model, changed)
    assert model.whole is not None
    whole, parts = model.whole, model.architecture.layers[0].parts
    block = model.stored_parts.block if model.stored_parts else 1
    way = CLUSTERS if text is not None and by == CLUSTERS else ENERGY

    def orders() -> Mapping[str, Tensor]:
        batches = None if text is None else [text.batches[number] for number in text.fit]
        neurons = measured(whole, batches, progress, way == CLUSTERS, seed)
        return {each.layer.name: order_of(each, parts, way, seed, block) for each in neurons}

    by_layer = here().broadcast_tensors(orders)
    facts = {"by": WEIGHTS if text is None else by, "calibration": None if text is None else text.identity}
    return in_order(model, {layer.name: by_layer[layer.name] for layer in whole.architecture.layers}, facts)


def cut_as_stored(model: OpenModel, changed: bool) -> OpenModel:
    """The split model; where its parts cannot be cut from a quantised checkpoint as it is, a warning says why."""
    if not model.layout.quantized or (model.stored_parts and not changed):
        return model
    reason = "what changes experts needs one"
    if not changed:
        assert isinstance(model.partial, SplitModel) and model.whole is not None
        try:
            stored_parts(model.whole, model.partial.factors)
        except CompressionError as error:
            reason = str(error)
    logger.warning("%s is stored quantised; its parts are written in a plain dtype: %s", model.source.label, reason)
    return replace(model, stored_parts=None)


def in_order(model: OpenModel, orders: Mapping[str, Tensor], facts: Mapping[str, Any]) -> OpenModel:
    """The split model with the order [E, I] of each layer's neurons, by its name; `facts` join the plan's entry."""
    assert isinstance(model.partial, SplitModel) and model.whole is not None
    factors, stored = model.partial.factors, model.stored_parts
    if stored:
        stored.check(orders)
    entry = {
        "parts": factors.parts,
        "experts": model.whole.architecture.experts,
        **({"block": stored.block} if stored else {}),
        "output_factor": factors.output,
        "selection_factor": factors.selection,
        **facts,
        "order_sha256": digest_of(orders),
        "neurons": {name: packed(parts_of(order, factors.parts), factors.parts) for name, order in orders.items()},
    }
    return replace(model, partial=model.partial.ordered(orders), split=entry)


def as_planned(model: OpenModel, plan: CompressionPlan) -> OpenModel:
    """The model split and with the top-k that a plan names; refuses a split that was edited or does not fit."""
    if (model.split, model.top_k) == (plan.split, plan.top_k):
        return model
    check_source(plan.source, (model.whole or model).fingerprint)
    return as_decided(model, plan.split, plan.top_k)


def as_decided(model: OpenModel, split: Mapping[str, Any] | None, top_k: int | None) -> OpenModel:
    """The model split as a plan's entry says, and with this top-k; raises as `as_planned` does."""
    stored = model.whole or model
    if split is None:
        return seen_as(stored, 1, top_k)
    check_split(split)
    parts, width = int(split["parts"]), widths(build_meta(stored.config))
    seen, orders = seen_as(stored, parts, top_k), dict[str, Tensor]()
    for layer in stored.architecture.layers:
        text = split["neurons"].get(layer.name)
        orders[layer.name] = order_of_parts(unpacked(text, layer.experts, width[layer.name], parts, layer.name))
    if digest_of(orders) != split.get("order_sha256"):
        raise CompressionError("the plan's split deals neurons out otherwise than its order_sha256 says; restore it")
    if "block" not in split:
        seen = replace(seen, stored_parts=None)
    planned = in_order(seen, orders, {name: split[name] for name in ("by", "calibration") if name in split})
    assert planned.split is not None
    for name in ("experts", "output_factor", "selection_factor", "block"):
        if planned.split.get(name) != split.get(name):
            raise CompressionError(
                f"the plan's split says {name} {split.get(name)}, the model asks for {planned.split.get(name)}; "
                "restore it"
            )
    return replace(planned, split=split)


def packed(parts_of_neurons: Tensor, parts: int) -> str:
    """The part of each neuron, [E, I] below `parts`, as text."""
    bits = (parts_of_neurons.flatten().numpy()[:, None] >> np.arange((parts - 1).bit_length())) & 1
    return base64.b64encode(np.packbits(bits.astype(np.uint8)).tobytes()).decode()


def unpacked(text: Any, experts: int, width: int, parts: int, where: str) -> Tensor:
    """The part of each neuron, [E, I] int32; raises `CompressionError` for text that does not deal them out evenly."""
    try:
        data = np.frombuffer(base64.b64decode(text, validate=True), dtype=np.uint8)
    except (TypeError, ValueError) as error:
        raise CompressionError(f"{where}: what says where its neurons go is not base64; {REMEDY}") from error
    count, bits = experts * width, (parts - 1).bit_length()
    if len(data) != (needed := -(-count * bits // 8)):
        raise CompressionError(f"{where}: {len(data)} bytes say where its neurons go, it takes {needed}; {REMEDY}")
    flags = np.unpackbits(data)[: count * bits].reshape(count, bits).astype(np.int32)
    dealt = torch.from_numpy((flags << np.arange(bits, dtype=np.int32)).sum(1)).int().view(experts, width)
    even = torch.stack([(dealt == part).sum(1) for part in range(parts)])
    if bool((even != width // parts).any()):
        raise CompressionError(f"{where}: its neurons are not dealt out to {parts} parts of equal size; {REMEDY}")
    return dealt


def digest_of(orders: Mapping[str, Tensor]) -> str:
    """SHA-256 of every layer's name and order."""
    digest = hashlib.sha256()
    for name, order in orders.items():
        digest.update(name.encode() + b"\0" + order.int().contiguous().numpy().tobytes())
    return digest.hexdigest()
