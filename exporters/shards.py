"""Which tensor goes into which file of a sharded safetensors checkpoint, and where in it; and its bytes there."""

import errno
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compressor.checkpoint.headers import DTYPE_BITS
from compressor.errors import CompressionError
from compressor.surgery.tensors import FileRange, OutputJob, OutputTensor, Piece

COPY_BYTES = 64 * 2**20


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
        shards.append(_shard(name, sorted(content, key=lambda output: -DTYPE_BITS[output.dtype])))
    return shards


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
    places = dict(sorted((name, shard.name) for shard in shards for name in shard.offsets))
    parameters = sum(output.parameters for output in job.outputs)
    metadata = {"total_parameters": parameters, "total_size": job.nbytes}
    return (json.dumps({"metadata": metadata, "weight_map": places}, indent=2) + "\n").encode()


def begin_shard(file: int, shard: Shard) -> None:
    """Give a shard's file its full size and its header; what a resumed run finds in place stays."""
    if os.fstat(file).st_size != shard.nbytes:
        os.ftruncate(file, 0)
        try:
            os.posix_fallocate(file, 0, shard.nbytes)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                raise
            os.ftruncate(file, shard.nbytes)
    os.pwrite(file, shard.header, 0)


def _copy_range(piece: FileRange, target: int, offset: int) -> None:
    with piece.path.open("rb", buffering=0) as source:
        done = 0
        while done < piece.length:
            size = min(piece.length - done, COPY_BYTES)
            done += _copy_some(source.fileno(), piece.offset + done, target, offset + done, size, piece.path)


def _copy_some(source: int, begin: int, target: int, offset: int, size: int, path: Path) -> int:
    copy_in_kernel = getattr(os, "copy_file_range", None)
    if copy_in_kernel is not None:
        try:
            copied = int(copy_in_kernel(source, target, size, begin, offset))
            if copied:
                return copied
        except OSError as error:
            if error.errno not in (errno.EXDEV, errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP):
                raise
    chunk = os.pread(source, min(size, 8 * 2**20), begin)
    if not chunk:
        raise CompressionError(f"{path} ended while it was copied; it was changed or cut off meanwhile")
    return os.pwrite(target, chunk, offset)


def put(piece: Piece, target: int, offset: int) -> int:
    """Write bytes, or a range of another file, at an offset of an open file; returns how many bytes they are."""
    if isinstance(piece, FileRange):
        _copy_range(piece, target, offset)
        return piece.length
    view = memoryview(piece)
    done = 0
    while done < len(view):
        done += os.pwrite(target, view[done : done + COPY_BYTES], offset + done)
    return len(view)
