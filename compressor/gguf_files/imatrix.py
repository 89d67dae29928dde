"""Importance matrices of llama.cpp: for each expert how often it was visited, and what entered its down projection.

`llama-imatrix` writes GGUF files, in which each weight W that was multiplied has `W.in_sum2` [E, in], the sums of the
squares of its inputs, and `W.counts` [E, 1], the rows that were seen. The older format, `.dat`, has means in their
place and no counts. Places are noted first, and numbers read one tensor at a time.
"""

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from compressor.errors import CompressionError
from compressor.files import file_digest
from compressor.gguf_files.header import MAGIC, MOST_LETTERS, MOST_TENSORS, Tensor, read_header

Numbers = npt.NDArray[np.float64]
SUMS, COUNTS = ".in_sum2", ".counts"
FLOAT32 = 0  # the number of this type in GGUF


@dataclass(frozen=True, slots=True)
class _Place:
    """Where the float32 numbers of one entry lie."""

    begin: int
    count: int


@dataclass(frozen=True, slots=True)
class Imatrix:
    """An importance matrix on disk."""

    path: Path
    sums: Mapping[str, _Place]  # by weight
    counts: Mapping[str, _Place] | None  # None: an old file, which has none
    calls: Mapping[str, int]  # of an old file: by what its means are multiplied

    def has(self, weight: str) -> bool:
        """Whether a weight was multiplied when the file was made."""
        return weight in self.sums

    def digest(self) -> str:
        """SHA-256 of the file."""
        return file_digest(self.path)

    def visits(self, weight: str, experts: int) -> Numbers:
        """Rows that each expert saw: [E]; an old file does not tell."""
        return self._read((self.counts or {}).get(weight), f"{weight}{COUNTS}", experts, 1)[:, 0]

    def squares(self, weight: str, experts: int, width: int) -> Numbers:
        """Sums over the rows of each input's square: [E, in]; of an old file, means over an expert's rows."""
        found = self._read(self.sums.get(weight), f"{weight}{SUMS}", experts, width)
        if self.counts is not None:
            return found
        found = found / self.calls[weight]
        unseen = np.asarray(np.isclose(found, 1.0, rtol=1e-6, atol=0)).all(1)  # the format has no other word for it
        found[unseen] = 0.0
        return found

    def _read(self, place: _Place | None, name: str, experts: int, width: int) -> Numbers:
        if place is None:
            raise CompressionError(f"{self.path} has no {name}; make an imatrix of this very model")
        if place.count != experts * width:
            raise CompressionError(
                f"{self.path}: {name} has {place.count:,} numbers, {experts} experts need {experts * width:,}; make an "
                "imatrix of this very model"
            )
        with self.path.open("rb") as stream:
            stream.seek(place.begin)
            raw = stream.read(4 * place.count)
        found = np.frombuffer(raw, "<f4").astype(np.float64)
        if found.size != place.count or not (np.isfinite(found).all() and (found >= 0).all()):
            raise CompressionError(f"{self.path}: {name} has numbers that are no sums of squares; make it again")
        return found.reshape(experts, width)


def read_imatrix(path: Path) -> Imatrix:
    """Note what an importance matrix has, of either format; raises `CompressionError` for what is none."""
    try:
        with path.open("rb") as stream:
            new = stream.read(len(MAGIC)) == MAGIC
            if not new:
                stream.seek(0)
                return _read_old(path, stream, path.stat().st_size)
    except OSError as error:
        raise CompressionError(f"--imatrix {path} cannot be read ({error.strerror}); name a file") from error
    header = read_header(path)
    if header.text("general.type") != "imatrix":
        raise CompressionError(f"--imatrix {path} is a GGUF file, but no importance matrix; make one by llama-imatrix")
    return Imatrix(path, _places(header.tensors, SUMS), _places(header.tensors, COUNTS), {})


def _places(tensors: tuple[Tensor, ...], ending: str) -> dict[str, _Place]:
    return {
        tensor.name.removesuffix(ending): _Place(tensor.begin, tensor.parameters)
        for tensor in tensors
        if tensor.name.endswith(ending) and tensor.kind == FLOAT32
    }


def _read_old(path: Path, stream: BinaryIO, size: int) -> Imatrix:
    """The old format: a number of entries, and for each a name, a number of calls and so many float32 numbers."""

    def number(least: int, most: int) -> int:
        raw = stream.read(4)
        found = struct.unpack("<i", raw)[0] if len(raw) == 4 else -1
        if not least <= found <= most:
            raise CompressionError(f"{path} is no importance matrix, or is cut off; make one by llama-imatrix")
        return int(found)

    sums, calls = dict[str, _Place](), dict[str, int]()
    for _ in range(number(1, MOST_TENSORS)):
        name = stream.read(number(1, MOST_LETTERS)).decode("utf-8", "replace")
        calls[name] = number(1, 2**31 - 1)
        count = number(0, max(0, size - stream.tell() - 4) // 4)
        sums[name] = _Place(stream.tell(), count)
        stream.seek(4 * count, 1)
    return Imatrix(path, sums, None, calls)
