"""The headers of a GGUF model's files, bounded: values as they are stored, and where each tensor lies.

`gguf.GGUFReader` makes an object of every token of the vocabulary, maps the whole file, and loops as often as a number
in the file says, whatever the file's size. Here every count and size is held against what is left of the file first.
A model is one file, or several that are called NAME-00001-of-0000N.gguf.
"""

import math
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from compressor.errors import CompressionError
from compressor.extras import require

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
MOST_PARTS = 2**10
SUFFIX = ".gguf"
PART = re.compile(r"(?P<stem>.+)-\d{5}-of-(?P<count>\d{5})\.gguf")
SPLIT_NUMBER, SPLIT_COUNT, SPLIT_TENSORS = "split.no", "split.count", "split.tensors.count"


@dataclass(frozen=True, slots=True)
class Value:
    """One value of the metadata: its type's number in the format, and its bytes after that number."""

    kind: int
    raw: bytes

    @property
    def content(self) -> int | str | tuple[int, ...] | None:
        """A whole number, a string, or the whole numbers of an array; None for anything else."""
        if self.kind == STRING:
            return self.raw[8:].decode("utf-8", "replace")
        if self.kind == ARRAY:
            inner, count = struct.unpack("<IQ", self.raw[:12])
            return struct.unpack(f"<{count}{NUMBERS[inner]}", self.raw[12:]) if inner in WHOLE else None
        return int(struct.unpack(f"<{NUMBERS[self.kind]}", self.raw)[0]) if self.kind in WHOLE else None


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
        return math.prod(self.shape)

    def with_experts(self, count: int) -> "Tensor":
        """The same with another outermost dimension; its place is not changed."""
        return replace(self, shape=(count, *self.shape[1:]), nbytes=self.nbytes // self.shape[0] * count)


@dataclass(frozen=True, slots=True)
class Header:
    """One file: its values in their order and its tensors in theirs, which lie one after another."""

    path: Path
    version: int
    alignment: int
    values: Mapping[str, Value]
    tensors: tuple[Tensor, ...]

    def number(self, key: str, default: int = 0) -> int:
        """A whole number of the metadata, or the default where there is none."""
        content = self.values[key].content if key in self.values else None
        return content if isinstance(content, int) else default

    def text(self, key: str) -> str:
        """A string of the metadata; an empty one where there is none."""
        content = self.values[key].content if key in self.values else None
        return content if isinstance(content, str) else ""


@dataclass(frozen=True, slots=True)
class Gguf:
    """The files of one model; the first has the metadata."""

    parts: tuple[Header, ...]

    @property
    def first(self) -> Header:
        return self.parts[0]

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        return {tensor.name: tensor for part in self.parts for tensor in part.tensors}

    def read(self, name: str, begin: int = 0, nbytes: int | None = None) -> bytes:
        """Read the bytes of a tensor from `begin` on."""
        path, tensor = next((part.path, each) for part in self.parts for each in part.tensors if each.name == name)
        with path.open("rb") as stream:
            stream.seek(tensor.begin + begin)
            return stream.read(tensor.nbytes - begin if nbytes is None else nbytes)


def packed(text: str) -> bytes:
    """A string as the format has it: its length in bytes, then UTF-8."""
    raw = text.encode("utf-8", "backslashreplace")
    return struct.pack("<Q", len(raw)) + raw


def padded(position: int, alignment: int) -> int:
    return position + -position % alignment


def type_sizes() -> Mapping[int, tuple[int, int]]:
    """For each quantisation: elements of a block, and its bytes."""
    require("gguf")
    from gguf.constants import GGML_QUANT_SIZES

    return {int(kind): sizes for kind, sizes in GGML_QUANT_SIZES.items()}


def type_name(kind: int) -> str:
    """10 -> 'Q2_K'."""
    from gguf.constants import GGMLQuantizationType

    return str(GGMLQuantizationType(kind).name)


class _Parser:
    """Reads a header in order, nothing past the file's end or the largest header."""

    def __init__(self, path: Path, stream: BinaryIO) -> None:
        self.path, self.stream, self.size, self.sizes = path, stream, path.stat().st_size, type_sizes()

    def require(self, condition: Any, fault: str) -> None:
        if not condition:
            raise CompressionError(f"{self.path} cannot be read as GGUF: {fault}; download or convert it again")

    def take(self, count: int, what: str) -> bytes:
        end = self.stream.tell() + count
        if end > min(self.size, MOST_HEADER):
            self.require(end <= self.size, f"it ends within {what}, at {self.size:,} bytes")
            self.require(False, f"its header has more than {MOST_HEADER:,} bytes")
        return self.stream.read(count)

    def number(self, code: str, what: str) -> int:
        return int(struct.unpack(f"<{code}", self.take(struct.calcsize(code), what))[0])

    def count(self, code: str, most: int, what: str) -> int:
        count = self.number(code, what)
        self.require(count <= most, f"{what} is {count:,}, more than {most:,}")
        return count

    def name(self, what: str) -> str:
        raw = self.take(self.count("Q", MOST_LETTERS, f"the length of {what}"), what)
        name = raw.decode("utf-8", "replace")
        self.require(name.encode() == raw, f"{what} is no UTF-8")
        return name

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
            self.require(False, f"{where} has the unknown type {kind}")
        length = self.take(8, where)
        return length + self.take(int.from_bytes(length, "little"), where)

    def tensor(self) -> Tensor:
        """The next entry; `begin` is still the offset in the file's data."""
        name = self.name("a tensor's name")
        where = f"the entry of tensor {name!r}"
        dimensions = self.count("I", MOST_DIMENSIONS, f"the number of dimensions of tensor {name!r}")
        shape = tuple(self.number("Q", where) for _ in range(dimensions))[::-1]
        kind, offset = self.number("I", where), self.number("Q", where)
        if kind not in self.sizes:
            known = "which the installed package gguf does not know; upgrade it, or convert the file again"
            raise CompressionError(f"{self.path}: tensor {name!r} has the type {kind}, {known}")
        block, nbytes = self.sizes[kind]
        possible = all(shape) and (shape[-1] if shape else 1) % block == 0
        self.require(possible, f"tensor {name!r} of {type_name(kind)} cannot have the shape {list(shape)}")
        return Tensor(name, kind, shape, offset, math.prod(shape) // block * nbytes)

    def header(self) -> Header:
        self.require(self.take(4, "its first 4 bytes") == MAGIC, "it does not begin with GGUF")
        version = self.number("I", "its version")
        self.require(version in VERSIONS, f"it has the version {version}, known are 2 and 3 of little-endian machines")
        tensor_count = self.count("Q", MOST_TENSORS, "the number of its tensors")
        values = dict[str, Value]()
        for _ in range(self.count("Q", MOST_VALUES, "the number of its values")):
            key = self.name("a key")
            self.require(key not in values, f"the key {key!r} comes twice")
            values[key] = self.value(key)
        stored = values["general.alignment"].content if "general.alignment" in values else ALIGNMENT
        alignment = stored if isinstance(stored, int) and 0 < stored <= MOST_ALIGNMENT else 0
        self.require(alignment.bit_count() == 1, f"its alignment is {stored}, which is no power of two")
        entries = [self.tensor() for _ in range(tensor_count)]
        end = begin = padded(self.stream.tell(), alignment)
        tensors = dict[str, Tensor]()
        for tensor in entries:
            follows = begin + tensor.begin == padded(end, alignment)
            self.require(follows, f"tensor {tensor.name!r} does not lie after the one before it")
            end = begin + tensor.begin + tensor.nbytes
            self.require(end <= self.size, f"it ends within tensor {tensor.name!r}, at {self.size:,} bytes")
            self.require(tensor.name not in tensors, f"the tensor {tensor.name!r} comes twice")
            tensors[tensor.name] = replace(tensor, begin=begin + tensor.begin)
        return Header(self.path, version, alignment, values, tuple(tensors.values()))


def read_header(path: Path) -> Header:
    """Read the header of one file; `CompressionError` for what is no GGUF, is cut off, or would not load.

    Tensors must lie one after another, aligned and in their order, as llama.cpp asks for.
    """
    try:
        with path.open("rb") as stream:
            return _Parser(path, stream).header()
    except OSError as error:
        raise CompressionError(f"{path} cannot be read ({error.strerror}); name a GGUF file") from error


def has_magic(path: Path) -> bool:
    """Return True if a file begins as GGUF files do."""
    try:
        with path.open("rb") as stream:
            return stream.read(len(MAGIC)) == MAGIC
    except (OSError, ValueError):
        return False


def is_gguf(model: str | None) -> bool:
    """Return True if a model argument names a GGUF file, by its ending or by how it begins."""
    return model is not None and (model.lower().endswith(SUFFIX) or has_magic(Path(model)))


def part_names(path: Path, count: int) -> list[Path]:
    """The files of a model of so many parts: 'a.gguf', 2 -> a-00001-of-00002.gguf, a-00002-of-00002.gguf."""
    if count == 1:
        return [path]
    match = PART.fullmatch(path.name)
    stem = match["stem"] if match else path.name.removesuffix(SUFFIX)
    return [path.with_name(f"{stem}-{number:05}-of-{count:05}{SUFFIX}") for number in range(1, count + 1)]


def open_gguf(model: str | Path) -> Gguf:
    """Read the headers of a model's files, of which any one was named; raises `CompressionError` for a broken set."""
    path = Path(model)
    if not path.is_file():
        raise CompressionError(f"{path} is not a file; name a GGUF file, the first one where there are several")
    named = PART.fullmatch(path.name)
    count = int(named["count"]) if named else 1
    if count > MOST_PARTS:
        raise CompressionError(f"{path} is one of {count:,} parts, more than {MOST_PARTS:,}; join some of them first")
    paths = part_names(path, count) if count > 1 else [path]
    if missing := [each for each in paths if not each.is_file()]:
        raise CompressionError(f"{missing[0]} is missing, one of the {count} parts of {path.name}; download it, too")
    parts = tuple(read_header(each) for each in paths)
    for number, part in enumerate(parts):
        stated = part.number(SPLIT_NUMBER) if count > 1 else 0, part.number(SPLIT_COUNT, 1)
        if stated != (number, count):
            raise CompressionError(
                f"{part.path} says that it is part {stated[0] + 1} of {stated[1]}, by its name it is part {number + 1} "
                f"of {count}; give the parts the names back that they had, such as model-00001-of-00003.gguf"
            )
        if part.alignment != parts[0].alignment:
            raise CompressionError(f"{part.path} is aligned otherwise than {parts[0].path.name}; download both again")
    names = [tensor.name for part in parts for tensor in part.tensors]
    if len(set(names)) != len(names) or parts[0].number(SPLIT_TENSORS, len(names)) != len(names):
        raise CompressionError(f"the parts of {path.name} do not hold the promised tensors; download them again")
    return Gguf(parts)
