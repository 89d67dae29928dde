"""The processes of one run: this one's rank, its share of the work, and how all of them join and
end.

A launcher such as `torchrun` starts all processes with the same command line. Rank 0 decides,
prints and writes, and the ranks take batches of text in turn. Importing this module loads no torch.
"""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from compressor.errors import CompressionError, reason_of
from compressor.files import lock_output, work_folder
from compressor.frozen import frozen

if TYPE_CHECKING:
    from torch import Tensor

_T = TypeVar("_T")
# what a launcher sets, beside MASTER_ADDR and MASTER_PORT
LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK")


class LostRankError(BaseException):
    """Another rank has ended. Not an `Exception`: as after a kill, finished work is left for the
    next run."""


@contextmanager
def _connected() -> Iterator[Any]:
    """Yield torch.distributed; a broken connection is a `LostRankError`."""
    import torch.distributed as dist

    try:
        yield dist
    except RuntimeError as error:
        raise LostRankError from error


def _on_cpu(value: Any) -> Any:
    """Return the same nest of lists, tuples and dicts with its tensors copied, without the storage
    that they share."""
    from torch import Tensor
    from torch.utils._pytree import tree_map_only

    return tree_map_only(
        Tensor, lambda tensor: tensor.detach().to("cpu", copy=True).contiguous(), value
    )


@frozen
class Ranks:
    """This process among `size`; `local` is its number on its machine. A single process makes every
    value itself."""

    rank: int = 0
    size: int = 1
    local: int = 0

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def is_alone(self) -> bool:
        return self.size == 1

    def share(self, *groups: "Sequence[Tensor]") -> frozenset[int]:
        """Return the numbers of this rank's batches of token ids [B, L], of all groups in one row.

        Each group is divided by itself, so that a batch has the same rank in every pass over its
        group."""
        numbers = set[int]()
        begin = 0
        for batches in groups:
            numbers.update(range(begin + self.rank, begin + len(batches), self.size))
            begin += len(batches)
        return frozenset(numbers)

    def barrier(self) -> None:
        self.all_gather(None)

    def broadcast(self, make: Callable[[], _T]) -> _T:
        """Return what rank 0 makes, from several ranks with its tensors on the CPU; the others do
        not make it."""
        if self.is_alone:
            return make()
        values: list[Any] = [_on_cpu(make()) if self.is_first else None]
        with _connected() as dist:
            dist.broadcast_object_list(values)
        value: _T = values[0]
        return value

    def all_gather(self, value: Any) -> list[Any]:
        """Return every rank's value, by rank, from several ranks with its tensors on the CPU."""
        values = [value] * self.size
        if not self.is_alone:
            with _connected() as dist:
                dist.all_gather_object(values, _on_cpu(value))
        return values

    def all_reduce(self, value: "Tensor") -> "Tensor":
        """Return the sum over all ranks in the tensor's own dtype, float64 for statistics; equal
        bits at all ranks."""
        if self.is_alone:
            return value
        total = value.detach().clone().contiguous()
        with _connected() as dist:
            dist.all_reduce(total)
        return total

    def assert_same_on_all(self, value: Any, what: str) -> None:
        """Refuse ranks whose JSON values for `what` differ."""
        if self.broadcast(lambda: value) != value:
            raise CompressionError(
                f"rank {self.rank} has another {what} than rank 0; give all the same files, "
                "versions and variables"
            )

    def first_before_others(self, make: Callable[[], _T]) -> _T:
        """Return what each rank makes for itself, the others after rank 0 has filled the caches."""
        if not self.is_first:
            self.barrier()
        value = make()
        if self.is_first:
            self.barrier()
        return value


def launched() -> Ranks:
    """Return the rank that a launcher gave this process; raises `CompressionError` if it makes no
    sense."""
    if int(os.environ.get("WORLD_SIZE") or 1) <= 1:
        return Ranks()
    try:
        rank, size, local = (int(os.environ[name]) for name in LAUNCHED)
    except (KeyError, ValueError) as error:
        raise CompressionError(
            f"WORLD_SIZE is set, but not {', '.join(LAUNCHED)} as torchrun sets them"
        ) from error
    return Ranks(rank, size, local)


@contextmanager
def unseen_launcher() -> Iterator[None]:
    """Hide the launcher from a library that would share work among processes in its own way."""
    hidden = {
        name: value for name, value in os.environ.items() if name in (*LAUNCHED, "LOCAL_WORLD_SIZE")
    }
    for name in hidden:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(hidden)


_entered = [Ranks()]


def ranks() -> Ranks:
    """Return the ranks that share this run: a single process, unless `process_group` says
    otherwise."""
    return _entered[-1]


def refuse_several(what: str, instead: str = "start it without torchrun") -> None:
    """Refuse what a single process does, if a launcher has started several."""
    if not launched().is_alone:
        raise CompressionError(f"{what} is done by one process; {instead}")


JOINING = timedelta(minutes=5)  # for all ranks to join
# that ranks may wait for rank 0; torchrun ends those whose peers are gone
PLANNING = timedelta(days=30)
ALIKE = 50  # tenths of a second for rank 0 to fail as another rank did


@contextmanager
def process_group() -> Iterator[Ranks]:
    """Share the work of the block with the ranks that a launcher has started; do it alone if there
    are none.

    A failing rank raises its error, rank 0 alone if it fails as well. A rank that loses its
    connection to another one leaves with exit status 2; if no rank has failed with an error, but
    one was killed, rank 0 says so."""
    group = launched()
    if group.is_alone:
        yield group
        return
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # broken connections are reported here
    import torch.distributed as dist

    store = _joined(group)
    _entered.append(group)
    try:
        group.barrier()  # none leaves while others still connect
        yield group
        group.barrier()
    except LostRankError as error:
        if group.is_first and not any(
            store.check([f"failed/{rank}"]) for rank in range(group.size)
        ):
            raise CompressionError(
                "another rank was ended; run the same command again, with any number of ranks, to "
                "go on"
            ) from error
        raise SystemExit(2) from error
    except BaseException as error:
        try:
            store.set(f"failed/{group.rank}", "1")
            for _ in range(0 if group.is_first else ALIKE):
                if store.check(["failed/0"]):  # rank 0 says why
                    raise SystemExit(2) from error
                time.sleep(0.1)
        except RuntimeError:  # the store has ended with rank 0
            raise SystemExit(2) from error
        raise
    finally:
        _entered.remove(group)
        with suppress(RuntimeError):  # the group's threads must not outlive the interpreter
            dist.destroy_process_group()


def _joined(group: Ranks) -> Any:
    import torch
    import torch.distributed as dist
    from torch.distributed.rendezvous import rendezvous

    try:
        store: Any = next(iter(rendezvous("env://", group.rank, group.size, timeout=JOINING)))[0]
        store.set(f"joined/{group.rank}", "1")
        store.wait([f"joined/{rank}" for rank in range(group.size)], JOINING)
        kind = torch.accelerator.current_accelerator(check_available=True)
        count = torch.accelerator.device_count()
        if kind is not None:
            torch.accelerator.set_device_index(group.local % count)
        local = int(os.environ.get("LOCAL_WORLD_SIZE") or group.size)
        backends = "gloo"  # nccl and its like want a device for each rank
        if kind is not None and local <= count:
            backends = f"cpu:gloo,{kind.type}:{dist.get_default_backend_for_device(kind)}"
        dist.init_process_group(
            backends,
            store=dist.distributed_c10d.PrefixStore("group", store),
            rank=group.rank,
            world_size=group.size,
            timeout=PLANNING,
        )
    except (RuntimeError, ValueError, KeyError) as error:
        raise CompressionError(
            f"the {group.size} ranks did not come together ({reason_of(error, 160)}); start them "
            "with torchrun, and see that MASTER_ADDR can be reached"
        ) from error
    return store


@contextmanager
def held(out: Path) -> Iterator[Path]:
    """Yield the hidden folder beside `out`, on storage that all ranks see; rank 0 holds its
    lock."""
    with lock_output(out) if ranks().is_first else nullcontext(work_folder(out)) as folder:
        ranks().barrier()  # the lock is held now
        yield folder
        ranks().barrier()
