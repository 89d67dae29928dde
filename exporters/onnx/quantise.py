"""Symmetric integers for weights of experts: one scale for each output row, or for each block of
the inputs.

Every value is rounded to the nearest multiple of its scale. A scale is the one of a few that gives
the smallest squared error: somewhat below the largest value over the largest code, a few values are
cut off and all others gain."""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import pad

from compressor.frozen import frozen

# of the scale at which nothing is cut off: 1, 0.975, ..., 0.6
RATIOS = tuple(1 - step / 40 for step in range(17))


@frozen
class Scheme:
    """The bits of a code, and the number of inputs that share a scale: all of a row without a
    block."""

    bits: int
    block: int | None = None

    @property
    def highest(self) -> int:
        """The highest code; the lowest is -highest - 1."""
        return (1 << self.bits - 1) - 1

    def padding(self, width: int) -> int:
        """Zeros that a row of this width needs to consist of whole blocks."""
        return -width % (self.block or 1)

    def describe(self) -> str:
        return f"{self.bits} bits per {'row' if self.block is None else f'block of {self.block}'}"


SCHEMES: Mapping[str, Scheme] = {"int8": Scheme(8), "int4": Scheme(4, 32)}


def blocks(weight: Tensor, scheme: Scheme) -> Tensor:
    """[..., K] -> [..., B, S]: the values that share a scale, the last block filled up with
    zeros."""
    width = weight.shape[-1]
    filled = pad(weight, (0, scheme.padding(width)))
    return filled.reshape(*filled.shape[:-1], -1, scheme.block or width)


def _steps(values: Tensor, scales: Tensor, scheme: Scheme) -> Tensor:
    """The nearest codes of [..., B, S] for the scales [..., B], as whole floating-point numbers."""
    return (values / scales[..., None]).round_().clamp_(-scheme.highest - 1, scheme.highest)


def codes(weight: Tensor, scales: Tensor, scheme: Scheme) -> Tensor:
    """The nearest codes, [..., K] and [..., B] -> int8 [..., K]; of a dequantised weight, exactly
    its own codes."""
    steps = _steps(blocks(weight, scheme), scales, scheme)
    return steps.flatten(-2)[..., : weight.shape[-1]].to(torch.int8)


def rounded(weight: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor]:
    """A weight [..., K] as its codes mean it, float32, and the scales [..., B], none of them 0; the
    larger of two equally good ones."""
    values = blocks(weight.float(), scheme)
    # of a block of zeros too, whose codes are 0 whatever the scale
    smallest = torch.finfo(torch.float32).tiny
    full = values.abs().amax(-1) / scheme.highest
    unit = full.clamp(min=smallest)
    best = unit
    least = torch.full_like(full, torch.inf)
    for ratio in RATIOS:
        scales = (full * ratio).clamp(min=smallest)
        # relative to the scale at ratio 1, for the squares of small weights are 0 in float32
        misses = _steps(values, scales, scheme) * scales[..., None] - values
        error = (misses / unit[..., None]).square().sum(-1)
        better = error < least
        best = torch.where(better, scales, best)
        least = torch.where(better, error, least)
    meant = _steps(values, best, scheme) * best[..., None]
    return meant.flatten(-2)[..., : weight.shape[-1]], best


def pack(codes: Tensor, scheme: Scheme) -> Tensor:
    """Codes int8 [..., K] as unsigned bytes: [..., K], or [..., K / 2] for pairs of 4 bits, the
    first one low."""
    unsigned = (codes.to(torch.int16) + scheme.highest + 1).to(torch.uint8)
    return unsigned if scheme.bits == 8 else unsigned[..., 0::2] | unsigned[..., 1::2] << 4
