"""Collectives of torch.distributed on bytes and tensors, without pickle; a broken connection is a `LostRankError`."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import safetensors.torch
import torch
import torch.distributed as dist
from torch import Tensor

from compressor.distributed.ranks import LostRankError


@contextmanager
def _connected() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise LostRankError from error


def packed(tensors: Mapping[str, Tensor]) -> bytes:
    """Return the tensors as safetensors."""
    copies = {name: value.detach().to("cpu", copy=True).contiguous() for name, value in tensors.items()}
    content: bytes = safetensors.torch.save(copies)
    return content


def unpacked(content: bytes) -> dict[str, Tensor]:
    """Return the tensors of `packed`."""
    tensors: dict[str, Tensor] = safetensors.torch.load(content)
    return tensors


def _tensor(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)


def broadcast(content: bytes | None, owner: int = 0) -> bytes:
    """Return the owner's bytes; the others give None."""
    value = _tensor(content or b"")
    size = torch.tensor([value.numel()])
    with _connected():
        dist.broadcast(size, owner)
        value = torch.empty(int(size), dtype=torch.uint8) if content is None else value
        dist.broadcast(value, owner)
    return value.numpy().tobytes() if content is None else content


def all_gather(content: bytes) -> list[bytes]:
    """Return the bytes of all ranks, by rank."""
    own, sizes = _tensor(content), [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    with _connected():
        dist.all_gather(sizes, torch.tensor([own.numel()]))
        most = max(map(int, sizes))
        padded = torch.cat([own, torch.zeros(most - len(own), dtype=torch.uint8)])
        parts = [torch.empty(most, dtype=torch.uint8) for _ in sizes]
        if most:
            dist.all_gather(parts, padded)
    return [part[: int(size)].numpy().tobytes() for part, size in zip(parts, sizes, strict=True)]


def barrier() -> None:
    """Wait until all ranks have come this far."""
    all_reduce(torch.zeros(1))


def all_reduce(value: Tensor) -> Tensor:
    """Return the sum over all ranks, equal bits at each."""
    total = value.detach().clone(memory_format=torch.contiguous_format)
    with _connected():
        dist.all_reduce(total)
    return total


def copy_from(owner: int, tensors: Sequence[Tensor]) -> None:
    """Overwrite contiguous tensors with the owner's, all on their way at once."""
    with _connected():
        for work in [dist.broadcast(value.detach(), owner, async_op=True) for value in tensors if value.numel()]:
            work.wait()
