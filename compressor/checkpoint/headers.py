"""The header of a safetensors file: where each tensor lies, checked against the file's own size."""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

import torch

from compressor.errors import CompressionError

TORCH_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
}
DTYPE_BITS = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6} | {name: 8 * d.itemsize for name, d in TORCH_DTYPES.items()}
DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
MAX_HEADER_BYTES = 100_000_000  # the format's own limit
MOST_BYTES = 2**63 - 1  # of a file, and elements of a dimension
MOST_DIMENSIONS = 64  # that torch can index
MOST_LETTERS = 1_000  # of a tensor's name, on which transformers tries dozens of patterns


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where one tensor lies: `begin` and `end` are absolute byte offsets in its file."""

    name: str
    file: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        """Bytes on disk."""
        return self.end - self.begin

    @property
    def parameters(self) -> int:
        """Number of stored elements."""
        return math.prod(self.shape)


class Stored(Protocol):
    """A tensor of a checkpoint, on disk already or yet to be written."""

    @property
    def parameters(self) -> int: ...

    @property
    def nbytes(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Size:
    """Stored elements and bytes of several tensors."""

    parameters: int
    bytes: int

    @classmethod
    def of(cls, tensors: Iterable[Stored]) -> Self:
        """The sums over these tensors."""
        counted = list(tensors)
        return cls(sum(tensor.parameters for tensor in counted), sum(tensor.nbytes for tensor in counted))


def tensor_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes that a tensor of this safetensors dtype and shape takes on disk."""
    return math.prod(shape) * DTYPE_BITS[dtype] // 8


def parse_header(raw: Mapping[str, Any], file: str, data_start: int) -> dict[str, TensorInfo]:
    """Turn one file's decoded safetensors header into tensor places; raises `CompressionError` if it is malformed."""
    tensors = {}
    for name, entry in raw.items():
        if name == "__metadata__":
            continue
        try:
            begin, end = (_natural(offset) for offset in entry["data_offsets"])
            shape = tuple(_natural(size) for size in entry["shape"])
            if len(shape) > MOST_DIMENSIONS or len(name) > MOST_LETTERS:
                raise ValueError("more dimensions than torch can index, or too long a name")
            info = TensorInfo(name, file, str(entry["dtype"]), shape, data_start + begin, data_start + end)
        except (KeyError, TypeError, ValueError) as error:
            raise CompressionError(
                f"{file}: the header entry of tensor {name!r} cannot be read; download the file again"
            ) from error
        if info.dtype not in DTYPE_BITS:
            raise CompressionError(
                f"{file}: tensor {name!r} has dtype {info.dtype!r}, which the safetensors format does not know; "
                "download the file again"
            )
        if info.nbytes != tensor_bytes(info.dtype, info.shape):
            raise CompressionError(
                f"{file}: tensor {name!r} claims {info.nbytes} bytes, its dtype {info.dtype} and shape "
                f"{list(info.shape)} need another number; download the file again"
            )
        tensors[name] = info
    return tensors


def _natural(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MOST_BYTES:
        raise ValueError("this is no size")
    return value


def header_bytes(path: Path) -> int:
    """How many bytes of a safetensors file, which has been checked, come before its tensors."""
    with path.open("rb") as stream:
        return 8 + int.from_bytes(stream.read(8), "little")


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Read the header of one safetensors file and check that its tensors fill the file, as the format asks."""
    size = path.stat().st_size
    with path.open("rb") as stream:
        prefix = stream.read(8)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or length > min(size - 8, MAX_HEADER_BYTES):
            raise CompressionError(
                f"{path} is truncated: its header is cut off at {size} bytes; download the file again"
            )
        try:
            raw = json.loads(stream.read(length))
        except (ValueError, RecursionError) as error:
            raise CompressionError(
                f"{path} is not a safetensors file: its header is no JSON; download it again"
            ) from error
    if not isinstance(raw, dict):
        raise CompressionError(f"{path} is not a safetensors file: its header is no JSON object; download it again")
    tensors = parse_header(raw, path.name, 8 + length)
    promised = max((info.end for info in tensors.values()), default=8 + length)
    if promised > size:
        raise CompressionError(
            f"{path} is truncated: its header promises {promised} bytes, it has {size}; download it again"
        )
    end = 8 + length
    for info in sorted(tensors.values(), key=lambda info: (info.begin, info.end)):  # stock loaders refuse others, too
        if info.begin != end:
            raise CompressionError(
                f"{path}: tensor {info.name!r} begins at byte {info.begin} instead of {end}, so tensors overlap or "
                "leave a gap; download the file again"
            )
        end = info.end
    if end != size:
        raise CompressionError(f"{path} has {size - end} bytes after its last tensor; download the file again")
    return tensors
