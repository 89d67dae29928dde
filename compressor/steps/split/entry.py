"""What a plan says of a split: how often, how neurons were dealt out, and for every neuron the part it goes to.

The parts of a layer's neurons [E, I] stand as ceil(log2 S) bits each, row by row, in base64.
"""

import base64
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from compressor.errors import CompressionError
from compressor.model.architecture import MoeLayer
from compressor.steps.split.order import order_of_parts, parts_of


def packed(dealt: Tensor, parts: int) -> str:
    """The part of each neuron, [E, I] below `parts`, as text."""
    bits = (dealt.flatten().numpy()[:, None] >> np.arange(_bits(parts))) & 1
    return base64.b64encode(np.packbits(bits.astype(np.uint8)).tobytes()).decode()


def unpacked(text: Any, experts: int, width: int, parts: int, where: str) -> Tensor:
    """The part of each neuron, [E, I] int32; raises `CompressionError` for text that does not deal them out evenly."""
    remedy = "restore the plan or make it anew"
    try:
        found = np.frombuffer(base64.b64decode(text, validate=True), dtype=np.uint8)
    except (TypeError, ValueError) as error:
        raise CompressionError(f"{where}: what says where its neurons go is not base64; {remedy}") from error
    count, bits = experts * width, _bits(parts)
    if len(found) != (needed := -(-count * bits // 8)):
        raise CompressionError(f"{where}: {len(found)} bytes say where its neurons go, it takes {needed}; {remedy}")
    flags = np.unpackbits(found)[: count * bits].reshape(count, bits).astype(np.int32)
    dealt = torch.from_numpy((flags << np.arange(bits, dtype=np.int32)).sum(1)).int().view(experts, width)
    even = torch.stack([(dealt == part).sum(1) for part in range(parts)])
    if bool((even != width // parts).any()):
        raise CompressionError(f"{where}: its neurons are not dealt out to {parts} parts of equal size; {remedy}")
    return dealt


def _bits(parts: int) -> int:
    return (parts - 1).bit_length()


def digest_of(orders: Mapping[str, Tensor]) -> str:
    """SHA-256 of every layer's name and order."""
    digest = hashlib.sha256()
    for name, order in orders.items():
        digest.update(name.encode() + b"\0" + order.int().contiguous().numpy().tobytes())
    return digest.hexdigest()


def packed_orders(orders: Mapping[str, Tensor], parts: int) -> dict[str, str]:
    """For each layer by name the part of each of its neurons, as a plan says it."""
    return {name: packed(parts_of(order, parts), parts) for name, order in orders.items()}


def read_orders(split: Mapping[str, Any], layers: Sequence[MoeLayer], widths: Mapping[str, int]) -> dict[str, Tensor]:
    """The order of every layer's neurons [E, I], by its name, from a plan's entry; `layers` are those of the source.

    Raises `CompressionError` for a layer that is missing or not dealt out evenly, and where the digest is another.
    """
    parts, told = int(split["parts"]), split.get("neurons")
    if not isinstance(told, Mapping):
        raise CompressionError("the plan's split does not say where neurons go; plan or split again")
    found = {
        layer.name: order_of_parts(unpacked(told.get(layer.name), layer.experts, widths[layer.name], parts, layer.name))
        for layer in layers
    }
    if digest_of(found) != split.get("order_sha256"):
        raise CompressionError("the plan's split deals neurons out otherwise than its order_sha256 says; restore it")
    return found
