"""Lazy reading of a safetensors checkpoint: all headers are read and checked, and tensors only on
request.

Links out of the folder or to hidden files are refused.
"""

import json
import math
import mmap
import os
import re
import warnings
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from fnmatch import filter as matching
from fractions import Fraction
from pathlib import Path
from typing import Any, Self
from weakref import WeakValueDictionary

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from compressor.errors import CompressionError, reason_of
from compressor.files import NAME_ONE, TEMPLATES
from compressor.frozen import frozen
from compressor.records import RESTORE, Json, read_object

# views of files are only read
warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)


def refuse_links(folder: Path) -> None:
    """Raise `CompressionError` naming the first visible file of the folder, or of its templates,
    that leads elsewhere.

    A link to another folder is not a file of the checkpoint and is ignored. Names that no list of
    files holds are refused, too."""
    for inner in (folder, folder / TEMPLATES):
        refuse_link(inner, folder)
        for path in sorted(inner.glob("[!.]*")):
            if ODD.search(path.name):
                raise CompressionError(
                    f"the name of {path} has a line break or is no UTF-8; rename or remove the file"
                )
            if path.is_symlink() and not os.path.isdir(path):
                refuse_link(path, folder)


def refuse_link(path: Path, folder: Path) -> None:
    """Raise `CompressionError` if a file in a folder is a link out of it, or to a hidden file.

    The Hub's cache keeps a model's files in `blobs` and fills `snapshots/COMMIT` with links to
    them."""
    root = Path(os.path.realpath(folder))  # unlike Path.resolve, it accepts a ring of links
    target = Path(os.path.realpath(path))
    blobs = root.parent.parent / "blobs"
    if root.parent.name == "snapshots" and not blobs.is_symlink() and target.is_relative_to(blobs):
        return
    inside = target.is_relative_to(root)
    if not inside or any(part.startswith(".") for part in target.relative_to(root).parts):
        raise CompressionError(
            f"{path} is a link to a {'hidden file' if inside else 'file outside the folder'}, "
            "which is neither read nor published; put a copy in its place (cp -rL copies a folder "
            "with what its links lead to)"
        )


TORCH_DTYPES: dict[str, torch.dtype] = {**safetensors.torch._TYPES, "F8_E8M0": torch.float8_e8m0fnu}
DTYPE_BITS = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6} | {
    name: 8 * d.itemsize for name, d in TORCH_DTYPES.items()
}
ODD = re.compile(r"[\0-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")  # letters of names
DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
# of a weight
PART = re.compile(
    r"(.+?)_(packed|blocks|scale|scale_inv|scale_2|scales|shape|zero_point|global_scale)"
)
# in bits without the sign; above it is NaN
LARGEST_NUMBER = {torch.float8_e4m3fn: 0x7E, torch.float8_e5m2: 0x7C}


@frozen
class TensorInfo:
    """The position of one tensor: `begin` and `end` are absolute byte offsets in its file.

    `density` is the number of the model's weights per element, which is not 1 for packed weights
    and scales."""

    name: str
    file: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int
    density: Fraction = Fraction(1)

    @property
    def nbytes(self) -> int:
        """Bytes on disk."""
        return self.end - self.begin

    @property
    def parameters(self) -> int:
        """Number of the model's weights."""
        return int(math.prod(self.shape) * self.density)

    @property
    def is_plain(self) -> bool:
        """Return True for floating-point numbers that torch computes with."""
        dtype = TORCH_DTYPES.get(self.dtype)
        return dtype is not None and dtype.is_floating_point and dtype.itemsize > 1


@frozen
class Size:
    """Weights and bytes of several tensors."""

    parameters: int
    bytes: int

    @classmethod
    def of(cls, tensors: Iterable[Any]) -> Self:
        """Return the sums over tensors with `parameters` and `nbytes`, on disk or yet to be
        written."""
        counted = list(tensors)
        return cls(
            sum(tensor.parameters for tensor in counted), sum(tensor.nbytes for tensor in counted)
        )


def tensor_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Return the bytes that a tensor of this safetensors dtype and shape takes on disk."""
    return math.prod(shape) * DTYPE_BITS[dtype] // 8


def header_bytes(path: Path) -> int:
    """Return the number of bytes before the tensors of a safetensors file that has been checked."""
    with path.open("rb") as stream:
        return 8 + int.from_bytes(stream.read(8), "little")


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Return the tensors of one safetensors file by name; they fill it without a gap, as the format
    demands."""
    try:
        with safe_open(path, "pt"):  # checks the header against the file
            start = header_bytes(path)
    except SafetensorError as error:
        raise CompressionError(
            f"{path} is truncated or no safetensors file ({reason_of(error)}); download it again"
        ) from error
    with path.open("rb") as stream:
        raw: dict[str, Any] = json.loads(stream.read(start)[8:])
    raw.pop("__metadata__", None)
    tensors = {}
    for name, entry in raw.items():
        begin, end = (start + offset for offset in entry["data_offsets"])
        info = TensorInfo(name, path.name, entry["dtype"], tuple(entry["shape"]), begin, end)
        if info.dtype not in DTYPE_BITS:
            raise CompressionError(
                f"{path}: tensor {name!r} has dtype {info.dtype!r}, which torch does not know"
            )
        tensors[name] = info
    return tensors


CONFIG = "config.json"
ADAPTER = "adapter_config.json"
WEIGHTS = "transformers_weights"  # the config's field that names them
INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
INDEX_END = ".safetensors.index.json"
PICKLE_PATTERNS = ("*.bin", "*.pt", "*.pth", "*.ckpt")
MODELOPT = "hf_quant_config.json"  # modelopt's quantisation, if not in config.json
PART_BYTES = 2**24  # of two tensors, compared at once
GAP_BYTES = 2**20  # tensors nearer than this in a file are mapped together
# by folder and tensor, as often as this process has read it
READ_BYTES = Counter[tuple[Path, str]]()


def read_weight_map(index_path: Path) -> dict[str, Any]:
    """Return the shard of each tensor in an index."""
    weight_map = read_object(index_path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CompressionError(f"{index_path} has no weight_map; restore the file from its source")
    return weight_map


def named_head(names: Collection[str], config: Json) -> str | None:
    """Return the file of weights, or the index of several, that stock transformers chooses; None if
    there is none."""
    chosen = config.get(WEIGHTS)
    candidates = (SINGLE_NAME, INDEX_NAME) if chosen is None else (chosen,)
    return next((name for name in candidates if name in names), None)


def an_adapter(place: str, beside_weights: bool = False) -> CompressionError:
    """Return the error for a folder or repository with a PEFT adapter."""
    message = "is an adapter, not a model"
    if beside_weights:
        message = "has an adapter, which transformers would add to its weights"
    return CompressionError(
        f"{place} {message} ({ADAPTER}); merge it into the base model and save that first (peft's "
        "merge_and_unload, then save_pretrained, and the tokenizer's too)"
    )


def find_head(place: str, names: Collection[str], config: Json) -> str:
    """Return the file of weights, or the index of several, that stock transformers loads from a
    folder or repository.

    Raises `CompressionError` if transformers would load something else, or nothing.
    """
    head = named_head(names, config)
    if ADAPTER in names:
        raise an_adapter(place, head is not None)
    parts = matching(names, "shard-*-model-*-of-*.safetensors")
    if parts:
        raise CompressionError(
            f"{place} has parts of a distributed checkpoint ({min(parts)}), which transformers "
            "prefers to other weights; save the whole model, or remove them"
        )
    if head is not None and head.endswith((".safetensors", INDEX_END)):
        return head
    chosen = config.get(WEIGHTS)
    stray = matching(names, "*.safetensors")
    hint = "name a whole safetensors checkpoint"
    if chosen:
        message = f"lacks the safetensors file {chosen!r} that {CONFIG} names ({WEIGHTS})"
        hint = "download it, or remove the field"
    elif stray:
        message = f"has {min(stray)} but neither {SINGLE_NAME} nor {INDEX_NAME}"
    elif any(matching(names, pattern) for pattern in PICKLE_PATTERNS):
        message = "holds its weights only as pickle files, which can run code when opened"
        hint = "convert them to safetensors first"
    else:
        message = f"has neither {SINGLE_NAME} nor {INDEX_NAME}"
    raise CompressionError(f"{place} {message}; {hint}")


def weights_head(folder: Path, config: Json) -> Path:
    """Return the file that `find_head` finds in a folder."""
    names = {path.name for path in folder.iterdir() if path.is_file()}
    return folder / find_head(str(folder), names, config)


def config_field(raw_config: Json, name: str) -> Any:
    """Return a field of a config's JSON, or of one of the configs in it; None if it is absent or
    empty."""
    for node in (raw_config, *raw_config.values()):
        if isinstance(node, dict) and node.get(name):
            return node[name]
    return None


def quantization_of(folder: Path, raw_config: Json) -> Json:
    """Return the quantisation in config.json or in modelopt's own file; empty if neither has
    one."""
    declared = config_field(raw_config, "quantization_config")
    if declared:
        groups = declared.get("config_groups") or {} if isinstance(declared, Mapping) else None
        if not isinstance(groups, Mapping):
            raise CompressionError(
                f"{folder}: quantization_config in config.json, or its config_groups, should be "
                f"an object; {RESTORE}"
            )
        return {} if packs_nothing(declared) else dict(declared)
    content = modelopt_file(folder)
    return {"quant_method": "modelopt", **content} if content else {}


def packs_nothing(quantization: Json) -> bool:
    """Return True if a quantisation of compressed-tensors names no weights, as that of a pruned
    model may."""
    is_named = quantization.get("config_groups") or quantization.get("kv_cache_scheme")
    return quantization.get("quant_method") == "compressed-tensors" and not is_named


def modelopt_file(folder: Path) -> Json:
    """Return the content of modelopt's own file; empty if there is none."""
    return read_object(folder / MODELOPT) if (folder / MODELOPT).is_file() else {}


def counted(tensors: Mapping[str, TensorInfo], quantization: Json) -> dict[str, TensorInfo]:
    """Return the tensors of a quantised checkpoint with the number of weights in an element."""
    declared = []  # bits by a class of modules, or by a name or pattern of names
    for group in (quantization.get("config_groups") or {}).values():
        if isinstance(group, dict) and isinstance(group.get("weights"), dict):
            bits = group["weights"].get("num_bits")
            declared += [(str(target), bits) for target in group.get("targets") or ()]
    result = {}
    for name, info in tensors.items():
        weights = Fraction(1)
        match = PART.fullmatch(name)
        weight, part = match.groups() if match else (name, "")
        # the latter in modelopt's NVFP4
        if part in ("packed", "blocks") or f"{name}_scale_2" in tensors:
            word = DTYPE_BITS[info.dtype]
            module = weight.removesuffix(".weight")
            bits_by = dict[bool, Any]()  # by whether the module is named
            for target, bits in declared:
                with suppress(re.error):
                    is_named = module == target
                    if target.startswith("re:"):
                        is_named = re.match(target[3:], module) is not None
                    if is_named or target.isidentifier():
                        bits_by.setdefault(is_named, bits)
            bits = bits_by.get(True, bits_by.get(False))
            if not isinstance(bits, int) or bits <= 0:
                bits = 4 if info.dtype == "U8" else word
            weights = Fraction(word, bits)
        elif part and (
            weight.endswith(".input")
            or {weight, f"{weight}_packed", f"{weight}_blocks"} & tensors.keys()
        ):
            weights = Fraction(0)
        result[name] = replace(info, density=weights)
    return result


class Checkpoint:
    """A local checkpoint folder, opened lazily: tensors are views of mapped files.

    With known positions of the `tensors`, the folder does not need to hold the weights.
    """

    def __init__(self, folder: Path, tensors: dict[str, TensorInfo] | None = None) -> None:
        if not folder.is_dir():
            raise CompressionError(f"{folder} is not a folder; {NAME_ONE}")
        refuse_links(folder)
        if not (folder / CONFIG).is_file():
            if (folder / ADAPTER).is_file():
                raise an_adapter(str(folder))
            raise CompressionError(
                f"{folder} has no {CONFIG}; name the folder of a transformers checkpoint"
            )
        self.folder = folder
        self.raw_config = read_object(folder / CONFIG)
        self.quantization = quantization_of(folder, self.raw_config)
        if tensors is None:
            path = weights_head(folder, self.raw_config)
            weight_map = {}
            files = {path.name}
            if path.name.endswith(INDEX_END):
                weight_map = read_weight_map(path)
                files = set(weight_map.values())
            for name, file in weight_map.items():
                if Path(file).name != file or file.startswith("."):
                    raise CompressionError(
                        f"{path} places tensor {name!r} in {file!r}, a path outside the folder or "
                        "hidden; it is refused"
                    )
            tensors = {}
            for file in sorted(files):
                if not os.path.isfile(folder / file):  # also False if it is too long for a name
                    raise CompressionError(
                        f"{path} names the shard {file!r}, which is missing from {folder}; "
                        "download it again"
                    )
                # including tensors that the index leaves out, as transformers loads whole files
                header = read_header(folder / file)
                promised = (name for name in weight_map if weight_map[name] == file)
                absent = [name for name in promised if name not in header]
                if absent:
                    raise CompressionError(
                        f"{path} promises tensor {absent[0]!r} in {file!r}, which does not hold "
                        "it; download both again"
                    )
                tensors |= header
        self.tensors = counted(tensors, self.quantization) if self.quantization else tensors
        self._views = WeakValueDictionary[str, Tensor]()
        self._alike = dict[tuple[str, str], bool]()

    def path(self, name: str) -> Path:
        """Return the file that holds a tensor."""
        return self.folder / self.tensors[name].file

    def stamp(self) -> list[tuple[str, int, int]]:
        """Return name, size and time of change of each weight file; an interrupted run resumes only
        if they match."""
        stamps = []
        for file in sorted({info.file for info in self.tensors.values()}):
            stat = (self.folder / file).stat()
            stamps.append((file, stat.st_size, stat.st_mtime_ns))
        return stamps

    def read(self, name: str) -> Tensor:
        """Return one tensor as a read-only view of its mapped file."""
        return self.read_all([name])[name]

    def read_checked(self, name: str) -> Tensor:
        """Return one tensor as `read` does; raise `CompressionError` if it holds a NaN."""
        tensor = self.read(name)
        refuse_nan(name, self.tensors[name].file, tensor)
        return tensor

    def read_all(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Return tensors as read-only views of their files; neighbours share a mapping, which ends
        with the last one.

        Only the bytes of these tensors are mapped. A tensor whose view is still in use is not read
        again."""
        views = {}
        infos = []
        for name in names:
            view = self._views.get(name)
            if view is None:
                infos.append(self.tensors[name])
            else:
                views[name] = view
        extents = list[list[TensorInfo]]()
        for info in sorted(infos, key=lambda info: (info.file, info.begin)):
            last = extents[-1][-1] if extents else None
            if last is None or info.file != last.file or info.begin > last.end + GAP_BYTES:
                extents.append([])
            extents[-1].append(info)
        for extent in extents:
            views |= self._map(extent)
        self._views.update(views)
        return views

    def holds_alike(self, first: str, second: str) -> bool:
        """Return True if two tensors hold the same bytes, or these are not here, but headers
        alone."""
        pair = (first, second)
        one, other = (self.tensors[name] for name in pair)
        if (one.dtype, one.shape) != (other.dtype, other.shape):
            return False
        if pair not in self._alike:
            self._alike[pair] = True
            if self.path(first).is_file() and self.path(second).is_file():
                views = (self.read(name).reshape(-1).view(torch.uint8) for name in pair)
                parts = (view.split(PART_BYTES) for view in views)
                self._alike[pair] = all(map(torch.equal, *parts))
        return self._alike[pair]

    def _map(self, extent: list[TensorInfo]) -> dict[str, Tensor]:
        start = extent[0].begin // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        end = max(info.end for info in extent)
        with (self.folder / extent[0].file).open("rb") as stream:
            mapped = mmap.mmap(stream.fileno(), end - start, access=mmap.ACCESS_READ, offset=start)
        views = {}
        for info in extent:
            dtype = TORCH_DTYPES.get(info.dtype, torch.uint8)
            count = info.nbytes
            READ_BYTES[self.folder, info.name] += count
            flat = torch.empty(0, dtype=dtype)
            if count:
                flat = torch.frombuffer(
                    mapped, dtype=dtype, count=count // dtype.itemsize, offset=info.begin - start
                )
            views[info.name] = flat.view(info.shape) if info.dtype in TORCH_DTYPES else flat
        return views


def is_finite(tensor: Tensor) -> bool:
    """Return True if a tensor of a plain dtype holds neither NaN nor Inf: one pass, no copy of it
    in memory."""
    if tensor.numel() == 0 or not tensor.is_floating_point():
        return True
    return all(bool(extreme.isfinite()) for extreme in tensor.aminmax())  # a NaN is both


def refuse_nan(name: str, file: str, tensor: Tensor) -> None:
    """Raise `CompressionError` naming the tensor, of any stored dtype, when it holds a NaN: one
    pass, no copy of it in memory."""
    if tensor.numel() == 0 or not tensor.is_floating_point():
        return
    if tensor.dtype.itemsize > 1:
        has_nan = tensor.amax().isnan()  # a NaN is the maximum
    else:
        bits = tensor.view(torch.uint8)  # several times as fast as `isnan` of a float8
        if tensor.dtype in LARGEST_NUMBER:
            has_nan = (bits & 0x7F).amax() > LARGEST_NUMBER[tensor.dtype]
        else:  # the single NaN
            has_nan = (bits == (0xFF if tensor.dtype == torch.float8_e8m0fnu else 0x80)).any()
    if has_nan:
        raise CompressionError(
            f"tensor {name!r} in {file} holds NaN; repair or download the checkpoint again"
        )
