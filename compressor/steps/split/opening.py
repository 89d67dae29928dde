"""A model seen as it is to be compressed: its experts split, and with the top-k that smaller models write."""

import copy
import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from torch import Tensor

from compressor.errors import CompressionError
from compressor.model.architecture import Architecture, MoeLayer, build_meta
from compressor.model.opened import OpenModel, served_model, warn_of_servers
from compressor.recipe.plan import MOST_PARTS, CompressionPlan, check_source
from compressor.steps.split.entry import digest_of, packed_orders, read_orders
from compressor.steps.split.exact import factors_of
from compressor.steps.split.shape import SplitShape, split_shape, widths
from compressor.steps.split.stored import stored_parts
from compressor.steps.split.tensors import Factors
from compressor.steps.split.top_k import top_k_fields
from compressor.steps.split.view import SplitModel
from compressor.surgery.configuration import fields_set

logger = logging.getLogger(__name__)


def seen_as(model: OpenModel, parts: int = 1, top_k: int | None = None) -> OpenModel:
    """The model with each expert as `parts`, their neurons in no order yet, whose smaller versions write `top_k`.

    Raises `CompressionError` where experts cannot be split exactly, and for a top-k that the model has not.
    """
    if parts == 1 and top_k is None:
        return model
    seen = replace(model, whole=model, found={})
    if parts > MOST_PARTS:
        raise CompressionError(f"--split {parts} is more than {MOST_PARTS} parts; give fewer")
    if parts > 1:
        shape, factors = _way(model, parts)
        stored = copy.copy(model.checkpoint)
        stored.raw_config = fields_set(stored.raw_config, model.config, shape.fields)
        partial = SplitModel(model.partial, model.architecture, shape, factors)
        said = {path: value for path, value in shape.fields.items() if path != model.architecture.count_field}
        layers = tuple(replace(layer, parts=parts) for layer in shape.architecture.layers)
        architecture = replace(shape.architecture, layers=layers, written=said)
        seen = replace(seen, config=architecture.config, checkpoint=stored, architecture=architecture, partial=partial)
        if model.layout.quantized:
            with suppress(CompressionError):  # the reason is told once it matters
                seen = replace(seen, stored_parts=stored_parts(model, parts, factors))
    return with_top_k(seen, top_k)


def _way(model: OpenModel, parts: int) -> tuple[SplitShape, Factors]:
    """How the model is split so; found once, for blocks are run for that."""
    known = f"split in {parts}"
    if known not in model.found:
        shape = split_shape(model.architecture, parts)
        model.found[known] = shape, factors_of(model.architecture, shape)
    found: tuple[SplitShape, Factors] = model.found[known]
    return found


def with_top_k(model: OpenModel, top_k: int | None) -> OpenModel:
    """The model whose smaller versions write `top_k`; raises `CompressionError` for one that the model has not."""
    if top_k is None:
        return model
    return replace(model, architecture=_with_top_k(model.architecture, top_k), top_k=top_k, whole=model.whole or model)


def _with_top_k(architecture: Architecture, top_k: int) -> Architecture:
    """The architecture whose smaller models send a token to `top_k` experts, or to fewer where a layer does now."""
    most = max(layer.top_k for layer in architecture.layers)
    if not 1 <= top_k <= most:
        raise CompressionError(f"--top-k {top_k} is not between 1 and the {most} experts that a token visits now")

    def fewer(layer: MoeLayer) -> MoeLayer:
        return replace(layer, top_k=min(layer.top_k, top_k))

    layers = tuple(map(fewer, architecture.layers))
    wanted = {layer.name: layer.top_k for layer in layers}
    fields, _ = top_k_fields(architecture.config, architecture, wanted, lambda each: min(each, top_k))
    return replace(architecture, layers=layers, written={**architecture.written, **fields})


def part_width(model: OpenModel) -> int:
    """Neurons of a part of the narrowest experts of a split model."""
    assert isinstance(model.partial, SplitModel)
    return model.partial.shape.width


def warn_of_parts(model: OpenModel) -> None:
    """Say what servers make of a split."""
    after = served_model(model) if model.stored_parts else replace(served_model(model), quantization="")
    warn_of_servers(served_model(model.whole or model), after, model.architecture.layers)


def cut_as_stored(model: OpenModel, changed: bool) -> OpenModel:
    """The split model, whose parts are cut from a quantised checkpoint as it is unless experts will be `changed`.

    Says so where they are written in a plain dtype instead, and why.
    """
    if not model.layout.quantized or (model.stored_parts and not changed):
        return model
    reason = "what changes experts needs one"
    if not changed:
        assert isinstance(model.partial, SplitModel) and model.whole is not None
        try:
            stored_parts(model.whole, model.partial.shape.parts, model.partial.factors)
        except CompressionError as error:
            reason = str(error)
    logger.warning("%s is stored quantised; its parts are written in a plain dtype: %s", model.source.label, reason)
    return replace(model, stored_parts=None)


def in_order(model: OpenModel, orders: Mapping[str, Tensor], told: Mapping[str, Any]) -> OpenModel:
    """The split model with the order [E, I] of each layer's neurons, by its name; `told` is what else a plan says."""
    assert isinstance(model.partial, SplitModel) and model.whole is not None
    partial, stored = model.partial, model.stored_parts
    if stored:
        stored.check(orders)
    entry = {
        "parts": partial.shape.parts,
        "experts": partial.architecture.experts,
        **({"block": stored.block} if stored else {}),
        "output_factor": partial.factors.output,
        "selection_factor": partial.factors.selection,
        **told,
        "order_sha256": digest_of(orders),
        "neurons": packed_orders(orders, partial.shape.parts),
    }
    return replace(model, partial=partial.ordered(orders), split=entry)


def as_planned(model: OpenModel, plan: CompressionPlan) -> OpenModel:
    """The model seen as a plan's layers are: split as it says, and with its top-k.

    Raises `CompressionError` for a split that is not as the model allows, or was edited.
    """
    if (model.split, model.top_k) == (plan.split, plan.top_k):
        return model
    check_source(plan.source, (model.whole or model).fingerprint)
    return as_decided(model, plan.split, plan.top_k)


def as_decided(model: OpenModel, split: Mapping[str, Any] | None, top_k: int | None) -> OpenModel:
    """The model split as a plan's entry says, and with this top-k; raises as `as_planned` does."""
    stored = model.whole or model
    if split is None:
        return seen_as(stored, 1, top_k)
    seen = seen_as(stored, int(split["parts"]), top_k)
    assert isinstance(seen.partial, SplitModel)
    own = widths(build_meta(stored.config))
    orders = read_orders(split, stored.architecture.layers, own)
    told = {name: split[name] for name in ("by", "calibration") if name in split}
    if "block" not in split:
        seen = replace(seen, stored_parts=None)
    found = in_order(seen, orders, told)
    for name in ("experts", "output_factor", "selection_factor", "block"):
        if found.split is None or found.split.get(name) != split.get(name):
            raise CompressionError(
                f"the plan's split says {name} {split.get(name)}, the model asks for "
                f"{(found.split or {}).get(name)}; restore it"
            )
    return replace(found, split=split)
