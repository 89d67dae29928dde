"""The codes in packed bytes of quantised weights, to compare with what was packed."""

import torch
from torch import Tensor

from exporters.onnx.quantise import Scheme


def unpack(packed: Tensor, scheme: Scheme) -> Tensor:
    """The codes int8 [..., K] in bytes made by `pack`."""
    unsigned = packed if scheme.bits == 8 else torch.stack([packed & 15, packed >> 4], -1).flatten(-2)
    return (unsigned.to(torch.int16) - scheme.highest - 1).to(torch.int8)
