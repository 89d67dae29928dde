"""What ranks hand each other: JSON, bytes and tensors, never pickles; a lost rank is one sentence."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import safetensors.torch
import torch
import torch.distributed as dist
from torch import Tensor

from compressor.distributed.faults import EndedError, LostRankError

AHEAD, ROOM = 2, 2**27  # rounds of pieces, or bytes of a rank's own, that are made before they are exchanged
heard: list[Callable[[], str | None]] = []  # what the watch knows of a fault, once another rank may have told it


@contextmanager
def _others() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if heard and (sentence := heard[-1]()) is not None:
            raise EndedError(sentence) from error
        raise LostRankError("another rank has ended without a word") from error


def told(value: Any, first: bool) -> Any:
    """The first rank's JSON value."""
    content = _spread(json.dumps(value).encode() if first else None)
    return value if first else json.loads(content)


def shown(tensors: Mapping[str, Tensor] | None, owner: int = 0) -> Mapping[str, Tensor]:
    """The owner's tensors; None at the others."""
    if tensors is None:
        found: Mapping[str, Tensor] = safetensors.torch.load(_spread(None, owner))
        return found
    copies = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    _spread(safetensors.torch.save(copies), owner)
    return tensors


def _spread(content: bytes | None, owner: int = 0) -> bytes:
    """The owner's bytes; None at the others."""
    made = torch.empty(0, dtype=torch.uint8) if content is None else _tensor(content)
    size = torch.tensor([made.numel()])
    with _others():
        dist.broadcast(size, owner)
        made = torch.empty(int(size), dtype=torch.uint8) if content is None else made
        dist.broadcast(made, owner)
    return made.numpy().tobytes() if content is None else content


def _tensor(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)


def gathered(content: bytes) -> list[bytes]:
    """At the first rank the bytes of all; at the others nothing."""
    own = _tensor(content)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    with _others():
        dist.all_gather(sizes, torch.tensor([own.numel()]))
        if dist.get_rank() != 0:
            if len(own):
                dist.send(own, 0)
            return []
        found = [own]
        for rank, size in enumerate(sizes[1:], start=1):
            found.append(torch.empty(int(size), dtype=torch.uint8))
            if int(size):
                dist.recv(found[-1], rank)
    return [part.numpy().tobytes() for part in found]


def spread(values: Sequence[Tensor], owners: Sequence[int]) -> None:
    """Put each owner's bytes of a contiguous tensor into the others' tensor, in place, all on their way at once."""
    flat = [(value.detach().view(-1).view(torch.uint8), owner) for value, owner in zip(values, owners, strict=True)]
    with _others():
        for work in [dist.broadcast(value, owner, async_op=True) for value, owner in flat if len(value)]:
            work.wait()


def reducing(value: Tensor) -> Callable[[], Tensor]:
    """Start to sum a tensor over all ranks, in place; what is returned waits for its end and gives the sum."""
    with _others():
        work = dist.all_reduce(value, async_op=True)

    def end() -> Tensor:
        with _others():
            work.wait()
        return value

    return end


def pieces(like: Tensor, owners: Sequence[int], make: Callable[[int], Tensor], rank: int) -> Iterator[Tensor]:
    """Pieces in their order, each made by its owner and shown to all.

    Each rank makes its own of some rounds before any of them is exchanged: ranks wait less for each other so, where
    pieces take longer or shorter.
    """
    rounds = [*_rounds(owners)]
    ahead = max(AHEAD, ROOM // max(1, like.nbytes))
    for first in range(0, len(rounds), ahead):
        now = range(rounds[first][0], rounds[first : first + ahead][-1][1])
        own = [number for number in now if owners[number] == rank]
        made = {number: make(number).to(like.device, like.dtype).contiguous() for number in own}
        for number in now:
            piece = made.pop(number) if number in made else torch.empty_like(like)
            with _others():
                dist.broadcast(piece, owners[number])
            yield piece


def _rounds(owners: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Spans [begin, end) of distinct owners."""
    begin = 0
    for end in range(1, len(owners) + 1):
        if end == len(owners) or owners[end] in owners[begin:end]:
            yield begin, end
            begin = end
