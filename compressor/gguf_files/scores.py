"""How much each expert matters, from an importance matrix of llama.cpp and the weights of a GGUF model.

`llama-imatrix` writes GGUF files, in which each weight W that was multiplied has `W.in_sum2` [E, in], the sums of the
squares of its inputs, and `W.counts` [E, 1], the rows that were seen. The older format, `.dat`, has means in their
place and no counts.
"""

import struct
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt
import torch

from compressor.errors import CompressionError
from compressor.gguf_files.blocks import DOWN
from compressor.gguf_files.header import (
    MOST_LETTERS,
    MOST_TENSORS,
    Gguf,
    Tensor,
    has_magic,
    read_header,
    type_name,
    type_sizes,
)
from compressor.model.architecture import MoeLayer

Numbers = npt.NDArray[np.float64]
ENERGY, COUNTS = "imatrix-energy", "count-guided"
FLOAT32 = 0  # the number of this type in GGUF


@dataclass(frozen=True, slots=True)
class Imatrix:
    """An importance matrix on disk."""

    path: Path
    sums: Mapping[str, Tensor]  # by weight
    counts: Mapping[str, Tensor] | None  # None: an old file, which has none
    calls: Mapping[str, int]  # of an old file: by what its means are multiplied

    def routed_counts(self, weight: str, experts: int) -> Numbers:
        """Tokens routed to each expert: [E]; an old file has none."""
        return self._read((self.counts or {}).get(weight), f"{weight}.counts", experts, 1)[:, 0]

    def squares(self, weight: str, experts: int, width: int) -> Numbers:
        """Sums over the rows of each input's square: [E, in]; of an old file, means over an expert's rows."""
        found = self._read(self.sums.get(weight), f"{weight}.in_sum2", experts, width)
        if self.counts is not None:
            return found
        found = found / self.calls[weight]
        unseen = np.asarray(np.isclose(found, 1.0, rtol=1e-6, atol=0)).all(1)  # the format has no other word for it
        found[unseen] = 0.0
        return found

    def _read(self, place: Tensor | None, name: str, experts: int, width: int) -> Numbers:
        if place is None:
            raise CompressionError(f"{self.path} has no {name}; make an imatrix of this very model")
        if place.parameters != experts * width:
            counts = f"{name} has {place.parameters:,} numbers, {experts} experts need {experts * width:,}"
            raise CompressionError(f"{self.path}: {counts}; make an imatrix of this very model")
        with self.path.open("rb") as stream:
            stream.seek(place.begin)
            raw = stream.read(place.nbytes)
        found = np.frombuffer(raw, "<f4").astype(np.float64)
        if found.size != place.parameters or not (np.isfinite(found).all() and (found >= 0).all()):
            raise CompressionError(f"{self.path}: {name} has numbers that are no sums of squares; make it again")
        return found.reshape(experts, width)


def read_imatrix(path: Path) -> Imatrix:
    """Find the tensors of an importance matrix of either format; raises `CompressionError` for what is none."""
    try:
        if not has_magic(path):
            with path.open("rb") as stream:
                return _read_old(path, stream)
    except OSError as error:
        raise CompressionError(f"--imatrix {path} cannot be read ({error.strerror}); name a file") from error
    header = read_header(path)
    if header.text("general.type") != "imatrix":
        raise CompressionError(f"--imatrix {path} is a GGUF file, but no importance matrix; make one by llama-imatrix")
    sums, counts = (
        {
            tensor.name.removesuffix(ending): tensor
            for tensor in header.tensors
            if tensor.name.endswith(ending) and tensor.kind == FLOAT32
        }
        for ending in (".in_sum2", ".counts")
    )
    return Imatrix(path, sums, counts, {})


def _read_old(path: Path, stream: BinaryIO) -> Imatrix:
    """The old format: a number of entries, and for each a name, a number of calls and so many float32 numbers."""

    def number(least: int, most: int) -> int:
        raw = stream.read(4)
        found = struct.unpack("<i", raw)[0] if len(raw) == 4 else -1
        if not least <= found <= most:
            raise CompressionError(f"{path} is no importance matrix, or is cut off; make one by llama-imatrix")
        return int(found)

    size, sums, calls = path.stat().st_size, dict[str, Tensor](), dict[str, int]()
    for _ in range(number(1, MOST_TENSORS)):
        name = stream.read(number(1, MOST_LETTERS)).decode("utf-8", "replace")
        calls[name] = number(1, 2**31 - 1)
        count = number(0, max(0, size - stream.tell() - 4) // 4)
        sums[name] = Tensor(name, FLOAT32, (count,), stream.tell(), 4 * count)
        stream.seek(4 * count, 1)
    return Imatrix(path, sums, None, calls)


def count_scores(model: Gguf, layer: MoeLayer, imatrix: Imatrix) -> torch.Tensor:
    """Tokens routed to each expert: [E] (He et al. 2024, arXiv:2406.02500)."""
    return torch.from_numpy(imatrix.routed_counts(DOWN.format(layer.index), layer.experts).copy())


def energy_scores(model: Gguf, layer: MoeLayer, imatrix: Imatrix) -> torch.Tensor:
    """Energy of each expert's outputs, its neurons taken as uncorrelated: [E].

    score_e = sum_n s_en * ||W_e[:, n]||^2, where s_en is the sum over the tokens routed to expert e of the square of
    neuron n's input to the down projection W_e [out, n] (of an old file, the mean): the outputs' squared norms without
    products of different neurons, the projection's bias, and gate weights, which an imatrix does not have.
    """
    down = model.tensors[DOWN.format(layer.index)]
    squares = imatrix.squares(down.name, layer.experts, down.shape[-1])
    return torch.from_numpy((squares * column_norms(model, layer)).sum(1))


SCORES: dict[str, Callable[[Gguf, MoeLayer, Imatrix], torch.Tensor]] = {ENERGY: energy_scores, COUNTS: count_scores}


def column_norms(model: Gguf, layer: MoeLayer) -> Numbers:
    """Squared norm of each neuron's column of the dequantised down projections: [E, n]; one expert in memory."""
    down = model.tensors[DOWN.format(layer.index)]
    size = down.nbytes // layer.experts
    found = np.empty((layer.experts, down.shape[-1]))
    for expert in range(layer.experts):
        weight = dequantised(down, model.read(down.name, expert * size, size))
        found[expert] = np.einsum("on,on->n", weight, weight, dtype=np.float64)
    scale = model.tensors.get(down.name.replace(".weight", ".scale"))  # what each expert is multiplied by
    if scale is not None:
        found *= dequantised(scale, model.read(scale.name)).reshape(-1, 1).astype(np.float64) ** 2
    if not np.isfinite(found).all():
        raise CompressionError(f"{down.name} has weights that are no numbers; download or convert the file again")
    return found


def dequantised(tensor: Tensor, raw: bytes) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    """Rows of a tensor, as they are stored, in float32: [rows, in]."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    block, nbytes = type_sizes()[tensor.kind]
    row = tensor.shape[-1] // block * nbytes
    stored = np.frombuffer(raw, np.uint8)
    if stored.size % row:
        raise CompressionError(f"{tensor.name} was cut off while it was read; run the command again")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of scales that overflow: the caller refuses infinite weights
            found = dequantize(stored.reshape(-1, row), GGMLQuantizationType(tensor.kind))
    except NotImplementedError as error:
        kind = f"{type_name(tensor.kind)}, which the package gguf does not dequantise"
        raise CompressionError(f"{tensor.name} is {kind}; choose --strategy {COUNTS}") from error
    return np.asarray(found, np.float32)
