"""The processes of one run: this one's rank, its share of the work, and the collectives of torch.distributed.

A launcher such as `torchrun` starts all processes with the same command line. Rank 0 decides, prints and writes;
batches of text are assigned by their sizes. Importing this module loads no torch, and a single process never loads
`compressor.distributed.collectives`.
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

_T = TypeVar("_T")
LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK")  # what a launcher sets, beside MASTER_ADDR and MASTER_PORT


class LostRankError(BaseException):
    """Another rank has ended. Not an `Exception`: as after a kill, finished work is left for the next run."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among `size`; `local` is its number on its machine. A single process makes every value itself."""

    rank: int = 0
    size: int = 1
    local: int = 0

    @property
    def is_first(self) -> bool:
        """Return True for rank 0, which decides, prints and writes."""
        return self.rank == 0

    @property
    def is_alone(self) -> bool:
        """Return True for a single process."""
        return self.size == 1

    def takes_turn(self, number: int) -> bool:
        """Return True if this rank does the piece of work of this number, where ranks take turns."""
        return number % self.size == self.rank

    def share(self, batches: "Sequence[Tensor]") -> frozenset[int]:
        """Return the numbers of this rank's batches of token ids [B, L]."""
        dealt = owners([batch.numel() for batch in batches], self.size)
        return frozenset(number for number, owner in enumerate(dealt) if owner == self.rank)

    def own(self, *groups: "Sequence[Tensor]") -> frozenset[int] | None:
        """Return the numbers of this rank's batches of all groups in one row; None, meaning all, for one process.

        Each group is dealt out by itself, so that a batch has the same rank in every pass over its group.
        """
        if self.is_alone:
            return None
        numbers, begin = set[int](), 0
        for group in groups:
            numbers |= {begin + number for number in self.share(group)}
            begin += len(group)
        return frozenset(numbers)

    def barrier(self) -> None:
        """Wait until all ranks have come this far."""
        if not self.is_alone:
            _collectives().barrier()

    def broadcast(self, make: Callable[[], Any]) -> Any:
        """Return what rank 0 makes, as JSON; the others do not make it."""
        if self.is_alone:
            return make()
        value = make() if self.is_first else None
        content = _collectives().broadcast(json.dumps(value).encode() if self.is_first else None)
        return value if self.is_first else json.loads(content)

    def broadcast_tensors(self, make: "Callable[[], Mapping[str, Tensor]]", owner: int = 0) -> "Mapping[str, Tensor]":
        """Return the tensors that one rank makes; the others get copies on the CPU."""
        if self.is_alone:
            return make()
        tensors = make() if self.rank == owner else None
        content = _collectives().broadcast(None if tensors is None else _collectives().packed(tensors), owner)
        return _collectives().unpacked(content) if tensors is None else tensors

    def copy_from(self, owner: int, tensors: "Sequence[Tensor]") -> None:
        """Overwrite contiguous tensors, of the same shapes at all ranks, with the owner's values."""
        if not self.is_alone:
            _collectives().copy_from(owner, tensors)

    def all_gather(self, value: Any) -> list[Any]:
        """Return every rank's value as JSON, by rank."""
        if self.is_alone:
            return [value]
        return [json.loads(content) for content in _collectives().all_gather(json.dumps(value).encode())]

    def all_gather_tensors(self, tensors: "Mapping[str, Tensor]") -> "list[Mapping[str, Tensor]]":
        """Return every rank's tensors by rank, copied to the CPU."""
        if self.is_alone:
            return [tensors]
        collectives = _collectives()
        return [collectives.unpacked(content) for content in collectives.all_gather(collectives.packed(tensors))]

    def all_reduce(self, value: "Tensor") -> "Tensor":
        """Return the sum over all ranks in the tensor's own dtype, float64 for statistics; equal bits at all ranks."""
        return value if self.is_alone else _collectives().all_reduce(value)

    def assert_same_on_all(self, value: Any, what: str) -> None:
        """Refuse ranks whose JSON values for `what` differ."""
        if self.broadcast(lambda: value) != value:
            raise CompressionError(
                f"rank {self.rank} has another {what} than rank 0; give all the same files, versions and variables"
            )

    def first_before_others(self, make: Callable[[], _T]) -> _T:
        """Return what each rank makes for itself, the others after rank 0 has filled the caches."""
        made = [make()] if self.is_first else []
        self.barrier()
        return made[0] if made else make()


def _collectives() -> Any:
    from compressor.distributed import collectives

    return collectives


def owners(sizes: Sequence[int], count: int) -> list[int]:
    """Assign batches of so many tokens to `count` ranks: in each round the largest goes to the rank with the least."""
    dealt, load = list[int](), [0] * count
    for begin in range(0, len(sizes), count):
        batches = sizes[begin : begin + count]
        idle = sorted(range(count), key=lambda rank: load[rank])
        turn = dict(zip(sorted(range(len(batches)), key=lambda batch: -batches[batch]), idle, strict=False))
        for batch, size in enumerate(batches):
            load[turn[batch]] += size
            dealt.append(turn[batch])
    return dealt


def launched() -> Ranks:
    """Return the rank that a launcher gave this process; raises `CompressionError` if it makes no sense."""
    if int(os.environ.get("WORLD_SIZE") or 1) <= 1:
        return Ranks()
    try:
        rank, size, local = (int(os.environ[name]) for name in LAUNCHED)
    except (KeyError, ValueError) as error:
        raise CompressionError(f"WORLD_SIZE is set, but not {', '.join(LAUNCHED)} as torchrun sets them") from error
    if not 0 <= rank < size or local < 0:
        raise CompressionError(f"there is no rank {rank} of {size}; start all with torchrun")
    return Ranks(rank, size, local)


@contextmanager
def unseen_launcher() -> Iterator[None]:
    """Hide the launcher from a library that would share work among processes in its own way."""
    hidden = {name: value for name, value in os.environ.items() if name in (*LAUNCHED, "LOCAL_WORLD_SIZE")}
    for name in hidden:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(hidden)


_entered = [Ranks()]


def here() -> Ranks:
    """Return the ranks that share this run: a single process, unless `process_group` says otherwise."""
    return _entered[-1]


def enter(ranks: Ranks) -> Callable[[], None]:
    """Share work with these ranks until the returned function is called."""
    _entered.append(ranks)
    return lambda: _entered.remove(ranks)


def refuse_several(what: str, instead: str = "start it without torchrun") -> None:
    """Refuse what a single process does, if a launcher has started several."""
    if not launched().is_alone:
        raise CompressionError(f"{what} is done by one process; {instead}")
