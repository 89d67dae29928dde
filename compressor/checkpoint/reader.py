"""Lazy reading of a safetensors checkpoint: every header is read and checked, no tensor is, until it is asked for."""

import json
import math
import mmap
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol, Self

import torch

from compressor.errors import CompressionError

MODEL_NAME = "model.onnx"

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
PICKLE_PATTERNS = ("*.bin", "*.pt", "*.pth", "*.ckpt")
TORCH_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
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
GAP_BYTES = 2**20  # tensors nearer than this in a file are mapped together
MAX_HEADER_BYTES = 100_000_000  # the format's own limit


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
        counted = [(tensor.parameters, tensor.nbytes) for tensor in tensors]
        return cls(sum(parameters for parameters, _ in counted), sum(nbytes for _, nbytes in counted))


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
            info = TensorInfo(name, file, str(entry["dtype"]), shape, data_start + begin, data_start + end)
            if info.dtype not in DTYPE_BITS:
                raise CompressionError(
                    f"{file}: tensor {name!r} has dtype {info.dtype!r}, which the safetensors format does not know; "
                    "download the file again"
                )
            sound = info.nbytes == tensor_bytes(info.dtype, info.shape)
        except (KeyError, TypeError, ValueError) as error:
            raise CompressionError(
                f"{file}: the header entry of tensor {name!r} cannot be read; download the file again"
            ) from error
        if not sound:
            raise CompressionError(
                f"{file}: tensor {name!r} claims {info.nbytes} bytes, its dtype {info.dtype} and shape "
                f"{list(info.shape)} "
                "need another number; download the file again"
            )
        tensors[name] = info
    return tensors


def _natural(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{value!r} is no size")
    return value


def _check_order(path: Path, tensors: Mapping[str, TensorInfo], data_start: int, size: int) -> None:
    """Tensors must fill the file without gaps or overlaps, as the format asks; stock loaders refuse other files."""
    end = data_start
    for info in sorted(tensors.values(), key=lambda info: (info.begin, info.end)):
        if info.begin != end:
            raise CompressionError(
                f"{path}: tensor {info.name!r} begins at byte {info.begin} instead of {end}, so tensors overlap or "
                "leave a gap; download the file again"
            )
        end = info.end
    if end != size:
        raise CompressionError(f"{path} has {size - end} bytes after its last tensor; download the file again")


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Read the header of one safetensors file and check that the file holds all the bytes it promises."""
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
    _check_order(path, tensors, 8 + length, size)
    return tensors


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in one of a checkpoint's files; anything else is a `CompressionError`."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CompressionError(f"{path} is not valid JSON ({error}); restore the file from its source") from error
    if not isinstance(content, dict):
        raise CompressionError(f"{path} should hold a JSON object; restore the file from its source")
    return content


def _indexed_files(folder: Path, index_path: Path) -> dict[str, str]:
    """Tensor name to shard name from the index; refuses shards that are missing or lie outside the folder."""
    weight_map = read_json(index_path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CompressionError(f"{index_path} has no weight_map; restore the file from its source")
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file or file in ("", ".", ".."):
            raise CompressionError(
                f"{index_path} places tensor {name!r} in {file!r}, a path outside the folder; it is refused"
            )
        if not (folder / file).is_file():
            raise CompressionError(
                f"{index_path} names the shard {file!r}, which is missing from {folder}; download it again"
            )
    return weight_map


def _locate_tensors(folder: Path) -> dict[str, TensorInfo]:
    index_path = folder / INDEX_NAME
    if index_path.is_file():
        weight_map = _indexed_files(folder, index_path)
        headers = {file: read_header(folder / file) for file in sorted(set(weight_map.values()))}
        for name, file in weight_map.items():
            if name not in headers[file]:
                raise CompressionError(
                    f"{index_path} promises tensor {name!r} in {file!r}, which does not hold it; download both again"
                )
        return {name: headers[file][name] for name, file in weight_map.items()}
    if (folder / SINGLE_NAME).is_file():
        return read_header(folder / SINGLE_NAME)
    if any(True for pattern in PICKLE_PATTERNS for _ in folder.glob(pattern)):
        raise CompressionError(
            f"{folder} holds its weights only as pickle files, which can run code when opened; convert them to "
            "safetensors first"
        )
    stray = sorted(path.name for path in folder.glob("*.safetensors"))
    if stray:
        raise CompressionError(
            f"{folder} has {stray[0]} but neither {SINGLE_NAME} nor {INDEX_NAME}; download the missing file"
        )
    raise CompressionError(
        f"{folder} has no {SINGLE_NAME} and no {INDEX_NAME}; name the folder of a safetensors checkpoint"
    )


class Checkpoint:
    """A local checkpoint folder, opened lazily: tensors are views of mapped files until they are changed."""

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise CompressionError(
                f"{folder} is not a folder; name a local checkpoint folder or a Hub id such as org/model"
            )
        if not (folder / "config.json").is_file():
            raise CompressionError(f"{folder} has no config.json; name the folder of a transformers checkpoint")
        self.folder = folder
        self.raw_config = read_json(folder / "config.json")
        self.tensors: dict[str, TensorInfo] = _locate_tensors(folder)

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def path(self, name: str) -> Path:
        """The file that holds a tensor."""
        return self.folder / self.tensors[name].file

    def stamp(self) -> list[tuple[str, int, int]]:
        """Name, size and time of change of each weight file; an interrupted run goes on only if they are the same."""
        files = sorted({info.file for info in self.tensors.values()})
        return [(file, (stat := (self.folder / file).stat()).st_size, stat.st_mtime_ns) for file in files]

    def read(self, name: str) -> torch.Tensor:
        """One tensor as a read-only view of its mapped file."""
        return self.read_all([name])[name]

    def read_all(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Tensors as read-only views of their files; neighbours share a mapping, which ends with its last tensor.

        Only the bytes asked for are mapped, so neither memory nor address space need hold more than these tensors.
        """
        infos = sorted((self.tensors[name] for name in names), key=lambda info: (info.file, info.begin))
        found: dict[str, torch.Tensor] = {}
        extent: list[TensorInfo] = []
        for info in infos:
            if extent and (info.file != extent[-1].file or info.begin > extent[-1].end + GAP_BYTES):
                found.update(self._map(extent))
                extent = []
            extent.append(info)
        return found | (self._map(extent) if extent else {})

    def _map(self, extent: list[TensorInfo]) -> dict[str, torch.Tensor]:
        start = extent[0].begin // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        end = max(info.end for info in extent)
        with (self.folder / extent[0].file).open("rb") as stream:
            mapped = mmap.mmap(stream.fileno(), end - start, access=mmap.ACCESS_READ, offset=start)
        return {info.name: _view(mapped, info, start) for info in extent}


@cache
def _accept_read_only_views() -> None:
    """Use up torch's one warning that such a view must not be written to: nobody does."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        torch.frombuffer(b"0", dtype=torch.uint8)


def _view(mapped: mmap.mmap, info: TensorInfo, start: int) -> torch.Tensor:
    dtype = TORCH_DTYPES.get(info.dtype, torch.uint8)
    if info.nbytes == 0:
        return torch.empty(info.shape, dtype=dtype)
    _accept_read_only_views()
    flat = torch.frombuffer(mapped, dtype=dtype, count=info.nbytes // dtype.itemsize, offset=info.begin - start)
    return flat.view(info.shape) if info.dtype in TORCH_DTYPES else flat


def contains_nan(tensor: torch.Tensor) -> bool:
    """Whether a tensor of any stored dtype holds a NaN: one pass, no copy of it in memory."""
    if tensor.numel() == 0 or not tensor.is_floating_point():
        return False
    if tensor.dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        return bool(tensor.amax().isnan())  # the maximum hands a NaN on
    bits = tensor.view(torch.uint8)
    if tensor.dtype == torch.float8_e4m3fn:
        return bool(((bits & 0x7F) == 0x7F).any())
    if tensor.dtype == torch.float8_e5m2:
        return bool(((bits & 0x7F) > 0x7C).any())
    if tensor.dtype == torch.float8_e8m0fnu:
        return bool((bits == 0xFF).any())
    return bool((bits == 0x80).any())  # the two FNUZ formats have a single NaN


def refuse_nan(name: str, file: str, tensor: torch.Tensor) -> None:
    """Raise `CompressionError` naming the tensor when it holds a NaN."""
    if contains_nan(tensor):
        raise CompressionError(f"tensor {name!r} in {file} holds NaN; repair or download the checkpoint again")
