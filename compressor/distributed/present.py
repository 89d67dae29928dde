"""This process among those that do one run together: its rank, their number, and what falls to it.

A launcher such as `torchrun` starts all with the same command line and tells each its place in the environment. The
first rank decides and writes; batches are dealt out in a fixed way, so that no result depends on how many there are.
Importing this loads no torch, and of a process alone nothing of `compressor.distributed.exchange` is ever loaded.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from compressor.errors import CompressionError

if TYPE_CHECKING:
    from torch import Tensor

GROUPS = 8  # of pieces, in sums of groups
_T = TypeVar("_T")
PLACES = ("RANK", "WORLD_SIZE", "LOCAL_RANK")  # what a launcher sets, beside MASTER_ADDR and MASTER_PORT


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among `size`; `local` is its number on its machine. What it hands on is JSON, tensors and bytes."""

    rank: int = 0
    size: int = 1
    local: int = 0

    @property
    def is_first(self) -> bool:
        """Whether this one decides, prints and writes."""
        return self.rank == 0

    @property
    def is_alone(self) -> bool:
        """Whether there are no others."""
        return self.size == 1

    def takes_turn(self, number: int) -> bool:
        """Whether the piece of work of this number falls to this rank, where they take turns."""
        return number % self.size == self.rank

    def owners(self, batches: "Sequence[Tensor]") -> list[int]:
        """The rank of each of these batches of token ids [B, L]."""
        return owners([batch.numel() for batch in batches], self.size)

    def share(self, batches: "Sequence[Tensor]") -> frozenset[int]:
        """The numbers of those of the batches that fall to this rank."""
        return frozenset(number for number, owner in enumerate(self.owners(batches)) if owner == self.rank)

    def own(self, *groups: "Sequence[Tensor]") -> frozenset[int] | None:
        """The numbers of this rank's batches, of all groups in one row; None, which is all, for a process alone.

        Each group is dealt out by itself, so that a batch has the same rank in every pass with its group.
        """
        if self.is_alone:
            return None
        found, begin = set[int](), 0
        for group in groups:
            found |= {begin + number for number in self.share(group)}
            begin += len(group)
        return frozenset(found)

    def told(self, make: Callable[[], Any]) -> Any:
        """What the first rank makes, as JSON; the others get it without making it."""
        if self.is_alone:
            return make()
        from compressor.distributed import exchange

        return exchange.told(make() if self.is_first else None, self.is_first)

    def shown(self, make: Callable[[], "Mapping[str, Tensor]"], owner: int = 0) -> "Mapping[str, Tensor]":
        """Tensors that a rank makes, the first one unless said; the others get copies, on the CPU."""
        if self.is_alone:
            return make()
        from compressor.distributed import exchange

        return exchange.shown(make() if self.rank == owner else None, owner)

    def agreed(self, value: Any, what: str) -> None:
        """Refuse ranks that have come to different JSON values for `what`."""
        if not self.is_alone:
            first = self.told(lambda: value)
            if first != value:
                raise CompressionError(
                    f"rank {self.rank} has another {what} than rank 0; give all the same files, versions and variables"
                )

    def first_alone(self, do: Callable[[], None]) -> None:
        """Have the first rank do it while the others wait."""
        self.told(do)

    def first_before_others(self, make: Callable[[], _T]) -> _T:
        """What each rank makes for itself, the others once the first one has left in caches what they need."""
        made = [make()] if self.is_first else []
        self.wait()
        return made[0] if made else make()

    def wait(self) -> None:
        """Wait until all ranks have come this far."""
        if not self.is_alone:
            self.gathered(b"")
            self.told(lambda: None)

    def gathered(self, content: bytes) -> list[bytes]:
        """At the first rank what all have, by rank; at the others nothing."""
        if self.is_alone:
            return [content]
        from compressor.distributed import exchange

        return exchange.gathered(content)

    def listed(self, value: Any) -> list[Any]:
        """What each rank has, by rank, as JSON; at all of them."""
        found = self.gathered(json.dumps(value).encode())
        return list(self.told(lambda: [json.loads(content) for content in found]))

    def reduced(self, value: "Tensor") -> "Tensor":
        """The sum over all ranks of a tensor, added up in place in whatever order is fastest; alike at all."""
        return self.reducing(value)()

    def reducing(self, value: "Tensor") -> "Callable[[], Tensor]":
        """Start what `reduced` does; what is returned waits for its end and gives the sum."""
        if self.is_alone:
            return lambda: value
        from compressor.distributed import exchange

        return exchange.reducing(value)

    def spread(self, values: "Sequence[Tensor]", owners: Sequence[int]) -> None:
        """Put what its owner has in each of these contiguous tensors into that of all other ranks."""
        if not self.is_alone:
            from compressor.distributed import exchange

            exchange.spread(values, owners)

    def summed(self, value: "Tensor") -> "Tensor":
        """The sum over all ranks, in their order, of a tensor that each has; the same bits at all."""
        return self.ordered_sum(value, range(self.size), lambda rank: value) if not self.is_alone else value

    def ordered_sum(self, like: "Tensor", owners: Sequence[int], make: Callable[[int], "Tensor"]) -> "Tensor":
        """The sum of pieces [...] in their order, each made by its owner: the same bits at all ranks, however many.

        `like` has the pieces' shape, dtype and device. A few pieces of each rank are in memory at a time.
        """
        import torch

        total = torch.zeros_like(like)
        for piece in self.pieces(like, owners, make):
            total += piece
        return total

    def grouped_sum(self, like: "Tensor", owners: Sequence[int], make: Callable[[int], "Tensor"]) -> "Tensor":
        """The same, where every `GROUPS`-th piece is of one group: groups are summed, and then their sums.

        A group that one rank has is exchanged as one, so large pieces travel less often. `make` makes new tensors.
        """
        jobs = list[tuple[int, list[int]]]()  # of one owner each: group, and pieces
        for group in range(min(GROUPS, len(owners))):
            pieces = [*range(group, len(owners), GROUPS)]
            whole = len({owners[piece] for piece in pieces}) == 1
            jobs += [(group, pieces)] if whole else [(group, [piece]) for piece in pieces]

        def summed(job: int) -> "Tensor":
            first, *others = jobs[job][1]
            found = make(first)
            for piece in others:
                found += make(piece)
            return found

        import torch

        total, part = torch.zeros_like(like), torch.zeros_like(like)
        made_by = [owners[pieces[0]] for _, pieces in jobs]
        for job, piece in enumerate(self.pieces(like, made_by, summed)):
            if job and jobs[job][0] == jobs[job - 1][0]:
                part += piece
            else:
                total += part
                part = piece
        return total + part

    def pieces(self, like: "Tensor", owners: Sequence[int], make: Callable[[int], "Tensor"]) -> Iterator["Tensor"]:
        """Pieces in their order, each made by its owner, a few ahead, and shown to all.

        `like` has the pieces' shape, dtype and device. All ranks must take all of them.
        """
        if self.is_alone:
            yield from map(make, range(len(owners)))
            return
        from compressor.distributed import exchange

        yield from exchange.pieces(like, owners, make, self.rank)


def owners(sizes: Sequence[int], count: int) -> list[int]:
    """Which of `count` ranks each piece of so many tokens falls to.

    Each round deals the next `count` pieces out, the largest to the rank that has least so far: all are busy, and
    pieces of one round can be added up in their order as soon as it is done.
    """
    found, load = list[int](), [0] * count
    for begin in range(0, len(sizes), count):
        pieces = sizes[begin : begin + count]
        idle = sorted(range(count), key=lambda rank: load[rank])
        dealt = dict(zip(sorted(range(len(pieces)), key=lambda piece: -pieces[piece]), idle, strict=False))
        for piece, size in enumerate(pieces):
            load[dealt[piece]] += size
            found.append(dealt[piece])
    return found


def started() -> Ranks:
    """The place that the launcher has told this process; raises `CompressionError` where it makes no sense."""
    if int(os.environ.get("WORLD_SIZE") or 1) <= 1:
        return Ranks()
    try:
        rank, size, local = (int(os.environ[name]) for name in PLACES)
    except (KeyError, ValueError) as error:
        raise CompressionError(f"WORLD_SIZE is set, but not {', '.join(PLACES)} as torchrun sets them") from error
    if not 0 <= rank < size or local < 0:
        raise CompressionError(f"there is no rank {rank} of {size}; start all with torchrun")
    return Ranks(rank, size, local)


@contextmanager
def unseen_launcher() -> Iterator[None]:
    """Hide the launcher from a library that would share work among processes in a way of its own."""
    hidden = {name: value for name, value in os.environ.items() if name in (*PLACES, "LOCAL_WORLD_SIZE")}
    for name in hidden:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(hidden)


_here = [Ranks()]


def here() -> Ranks:
    """The ranks that this process is doing its work with: itself alone, unless `together` says otherwise."""
    return _here[-1]


def enter(ranks: Ranks) -> Callable[[], None]:
    """Work with these ranks until the function that is returned is called."""
    _here.append(ranks)
    return lambda: _here.remove(ranks)


def refuse_several(what: str, instead: str = "start it without torchrun") -> None:
    """Refuse what is done by one process where a launcher has started several."""
    if not started().is_alone:
        raise CompressionError(f"{what} is done by one process; {instead}")
