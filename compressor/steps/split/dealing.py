"""Dealing the neurons of a split model's experts out to their parts, by what they do on text or by their weights."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from compressor.data.batches import Calibration
from compressor.distributed.ranks import here
from compressor.errors import CompressionError
from compressor.model.opened import OpenModel
from compressor.progress import Progress
from compressor.recipe.plan import CLUSTERS, ENERGY, WEIGHTS
from compressor.steps.split.neurons import measured
from compressor.steps.split.opening import cut_as_stored, in_order
from compressor.steps.split.order import WAYS, order_of


def check_way(by: str, with_data: bool, remedy: str) -> None:
    """Refuse a way of dealing neurons out that does not exist, or that needs text where none is read."""
    if by not in WAYS:
        raise CompressionError(f"there is no --split-by {by!r}; known are {', '.join(WAYS)}")
    if by == CLUSTERS and not with_data:
        raise CompressionError(f"--split-by clusters needs text on which neurons fire; {remedy}")


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
    block = model.stored_parts.block if model.stored_parts else 1
    parts = model.architecture.layers[0].parts
    told: dict[str, Any] = {
        "by": WEIGHTS if text is None else by,
        "calibration": None if text is None else text.identity,
    }
    whole = model.whole

    def orders() -> Mapping[str, Tensor]:
        batches = None if text is None else [text.batches[number] for number in text.fit]
        way = CLUSTERS if text is not None and by == CLUSTERS else ENERGY
        found = measured(whole, batches, progress, way == CLUSTERS, seed)
        return {each.layer.name: order_of(each, parts, way, seed, block) for each in found}

    found = here().broadcast_tensors(orders)
    return in_order(model, {layer.name: found[layer.name] for layer in whole.architecture.layers}, told)
