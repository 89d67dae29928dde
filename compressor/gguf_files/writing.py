"""A GGUF model with fewer experts, written whole: each tensor is a copy of bytes, and no number is computed."""

import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from compressor.errors import CompressionError
from compressor.files import full_disk_told
from compressor.gguf_files.header import MAGIC, MOST_HEADER, Header, Tensor, Value, packed, padded, read_header
from compressor.gguf_files.parts import Gguf, has_magic, part_names
from compressor.locking import alone, check_parent
from compressor.progress import Progress
from compressor.words import runs

CHUNK = 2**22  # bytes in memory at a time
Kept = Mapping[str, Sequence[int]]  # for each tensor that is cut, the experts that stay, ascending


def check_output(out: Path, model: Gguf, overwrite: bool) -> list[Path]:
    """The files that will be written; refuses one of the source's, or one that exists and is not to be replaced."""
    check_parent(out)
    paths = part_names(out, len(model.parts))
    for path in {out, *paths}:
        if any(path.exists() and path.samefile(part.path) for part in model.parts):
            raise CompressionError(f"{path} is the model itself; name another output")
    for path in paths:
        if not os.path.lexists(path):
            continue
        if not overwrite:
            raise CompressionError(f"{path} exists already; name another output or pass --overwrite")
        if path.is_symlink() or not has_magic(path):
            raise CompressionError(f"{path} is no GGUF file, so --overwrite will not replace it; name another output")
    return paths


def write_gguf(
    model: Gguf, kept: Kept, added: Mapping[str, Value], out: Path, overwrite: bool, progress: Progress
) -> list[Path]:
    """Write the model with the experts that stay, into as many files as it has; all of them or none.

    `added` are values of the metadata, in place of those of the same keys. The first file, without which the others
    cannot be loaded, is put in place last.
    """
    paths = check_output(out, model, overwrite)
    with full_disk_told(out.parent), alone(out) as work:
        fresh = [work / path.name for path in paths]
        placed = list[Path]()
        try:
            progress.start("writing", sum(len(part.tensors) for part in model.parts))
            for part, path in zip(model.parts, fresh, strict=True):
                path.unlink(missing_ok=True)  # of a run that was killed
                _write(part, kept, added if part is model.first else {}, path, progress)
            check_output(out, model, overwrite)
            if len(paths) > 1:
                paths[0].unlink(missing_ok=True)  # so that old and new parts are never loaded together
            for path, made in reversed([*zip(paths, fresh, strict=True)]):
                made.replace(path)
                placed.append(path)
        except BaseException:
            for path in (*fresh, *(placed if len(paths) > 1 else ())):
                with suppress(OSError):
                    path.unlink(missing_ok=True)
            raise
    return paths


def _write(part: Header, kept: Kept, added: Mapping[str, Value], path: Path, progress: Progress) -> None:
    """One file of the model."""
    values = {**part.values, **added}
    tensors = [t.with_experts(len(kept[t.name])) if t.name in kept else t for t in part.tensors]
    head = b"".join(_head(part.version, values, tensors, part.alignment))
    if len(head) > MOST_HEADER:
        raise CompressionError(f"{part.path.name}: with the plan its header has more than {MOST_HEADER:,} bytes")
    with part.path.open("rb") as source, path.open("xb") as target:
        target.write(head)
        for tensor in part.tensors:
            target.write(bytes(padded(target.tell(), part.alignment) - target.tell()))
            for begin, nbytes in _ranges(tensor, kept):
                _copy(source, target, begin, nbytes, tensor.name)
            progress.advance(tensor.name)
        target.write(bytes(padded(target.tell(), part.alignment) - target.tell()))
    found = read_header(path)
    if [(each.name, each.kind, each.shape) for each in found.tensors] != [(t.name, t.kind, t.shape) for t in tensors]:
        raise CompressionError(f"{path} does not read as it was written; run the command again")


def _head(version: int, values: Mapping[str, Value], tensors: Sequence[Tensor], alignment: int) -> Iterator[bytes]:
    """Everything before the first tensor but the last padding."""
    yield MAGIC + struct.pack("<IQQ", version, len(tensors), len(values))
    for key, value in values.items():
        yield packed(key) + struct.pack("<I", value.kind) + value.raw
    offset = 0
    for tensor in tensors:
        sizes = tensor.shape[::-1]
        yield packed(tensor.name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, tensor.kind, offset)
        offset = padded(offset + tensor.nbytes, alignment)


def _ranges(tensor: Tensor, kept: Kept) -> list[tuple[int, int]]:
    """Where the bytes of a tensor that stay begin, and how many they are: experts that are neighbours together."""
    if tensor.name not in kept:
        return [(tensor.begin, tensor.nbytes)]
    size = tensor.nbytes // tensor.shape[0]
    return [(tensor.begin + first * size, (last + 1 - first) * size) for first, last in runs(kept[tensor.name])]


def _copy(source: BinaryIO, target: BinaryIO, begin: int, nbytes: int, name: str) -> None:
    """Copy a range of bytes, a chunk at a time."""
    source.seek(begin)
    while nbytes:
        chunk = source.read(min(nbytes, CHUNK))
        if not chunk:
            raise CompressionError(f"{name} was cut off while it was read; check the model's file and run again")
        target.write(chunk)
        nbytes -= len(chunk)
