"""The process group of a run: all ranks join, and when one fails all end."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from compressor.distributed.ranks import LostRankError, Ranks, enter, here, launched
from compressor.errors import CompressionError, reason_of
from compressor.locking import alone, work_folder

JOINING = timedelta(minutes=5)  # for all ranks to join
PLANNING = timedelta(days=30)  # that ranks may wait for rank 0; torchrun ends those whose peers are gone
ALIKE = 50  # tenths of a second for rank 0 to fail as another rank did


@contextmanager
def process_group() -> Iterator[Ranks]:
    """Share the work of the block with the ranks that a launcher has started; do it alone if there are none.

    A failing rank raises its error, rank 0 alone if it fails as well. A rank that loses its connection to another one
    leaves with exit status 2; if no rank has failed with an error, but one was killed, rank 0 says so.
    """
    ranks = launched()
    if ranks.is_alone:
        yield ranks
        return
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # broken connections are reported here
    import torch.distributed as dist

    store = _joined(ranks)
    leave = enter(ranks)
    try:
        yield ranks
        ranks.barrier()
    except LostRankError as error:
        if ranks.is_first and not any(store.check([f"failed/{rank}"]) for rank in range(ranks.size)):
            raise CompressionError(
                "another rank was ended; run the same command again, with any number of ranks, to go on"
            ) from error
        raise SystemExit(2) from error
    except BaseException as error:
        if _first_fails_too(ranks, store):
            raise SystemExit(2) from error
        raise
    finally:
        leave()
        with suppress(RuntimeError):  # the group's threads must not outlive the interpreter
            dist.destroy_process_group()


def _joined(ranks: Ranks) -> Any:
    """Join the process group; returns the store that all ranks share."""
    import torch
    import torch.distributed as dist
    from torch.distributed.rendezvous import rendezvous

    try:
        store: Any = next(iter(rendezvous("env://", ranks.rank, ranks.size, timeout=JOINING)))[0]
        store.set(f"joined/{ranks.rank}", "1")
        store.wait([f"joined/{rank}" for rank in range(ranks.size)], JOINING)
        if torch.cuda.is_available():
            torch.cuda.set_device(ranks.local % torch.cuda.device_count())
        local = int(os.environ.get("LOCAL_WORLD_SIZE") or ranks.size)
        own_gpu = torch.cuda.is_available() and local <= torch.cuda.device_count()  # nccl wants one for each rank
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if own_gpu else "gloo",
            store=dist.distributed_c10d.PrefixStore("group", store),
            rank=ranks.rank,
            world_size=ranks.size,
            timeout=PLANNING,
        )
    except (RuntimeError, ValueError, KeyError) as error:
        raise CompressionError(
            f"the {ranks.size} ranks did not come together ({reason_of(error, 160)}); start them with torchrun, and "
            "see that MASTER_ADDR can be reached"
        ) from error
    return store


def _first_fails_too(ranks: Ranks, store: Any) -> bool:
    """Note that this rank fails; return True if rank 0 fails as well, and this one need not say why."""
    try:
        store.set(f"failed/{ranks.rank}", "1")
        for _ in range(0 if ranks.is_first else ALIKE):
            if store.check(["failed/0"]):
                return True
            time.sleep(0.1)
    except RuntimeError:  # the store has ended with rank 0
        return True
    return False


@contextmanager
def held(out: Path) -> Iterator[Path]:
    """Yield the hidden folder beside `out`, on storage that all ranks see; rank 0 holds its lock."""
    if here().is_first:
        with alone(out) as folder:
            here().barrier()
            yield folder
            here().barrier()
        return
    here().barrier()  # the lock is held now
    yield work_folder(out)
    here().barrier()
