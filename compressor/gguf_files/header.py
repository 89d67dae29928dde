"""The header of a GGUF file, bounded: values as they are stored, and where each tensor lies.

`gguf.GGUFReader` makes an object of every token of the vocabulary, maps the whole file, and loops as often as a number
in the file says, whatever the file's size. Here every count and size is held against what is left of the file first.
"""

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from compressor.errors import CompressionError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT = 32  # where general.alignment says nothing
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
WHOLE = frozenset({0, 1, 2, 3, 4, 5, 10, 11})  # of these the whole numbers
STRING, ARRAY = 8, 9
MOST_HEADER = 2**27  # bytes: several times the largest vocabulary with its merges
MOST_VALUES, MOST_TENSORS = 2**16, 2**17
MOST_ELEMENTS = 2**22  # of an array
MOST_DIMENSIONS = 4  # that ggml has
MOST_LETTERS = 1_000  # of a key or a tensor's name
MOST_ALIGNMENT = 2**16
EXTRA = 'pip install "moe-compressor[gguf]"'


@dataclass(frozen=True, slots=True)
class Value:
    """One value of the metadata: its type's number in the format, and its bytes after that number."""

    kind: int
    raw: bytes

    def number(self) -> int | None:
        """A whole number; None for what is none."""
        return int(struct.unpack(f"<{NUMBERS[self.kind]}", self.raw)[0]) if self.kind in WHOLE else None

    def numbers(self) -> tuple[int, ...] | None:
        """The whole numbers of an array; None for what is none."""
        if self.kind != ARRAY or (inner := int.from_bytes(self.raw[:4], "little")) not in WHOLE:
            return None
        return struct.unpack(f"<{int.from_bytes(self.raw[4:12], 'little')}{NUMBERS[inner]}", self.raw[12:])

    def text(self) -> str | None:
        """A string; None for what is none."""
        return self.raw[8:].decode("utf-8", "replace") if self.kind == STRING else None

    def with_number(self, number: int) -> "Value":
        """A value of the same type with another whole number, which must fit."""
        return Value(self.kind, struct.pack(f"<{NUMBERS[self.kind]}", number))

    @classmethod
    def of_text(cls, text: str) -> "Value":
        """A string as a value."""
        return cls(STRING, packed(text))


@dataclass(frozen=True, slots=True)
class Tensor:
    """Where one tensor lies. `shape` is outermost first, the reverse of the file's order: [E, out, in] of experts."""

    name: str
    kind: int  # its quantisation's number in the format
    shape: tuple[int, ...]
    begin: int  # absolute, in its file
    nbytes: int

    @property
    def parameters(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def with_experts(self, count: int) -> "Tensor":
        """The same with another outermost dimension; where it lies does not count."""
        shape = (count, *self.shape[1:])
        return Tensor(self.name, self.kind, shape, self.begin, self.nbytes // self.shape[0] * count)


@dataclass(frozen=True, slots=True)
class Header:
    """One file: its values in their order and its tensors in theirs, which lie one after another."""

    path: Path
    version: int
    alignment: int
    values: Mapping[str, Value]
    tensors: tuple[Tensor, ...]
    size: int  # of the file in bytes

    def number(self, key: str, default: int = 0) -> int:
        """A whole number of the metadata, or the default where there is none."""
        found = self.values[key].number() if key in self.values else None
        return default if found is None else found

    def text(self, key: str) -> str:
        """A string of the metadata; an empty one where there is none."""
        return (self.values[key].text() if key in self.values else None) or ""


def packed(text: str) -> bytes:
    """A string as the format has it: its length in bytes, then UTF-8."""
    raw = text.encode("utf-8", "backslashreplace")
    return struct.pack("<Q", len(raw)) + raw


def padded(position: int, alignment: int) -> int:
    """The next multiple of the alignment."""
    return position + -position % alignment


def type_sizes() -> Mapping[int, tuple[int, int]]:
    """For each quantisation: elements of a block, and its bytes."""
    try:
        from gguf.constants import GGML_QUANT_SIZES
    except ImportError as error:
        raise CompressionError(f"GGUF files need the package gguf; {EXTRA}") from error
    return {int(kind): sizes for kind, sizes in GGML_QUANT_SIZES.items()}


def type_name(kind: int) -> str:
    """10 -> 'Q2_K'."""
    from gguf.constants import GGMLQuantizationType

    return str(GGMLQuantizationType(kind).name)


def broken(path: Path, fault: str) -> CompressionError:
    """A file that cannot be read as GGUF."""
    return CompressionError(f"{path} cannot be read as GGUF: {fault}; download or convert it again")


class _Cursor:
    """A place in a file, past whose end, or too far from whose begin, nothing is read."""

    def __init__(self, path: Path, stream: BinaryIO, size: int) -> None:
        self.path, self.stream, self.size, self.place = path, stream, size, 0

    def take(self, count: int, what: str) -> bytes:
        if self.place + count > self.size:
            raise broken(self.path, f"it ends within {what}, at {self.size:,} bytes")
        if self.place + count > MOST_HEADER:
            raise broken(self.path, f"its header has more than {MOST_HEADER:,} bytes")
        found = self.stream.read(count)
        if len(found) != count:
            raise broken(self.path, f"it ends within {what}; it was cut off while it was read")
        self.place += count
        return found

    def number(self, code: str, what: str) -> int:
        return int(struct.unpack(f"<{code}", self.take(struct.calcsize(code), what))[0])

    def count(self, code: str, most: int, what: str) -> int:
        if (found := self.number(code, what)) > most:
            raise broken(self.path, f"{what} is {found:,}, more than {most:,}")
        return found

    def name(self, what: str) -> str:
        raw = self.take(self.count("Q", MOST_LETTERS, f"the length of {what}"), what)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise broken(self.path, f"{what} is no UTF-8") from error

    def value(self, key: str) -> Value:
        where = f"the value of {key!r}"
        kind = self.number("I", where)
        if kind != ARRAY:
            return Value(kind, self.element(kind, where))
        inner, count = self.number("I", where), self.count("Q", MOST_ELEMENTS, f"the length of {key!r}")
        start = struct.pack("<IQ", inner, count)
        if inner in NUMBERS:
            return Value(kind, start + self.take(struct.calcsize(NUMBERS[inner]) * count, where))
        return Value(kind, b"".join([start, *(self.element(inner, where) for _ in range(count))]))

    def element(self, kind: int, where: str) -> bytes:
        if kind in NUMBERS:
            return self.take(struct.calcsize(NUMBERS[kind]), where)
        if kind != STRING:
            raise broken(self.path, f"{where} has the unknown type {kind}")
        length = self.take(8, where)
        return length + self.take(int.from_bytes(length, "little"), where)


def read_header(path: Path) -> Header:
    """Read the header of one file; `CompressionError` for what is no GGUF, is cut off, or would not load.

    Tensors must lie one after another, aligned and in their order, as llama.cpp asks for.
    """
    sizes = type_sizes()
    try:
        with path.open("rb") as stream:
            cursor = _Cursor(path, stream, path.stat().st_size)
            return _read(cursor, sizes)
    except OSError as error:
        raise CompressionError(f"{path} cannot be read ({error.strerror}); name a GGUF file") from error


def _read(cursor: _Cursor, sizes: Mapping[int, tuple[int, int]]) -> Header:
    if cursor.take(4, "its first 4 bytes") != MAGIC:
        raise broken(cursor.path, "it does not begin with GGUF")
    if (version := cursor.number("I", "its version")) not in VERSIONS:
        raise broken(cursor.path, f"it has the version {version}, known are 2 and 3 of little-endian machines")
    tensor_count = cursor.count("Q", MOST_TENSORS, "the number of its tensors")
    values = dict[str, Value]()
    for _ in range(cursor.count("Q", MOST_VALUES, "the number of its values")):
        key = cursor.name("a key")
        if key in values:
            raise broken(cursor.path, f"the key {key!r} comes twice")
        values[key] = cursor.value(key)
    alignment = values["general.alignment"].number() if "general.alignment" in values else ALIGNMENT
    if not alignment or not 0 < alignment <= MOST_ALIGNMENT or alignment & (alignment - 1):
        raise broken(cursor.path, f"its alignment is {alignment}, which is no power of two")
    found = [_tensor(cursor, sizes) for _ in range(tensor_count)]
    begin = padded(cursor.place, alignment)
    tensors, names = list[Tensor](), set[str]()
    for name, kind, shape, offset in found:
        block, nbytes = sizes[kind]
        whole = math.prod(shape) // block * nbytes
        if begin + offset != (begin if not tensors else padded(tensors[-1].begin + tensors[-1].nbytes, alignment)):
            raise broken(cursor.path, f"tensor {name!r} does not lie after the one before it")
        if begin + offset + whole > cursor.size:
            raise broken(cursor.path, f"it ends within tensor {name!r}, at {cursor.size:,} bytes")
        if name in names:
            raise broken(cursor.path, f"the tensor {name!r} comes twice")
        names.add(name)
        tensors.append(Tensor(name, kind, shape, begin + offset, whole))
    return Header(cursor.path, version, alignment, values, tuple(tensors), cursor.size)


def _tensor(cursor: _Cursor, sizes: Mapping[int, tuple[int, int]]) -> tuple[str, int, tuple[int, ...], int]:
    """Name, quantisation, shape and offset of the next tensor."""
    name = cursor.name("a tensor's name")
    where = f"the entry of tensor {name!r}"
    dimensions = cursor.count("I", MOST_DIMENSIONS, f"the number of dimensions of tensor {name!r}")
    shape = tuple(cursor.number("Q", where) for _ in range(dimensions))[::-1]
    kind, offset = cursor.number("I", where), cursor.number("Q", where)
    if kind not in sizes:
        raise CompressionError(
            f"{cursor.path}: tensor {name!r} has the type {kind}, which this version of the package gguf does not "
            "know; upgrade it, or convert the file again"
        )
    if not all(shape) or (shape[-1] if shape else 1) % sizes[kind][0]:
        raise broken(cursor.path, f"tensor {name!r} of {type_name(kind)} cannot have the shape {list(shape)}")
    return name, kind, shape, offset
