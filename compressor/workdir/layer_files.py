"""One safetensors file per decoder layer: laid out before its first byte, written beside, flushed and renamed.

A file's header says which steps made it; one that cannot be read, as after a loss of power, counts as none.
"""

import errno
import json
import math
import os
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from compressor.checkpoint.reader import DTYPE_BITS
from compressor.errors import CompressionError
from compressor.surgery.tensors import FileRange, OutputTensor, Piece

COPY_BYTES = 64 * 2**20
WRITERS = 2  # tensors in work at once: checking one for NaN and copying another keep two cores busy
STEPS = "steps"  # in a header's metadata: names of the steps that made the file
Made = Iterable[tuple[str, Iterator[Piece]]]  # names of tensors, and their bytes


def header_of(outputs: Sequence[OutputTensor], steps: Sequence[str] = ()) -> tuple[bytes, dict[str, int]]:
    """The header of a file of these tensors, and where each begins; wide dtypes come first, so that all are aligned."""
    metadata = {"format": "pt", **({STEPS: json.dumps(list(steps))} if steps else {})}
    entries: dict[str, Any] = {"__metadata__": metadata}
    position, places = 0, dict[str, int]()
    for output in sorted(outputs, key=lambda output: -DTYPE_BITS[output.dtype]):
        end = position + output.nbytes
        entries[output.name] = {"dtype": output.dtype, "shape": list(output.shape), "data_offsets": [position, end]}
        places[output.name] = position
        position = end
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    return len(text).to_bytes(8, "little") + text, {name: start + place for name, place in places.items()}


def made_by(path: Path) -> tuple[str, ...] | None:
    """The steps that made a file; None if it is not there, or cannot be read."""
    try:
        with safe_open(path, framework="pt") as file:
            return tuple(json.loads((file.metadata() or {}).get(STEPS, "[]")))
    except (OSError, SafetensorError, ValueError):
        return None


class LayerWriter:
    """Writes files one after another; the disk flushes one while the next is computed."""

    def __init__(self) -> None:
        self._flusher, self._pending = ThreadPoolExecutor(1), deque[Future[None]]()

    def __enter__(self) -> "LayerWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            while self._pending and kind is None:
                self._pending.popleft().result()
        finally:
            self._flusher.shutdown(cancel_futures=True)

    def write(
        self,
        path: Path,
        outputs: Sequence[OutputTensor],
        made: Made,
        steps: Sequence[str] = (),
        done: Callable[[], None] = lambda: None,
    ) -> None:
        """Write the `outputs` from what is `made`; `done` is called when the file has its name.

        Raises `CompressionError` where not exactly these tensors are made.
        """
        header, places = header_of(outputs, steps)
        sizes = {output.name: output.nbytes for output in outputs}
        fresh = path.with_name(f"{path.name}.new")
        file = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            nbytes = len(header) + sum(sizes.values())
            try:
                os.posix_fallocate(file, 0, nbytes)
            except OSError as error:
                if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                    raise
                os.ftruncate(file, nbytes)
            os.pwrite(file, header, 0)
            _write_tensors(file, made, sizes, places)
        except BaseException:
            os.close(file)
            fresh.unlink(missing_ok=True)
            raise
        self._pending.append(self._flusher.submit(_settle, file, fresh, path, done))
        while len(self._pending) > 1:  # one file at most waits for the disk
            self._pending.popleft().result()


def _settle(file: int, fresh: Path, path: Path, done: Callable[[], None]) -> None:
    try:
        os.fsync(file)
    finally:
        os.close(file)
    fresh.replace(path)
    done()


def _write_tensors(file: int, made: Made, sizes: Mapping[str, int], places: Mapping[str, int]) -> None:
    missing = set(sizes)
    with ThreadPoolExecutor(WRITERS) as pool:
        running = deque[Future[None]]()
        for name, content in made:
            assert name in missing, f"tensor {name!r} was made and has no place in the output"
            missing.discard(name)
            running.append(pool.submit(_write_tensor, content, file, places[name], sizes[name], name))
            if len(running) > WRITERS:
                running.popleft().result()
        for task in running:
            task.result()
    assert not missing, f"tensor {min(missing)!r} of the output was not made"


def _write_tensor(content: Iterator[Piece], file: int, offset: int, nbytes: int, name: str) -> None:
    written = 0
    for piece in content:
        written += put(piece, file, offset + written)
    assert written == nbytes, f"tensor {name!r} came out with {written} bytes instead of {nbytes}"


def put(piece: Piece, target: int, offset: int) -> int:
    """Write bytes, or a range of another file, at an offset of an open file; returns how many bytes they are."""
    if isinstance(piece, FileRange):
        with piece.path.open("rb", buffering=0) as source:
            done = 0
            while done < piece.length:
                size = min(piece.length - done, COPY_BYTES)
                done += _copy_some(source.fileno(), piece.offset + done, target, offset + done, size, piece.path)
        return piece.length
    view, done = memoryview(piece), 0
    while done < len(view):
        done += os.pwrite(target, view[done : done + COPY_BYTES], offset + done)
    return len(view)


def _copy_some(source: int, begin: int, target: int, offset: int, size: int, path: Path) -> int:
    copy_in_kernel = getattr(os, "copy_file_range", None)
    if copy_in_kernel is not None:
        try:
            if copied := int(copy_in_kernel(source, target, size, begin, offset)):
                return copied
        except OSError as error:
            if error.errno not in (errno.EXDEV, errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP):
                raise
    chunk = os.pread(source, min(size, 8 * 2**20), begin)
    if not chunk:
        raise CompressionError(f"{path} ended while it was copied; it was changed or cut off meanwhile")
    return os.pwrite(target, chunk, offset)


def shards(sizes: Sequence[int], most: float, small: float = math.inf) -> list[list[int]]:
    """Numbers of what goes into one file: in order, up to `most` bytes; what is larger than `small` stays alone."""
    found, filled = list[list[int]](), 0
    for number, nbytes in enumerate(sizes):
        alone = nbytes > small or not found or sizes[found[-1][-1]] > small
        if alone or filled + nbytes > most:
            found.append([])
            filled = 0
        found[-1].append(number)
        filled += nbytes
    return found


def index_json(places: Mapping[str, str], outputs: Collection[OutputTensor]) -> bytes:
    """The index file that tells loaders which shard holds a tensor."""
    metadata = {
        "total_parameters": sum(output.parameters for output in outputs),
        "total_size": sum(output.nbytes for output in outputs),
    }
    return (json.dumps({"metadata": metadata, "weight_map": dict(sorted(places.items()))}, indent=2) + "\n").encode()
