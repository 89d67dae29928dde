"""What collectors have seen as bytes, handed from one process to another: safetensors, no pickle."""

from collections.abc import Mapping

import safetensors.torch
import torch
from torch import Tensor

from compressor.statistics.statistics import Collector

_Tensors = dict[str, list[Tensor]]  # of a collector: by meter, and under "" the number of its tokens


def handed(collectors: Mapping[int, Collector]) -> bytes:
    """All that collectors have seen, each of the batch of this number."""
    tensors = {}
    for batch, collector in collectors.items():
        found = {"": [torch.tensor([collector.tokens])], **{n: m.tensors() for n, m in collector.meters.items()}}
        for name, values in found.items():
            for place, value in enumerate(values):
                tensors[f"{batch}/{name}/{place:06}"] = value.detach().cpu().clone().contiguous()
    content: bytes = safetensors.torch.save(tensors)
    return content


def unpacked(content: bytes) -> dict[int, _Tensors]:
    """By number of the batch, what `restore` takes."""
    found: dict[int, _Tensors] = {}
    for key, value in sorted(safetensors.torch.load(content).items()):
        batch, name, _ = key.split("/")
        found.setdefault(int(batch), {}).setdefault(name, []).append(value)
    return found
