"""MoE layers as plain data, and the numbers of experts that their routers take; importing this
loads no torch."""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

from compressor.errors import CompressionError
from compressor.frozen import frozen


@frozen
class ExpertTensor:
    """A state-dict entry whose dimension `dim` counts experts; its last `extra` rows belong to no
    routed expert."""

    key: str
    dim: int
    extra: int


@frozen
class MoeLayer:
    """One Mixture-of-Experts layer, keyed by the full name of its experts module."""

    name: str
    block: str  # the module that holds router and experts
    router: str
    decoder_layer: str  # the decoder layer that is loaded, cut and written as one
    index: int  # the decoder layer's number
    experts: int
    top_k: int
    routing_groups: int = 1  # n_group: experts compete within groups of neighbours
    chosen_groups: int = 1  # topk_group
    experts_per_group: int = 1  # the fewest experts that a group must hold for the router to run
    tensors: tuple[ExpertTensor, ...] = ()
    # the router's integer tables [rows, top-k] whose values are expert ids
    tables: tuple[str, ...] = ()
    parts: int = 1  # sub-experts that each stored expert has been split into


def check_count(layer: Any, count: int, where: str) -> None:
    """Refuse a number of experts that the router of a layer, or of its plan, cannot take; many
    would run, but wrongly."""
    groups = layer.routing_groups
    chosen = layer.chosen_groups
    top_k = layer.top_k
    needed = layer.experts_per_group
    per_group = count // groups
    if count > layer.experts:
        message = f"asked for, it has {layer.experts}; ask for at most {layer.experts}"
    elif count < top_k:
        message = f"are fewer than the top-k of {top_k}; keep at least {top_k}"
    elif count % groups:
        message = f"do not divide into its {groups} routing groups; keep a multiple of {groups}"
    elif per_group < needed:
        reach = f"leave {per_group} in each of its {groups} routing groups"
        message = f"{reach}, its router needs {needed}; keep at least {groups * needed}"
    elif chosen * per_group < top_k:
        least = math.ceil(top_k / chosen) * groups
        reach = f"leave {chosen * per_group} within a token's {chosen} routing groups"
        message = f"{reach}, fewer than the top-k of {top_k}; keep at least {least}"
    else:
        return
    raise CompressionError(f"{where}: {count} experts {message}")


def resolve_count(layers: Sequence[MoeLayer], experts: int | None, ratio: float | None) -> int:
    """Return the number of experts to keep in every layer; at most the share `ratio` is removed."""
    if (experts is None) == (ratio is None):
        raise CompressionError("say how many experts to keep: either --experts N or --ratio R")
    if ratio is not None:
        experts = left_by(layers[0].experts, ratio)
        experts += -experts % layers[0].routing_groups
    assert experts is not None
    for entry in layers:
        check_count(entry, experts, entry.name)
    return experts


def left_by(total: int, ratio: float) -> int:
    """Return how many of `total` experts stay if at most a share `ratio` is removed."""
    if not 0 <= ratio < 1:
        raise CompressionError(f"--ratio {ratio} is not a share; give a number from 0 to below 1")
    removed = int(total * ratio) + 1
    while removed / total > ratio:  # division is exact, multiplication is not: 0.29 of 100 is 29
        removed -= 1
    return total - removed


def counts_below(layers: Sequence[MoeLayer]) -> list[int]:
    """Return the smaller numbers of experts that all layers can take."""
    counts = []
    for count in range(1, layers[0].experts):
        with suppress(CompressionError):
            for layer in layers:
                check_count(layer, count, layer.name)
            counts.append(count)
    return counts


def layer_number(decoder_layer: str) -> int:
    """Return the number at the end of a decoder layer's name."""
    return int(decoder_layer.rsplit(".", 1)[-1])


def decoder_layer_of(name: str, layer_names: Iterable[str]) -> str:
    """Return the decoder layer that a module or a tensor belongs to; "" if it belongs to none."""
    return max(
        (decoder_layer for decoder_layer in layer_names if name.startswith(f"{decoder_layer}.")),
        key=len,
        default="",
    )


def layers_by_decoder_layer(layers: Iterable[MoeLayer]) -> dict[str, list[MoeLayer]]:
    """Return the MoE layers by the decoder layer that holds them."""
    by_decoder_layer = defaultdict(list)
    for layer in layers:
        by_decoder_layer[layer.decoder_layer].append(layer)
    return dict(by_decoder_layer)
