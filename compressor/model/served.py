"""What servers make of an opened model, and of what becomes of it."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import nn

from compressor.model.architecture import Architecture, MoeLayer
from compressor.model.experts import width_of
from compressor.model.opened import OpenModel
from compressor.model.routers import takes
from compressor.serving.advice import Advice, Served, advise, broken, warnings

logger = logging.getLogger(__name__)


def served_as(architecture: Architecture, stock: nn.Module, quantization: str = "") -> Served:
    """A model as servers see it, from its architecture and the stock model (on meta)."""
    layer, text = architecture.layers[0], architecture.config.get_text_config()
    return Served(
        architecture.family,
        layer.experts,
        layer.top_k,
        width_of(stock.get_submodule(layer.name)),
        groups=layer.routing_groups,
        chosen_groups=layer.chosen_groups,
        selection_bias=_selection_bias(layer),
        tied=bool(getattr(text, "tie_word_embeddings", False)),
        quantization=quantization,
    )


def _selection_bias(layer: MoeLayer) -> bool:
    """Whether the router has a bias beside that of its logits, which is called just so."""
    names = [tensor.key.rpartition(".")[2] for tensor in layer.tensors if not tensor.key.startswith(f"{layer.name}.")]
    return any("bias" in name and name != "bias" for name in names)


def quantization_of(raw_config: Any) -> str:
    """The method that a checkpoint's config.json names; empty for none."""
    found = raw_config.get("quantization_config") or {}
    return str(found.get("quant_method")) if found else ""


def served_model(model: OpenModel) -> Served:
    """An opened model as servers see it."""
    return served_as(model.architecture, model.partial.model, quantization_of(model.checkpoint.raw_config))


def counts_below(layers: Sequence[MoeLayer]) -> list[int]:
    """Numbers of experts below their own that all layers can take."""
    return [count for count in range(1, layers[0].experts) if all(takes(layer, count) for layer in layers)]


def advice_on(served: Served, layers: Sequence[MoeLayer], experts: int) -> Advice:
    """What servers make of a model that keeps `experts` of its `layers`; `served` says the rest: top-k, width ..."""
    return advise(replace(served, experts=experts), counts_below(layers))


@contextmanager
def unwarned() -> Iterator[None]:
    """No warnings of servers within: what tries many numbers would warn of each."""
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = False


def warn_of_servers(before: Served, after: Served, layers: Sequence[MoeLayer]) -> None:
    """Warn of what servers do worse with a model after a cut or a split; `layers` are those that experts go from.

    A split's `after` has the number, the top-k and the width that come of it, and its `layers` are the split ones.
    """
    for line in warnings(advice_on(after, layers, after.experts), broken(before)):
        logger.warning("%s", line)
