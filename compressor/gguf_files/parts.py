"""A GGUF model in one file, or in several that are called NAME-00001-of-0000N.gguf."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from compressor.errors import CompressionError
from compressor.gguf_files.header import MAGIC, Header, Tensor, read_header

SUFFIX = ".gguf"
PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
SPLIT_NUMBER, SPLIT_COUNT, SPLIT_TENSORS = "split.no", "split.count", "split.tensors.count"
MOST_PARTS = 2**10


@dataclass(frozen=True, slots=True)
class Gguf:
    """The files of one model; the first has the metadata."""

    parts: tuple[Header, ...]

    @property
    def first(self) -> Header:
        """The file that has the metadata."""
        return self.parts[0]

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """All tensors by name."""
        return {tensor.name: tensor for part in self.parts for tensor in part.tensors}

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(part.size for part in self.parts)

    def read(self, name: str, begin: int = 0, nbytes: int | None = None) -> bytes:
        """Bytes of a tensor, all or so many from `begin` on."""
        for part in self.parts:
            for tensor in part.tensors:
                if tensor.name == name:
                    with part.path.open("rb") as stream:
                        stream.seek(tensor.begin + begin)
                        return stream.read(tensor.nbytes - begin if nbytes is None else nbytes)
        raise KeyError(name)


def has_magic(path: Path) -> bool:
    """Whether a file begins as GGUF files do."""
    try:
        with path.open("rb") as stream:
            return stream.read(len(MAGIC)) == MAGIC
    except (OSError, ValueError):
        return False


def is_gguf(model: str | None) -> bool:
    """Whether a model argument names a GGUF file, by its ending or by how it begins."""
    return model is not None and (model.lower().endswith(SUFFIX) or has_magic(Path(model)))


def part_names(path: Path, count: int) -> list[Path]:
    """The files of a model of so many parts: 'a.gguf', 2 -> a-00001-of-00002.gguf, a-00002-of-00002.gguf."""
    if count == 1:
        return [path]
    found = PART.fullmatch(path.name)
    stem = found["stem"] if found else path.name.removesuffix(SUFFIX)
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
    _check(parts, path)
    return Gguf(parts)


def _check(parts: tuple[Header, ...], path: Path) -> None:
    """Refuse parts that do not belong together."""
    for number, part in enumerate(parts):
        said = part.number(SPLIT_COUNT, 1)
        if said != len(parts):
            raise CompressionError(
                f"{part.path} says that it is one of {said} parts, by its name it is one of {len(parts)}; give the "
                "parts the names back that they had, such as model-00001-of-00003.gguf"
            )
        if part.number(SPLIT_NUMBER) != number and len(parts) > 1:
            raise CompressionError(
                f"{part.path} says that it is part {part.number(SPLIT_NUMBER) + 1}, by its name it is part "
                f"{number + 1}; give the parts the names back that they had"
            )
        if part.alignment != parts[0].alignment:
            raise CompressionError(f"{part.path} is aligned otherwise than {parts[0].path.name}; download both again")
    names = [tensor.name for part in parts for tensor in part.tensors]
    if len(set(names)) != len(names) or parts[0].number(SPLIT_TENSORS, len(names)) != len(names):
        raise CompressionError(
            f"the parts of {path.name} do not hold the tensors that they promise; download them again"
        )
