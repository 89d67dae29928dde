"""Which tensor goes into which file of a sharded safetensors checkpoint, and where in it."""

import json
from dataclasses import dataclass
from typing import Any

from compressor.checkpoint.headers import DTYPE_BITS
from compressor.surgery.tensors import OutputJob, OutputTensor


@dataclass(frozen=True, slots=True)
class Shard:
    """One file of the output: its name, header bytes, and each tensor's absolute offset."""

    name: str
    header: bytes
    offsets: dict[str, int]
    nbytes: int


def lay_out(outputs: tuple[OutputTensor, ...], max_shard_bytes: int) -> list[Shard]:
    """Fill shards in order up to a size; within a shard, wide dtypes come first so that every tensor is aligned."""
    bins: list[list[OutputTensor]] = [[]]
    filled = 0
    for output in outputs:
        if bins[-1] and filled + output.nbytes > max_shard_bytes:
            bins.append([])
            filled = 0
        bins[-1].append(output)
        filled += output.nbytes
    shards = []
    for number, content in enumerate(bins, start=1):
        name = "model.safetensors" if len(bins) == 1 else f"model-{number:05d}-of-{len(bins):05d}.safetensors"
        shards.append(_shard(name, sorted(content, key=_width, reverse=True)))
    return shards


def _width(output: OutputTensor) -> int:
    return DTYPE_BITS[output.dtype]


def _shard(name: str, content: list[OutputTensor]) -> Shard:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position, places = 0, {}
    for output in content:
        entries[output.name] = {
            "dtype": output.dtype,
            "shape": list(output.shape),
            "data_offsets": [position, position + output.nbytes],
        }
        places[output.name] = position
        position += output.nbytes
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    header = len(text).to_bytes(8, "little") + text
    return Shard(name, header, {key: start + place for key, place in places.items()}, start + position)


def index_json(job: OutputJob, shards: list[Shard]) -> bytes:
    """The index file that tells loaders which shard holds a tensor."""
    weight_map = {name: shard.name for shard in shards for name in shard.offsets}
    parameters = sum(output.parameters for output in job.outputs)
    metadata = {"total_parameters": parameters, "total_size": job.nbytes}
    return (
        json.dumps({"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))}, indent=2) + "\n"
    ).encode()
