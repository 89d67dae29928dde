"""How much each expert matters, from an importance matrix and the weights of a GGUF model."""

import warnings
from collections.abc import Callable

import numpy as np
import torch

from compressor.errors import CompressionError
from compressor.gguf_files.blocks import DOWN
from compressor.gguf_files.header import Tensor, type_name, type_sizes
from compressor.gguf_files.imatrix import Imatrix, Numbers
from compressor.gguf_files.parts import Gguf
from compressor.model.architecture import MoeLayer

ENERGY, COUNTS = "imatrix-energy", "count-guided"


def visit_scores(model: Gguf, layer: MoeLayer, imatrix: Imatrix) -> torch.Tensor:
    """Tokens that visited each expert: [E] (He et al. 2024, arXiv:2406.02500)."""
    return torch.from_numpy(imatrix.visits(DOWN.format(layer.index), layer.experts).copy())


def energy_scores(model: Gguf, layer: MoeLayer, imatrix: Imatrix) -> torch.Tensor:
    """Energy that each expert put out, its neurons taken as uncorrelated: [E].

    score_e = sum_n s_en * ||W_e[:, n]||^2, where s_en is the sum over the tokens that visited expert e of the square of
    what neuron n sent into the down projection W_e [out, n]. This is the sum of the squared norms of the expert's
    outputs without the products of different neurons, without the projection's bias, and without the gate weights by
    which the router multiplies them, none of which an imatrix has. Of an old file s_en is a mean over visits.
    """
    down = model.tensors[DOWN.format(layer.index)]
    squares = imatrix.squares(down.name, layer.experts, down.shape[-1])
    return torch.from_numpy((squares * column_norms(model, layer)).sum(1))


def weight_scores(model: Gguf, layer: MoeLayer) -> torch.Tensor:
    """Squared norm of each expert's down projection: [E]. Only for heads, on which an imatrix has nothing."""
    return torch.from_numpy(column_norms(model, layer).sum(1))


SCORES: dict[str, Callable[[Gguf, MoeLayer, Imatrix], torch.Tensor]] = {ENERGY: energy_scores, COUNTS: visit_scores}


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
            warnings.simplefilter("ignore")  # of scales that overflow: they are told afterwards
            found = dequantize(stored.reshape(-1, row), GGMLQuantizationType(tensor.kind))
    except NotImplementedError as error:
        raise CompressionError(
            f"{tensor.name} is {type_name(tensor.kind)}, which the package gguf does not dequantise; choose --strategy "
            f"{COUNTS}"
        ) from error
    return np.asarray(found, np.float32)
