"""LoRA on weights as they are (Hu et al., arXiv:2106.09685): W = W0 + (alpha / r) B A, with alpha = 2 r.

W is [..., M, N], A [..., r, N], B [..., M, r]; a fused tensor of experts has its own factors for each of them. The
gradient of a weight is in memory anyway while its layer is trained, so the factors' gradients follow by the chain rule.
"""

import math

import torch
from torch import Tensor

SCALE = 2.0  # alpha / r


def begin(shape: tuple[int, ...], rank: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """A and B of a weight of this shape in float32: A uniform in ±1 / sqrt(N), B zero, so that W is W0 at first."""
    *experts, rows, columns = shape
    first = torch.rand(*experts, rank, columns, generator=generator) * 2 - 1
    return first / math.sqrt(columns), torch.zeros(*experts, rows, rank)


def merged(weight: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """W in float32, of W0, A and B."""
    return torch.baddbmm(
        weight.float().reshape(-1, *weight.shape[-2:]),
        second.reshape(-1, *second.shape[-2:]),
        first.reshape(-1, *first.shape[-2:]),
        alpha=SCALE,
    ).view(weight.shape)


def factor_gradients(gradient: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """dL/dA = (alpha / r) B^T dL/dW, [..., r, N], and dL/dB = (alpha / r) dL/dW A^T, [..., M, r]."""
    wide = gradient.float()
    return SCALE * (second.mT @ wide), SCALE * (wide @ first.mT)
