"""The headers of a GGUF model's files: values as they are stored, and where each tensor lies.

`gguf.GGUFReader` makes an object of every token of the vocabulary; here an array of numbers stays
the bytes it is. A model is one file, or several that are called NAME-00001-of-0000N.gguf."""

import math
import re
import struct
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

from compressor.errors import CompressionError
from compressor.extras import require
from compressor.frozen import frozen

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT = 32  # where general.alignment says nothing
NUMBERS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
WHOLE = frozenset({0, 1, 2, 3, 4, 5, 10, 11})  # of these the whole numbers
STRING = 8
ARRAY = 9
SUFFIX = ".gguf"
PART = re.compile(r"(?P<stem>.+)-\d{5}-of-(?P<count>\d{5})\.gguf")
SPLIT_NUMBER = "split.no"
SPLIT_COUNT = "split.count"


@frozen
class Value:
    """One value of the metadata: its type's number in the format, and its bytes after that
    number."""

    kind: int
    raw: bytes

    @property
    def content(self) -> int | str | tuple[int, ...] | None:
        """A whole number, a string, or the whole numbers of an array; None for anything else."""
        if self.kind == STRING:
            return self.raw[8:].decode("utf-8", "replace")
        if self.kind in WHOLE:
            return int(struct.unpack(f"<{NUMBERS[self.kind]}", self.raw)[0])
        if self.kind != ARRAY:
            return None
        inner, count = struct.unpack_from("<IQ", self.raw)
        if inner not in WHOLE:
            return None
        return struct.unpack_from(f"<{count}{NUMBERS[inner]}", self.raw, 12)


@frozen
class GgufTensor:
    """One tensor's place in its file. `shape` is outermost first, the reverse of the file: [E, out,
    in] of experts."""

    path: Path
    name: str
    kind: int  # its quantisation's number in the format
    shape: tuple[int, ...]
    begin: int  # absolute, in its file
    nbytes: int

    @property
    def parameters(self) -> int:
        return math.prod(self.shape)

    def read(self, begin: int = 0, nbytes: int | None = None) -> bytes:
        """Read its bytes from `begin` on."""
        with self.path.open("rb") as stream:
            stream.seek(self.begin + begin)
            return stream.read(self.nbytes - begin if nbytes is None else nbytes)

    def with_experts(self, count: int) -> "GgufTensor":
        """The same with another outermost dimension; its place is not changed."""
        return replace(
            self, shape=(count, *self.shape[1:]), nbytes=self.nbytes // self.shape[0] * count
        )


@frozen
class Header:
    """One file: its values in their order and its tensors in theirs, which lie one after
    another."""

    path: Path
    version: int
    alignment: int
    values: Mapping[str, Value]
    tensors: tuple[GgufTensor, ...]

    def content(self, key: str) -> int | str | tuple[int, ...] | None:
        """A value of the metadata; None where there is none."""
        return self.values[key].content if key in self.values else None

    def number(self, key: str, default: int = 0) -> int:
        """A whole number of the metadata, or the default where there is none."""
        content = self.content(key)
        return content if isinstance(content, int) else default

    def text(self, key: str) -> str:
        """A string of the metadata; an empty one where there is none."""
        content = self.content(key)
        return content if isinstance(content, str) else ""


@frozen
class Gguf:
    """The files of one model; the first has the metadata."""

    parts: tuple[Header, ...]

    @property
    def first(self) -> Header:
        return self.parts[0]

    @property
    def tensors(self) -> Mapping[str, GgufTensor]:
        return {tensor.name: tensor for part in self.parts for tensor in part.tensors}


def packed(text: str) -> bytes:
    """A string as the format has it: its length in bytes, then UTF-8."""
    raw = text.encode("utf-8", "backslashreplace")
    return struct.pack("<Q", len(raw)) + raw


def padded(position: int, alignment: int) -> int:
    return position + -position % alignment


def read_header(path: Path) -> Header:
    """Read the header of one file; `CompressionError` for a file that is no GGUF, or is cut off."""
    require("gguf")
    try:
        with path.open("rb") as stream:
            return _parse(path, stream)
    except OSError as error:
        raise CompressionError(
            f"{path} cannot be read ({error.strerror}); name a GGUF file"
        ) from error


def _parse(path: Path, stream: BinaryIO) -> Header:
    """Read a header in order, nothing past the file's end."""
    from gguf.constants import GGML_QUANT_SIZES

    size = path.stat().st_size

    def fault(message: str) -> CompressionError:
        return CompressionError(
            f"{path} cannot be read as GGUF: {message}; download or convert it again"
        )

    def take(count: int) -> bytes:
        if stream.tell() + count > size:
            raise fault(f"it ends within its header, at {size:,} bytes")
        return stream.read(count)

    def number(code: str) -> int:
        return int(struct.unpack(f"<{code}", take(struct.calcsize(code)))[0])

    def element(kind: int) -> bytes:
        if kind in NUMBERS:
            return take(struct.calcsize(NUMBERS[kind]))
        if kind != STRING:
            raise fault(f"a value has the unknown type {kind}")
        length = take(8)
        return length + take(int.from_bytes(length, "little"))

    if take(4) != MAGIC:
        raise fault("it does not begin with GGUF")
    version = number("I")
    if version not in VERSIONS:
        raise fault(f"it has the version {version}, known are 2 and 3 of little-endian machines")
    tensor_count = number("Q")
    value_count = number("Q")
    values = {}
    for _ in range(value_count):
        key = element(STRING)[8:].decode("utf-8", "replace")
        kind = number("I")
        if kind != ARRAY:
            values[key] = Value(kind, element(kind))
            continue
        start = take(12)
        inner, count = struct.unpack("<IQ", start)
        if inner in NUMBERS:
            content = take(struct.calcsize(NUMBERS[inner]) * count)
        else:
            content = b"".join(element(inner) for _ in range(count))
        values[key] = Value(kind, start + content)
    entries = []
    for _ in range(tensor_count):
        key = element(STRING)[8:].decode("utf-8", "replace")
        dimensions = number("I")
        shape = tuple(number("Q") for _ in range(dimensions))[::-1]
        kind = number("I")
        offset = number("Q")
        if kind not in GGML_QUANT_SIZES:
            raise CompressionError(
                f"{path}: tensor {key!r} has the type {kind}, which the installed package gguf "
                "does not know; upgrade it, or convert the file again"
            )
        block, nbytes = GGML_QUANT_SIZES[kind]
        nbytes = math.prod(shape) // block * nbytes
        entries.append(GgufTensor(path, key, kind, shape, offset, nbytes))
    stored = values["general.alignment"].content if "general.alignment" in values else None
    alignment = stored if isinstance(stored, int) else ALIGNMENT
    begin = padded(stream.tell(), alignment)
    tensors = tuple(replace(entry, begin=begin + entry.begin) for entry in entries)
    for tensor in tensors:
        if tensor.begin + tensor.nbytes > size:
            raise fault(f"it ends within tensor {tensor.name!r}, at {size:,} bytes")
    return Header(path, version, alignment, values, tensors)


def has_magic(path: Path) -> bool:
    """Return True if a file begins as GGUF files do."""
    try:
        with path.open("rb") as stream:
            return stream.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def part_names(path: Path, count: int) -> list[Path]:
    """The files of a model of so many parts: 'a.gguf', 2 -> a-00001-of-00002.gguf,
    a-00002-of-00002.gguf."""
    if count == 1:
        return [path]
    match = PART.fullmatch(path.name)
    stem = match["stem"] if match else path.name.removesuffix(SUFFIX)
    return [
        path.with_name(f"{stem}-{number:05}-of-{count:05}{SUFFIX}")
        for number in range(1, count + 1)
    ]


def open_gguf(model: str | Path) -> Gguf:
    """Read the headers of a model's files, of which any one was named; raises `CompressionError`
    for a broken set."""
    path = Path(model)
    if not path.is_file():
        raise CompressionError(
            f"{path} is not a file; name a GGUF file, the first one where there are several"
        )
    named = PART.fullmatch(path.name)
    count = int(named["count"]) if named else 1
    paths = part_names(path, count)
    missing = [part for part in paths if not part.is_file()]
    if missing:
        raise CompressionError(
            f"{missing[0]} is missing, one of the {count} parts of {path.name}; download it, too"
        )
    parts = tuple(map(read_header, paths))
    for number, part in enumerate(parts):
        stated = part.number(SPLIT_NUMBER) if count > 1 else 0, part.number(SPLIT_COUNT, 1)
        if stated != (number, count):
            raise CompressionError(
                f"{part.path} says that it is part {stated[0] + 1} of {stated[1]}, by its name it "
                f"is part {number + 1} of {count}; give the parts the names back that they had, "
                "such as model-00001-of-00003.gguf"
            )
    return Gguf(parts)
