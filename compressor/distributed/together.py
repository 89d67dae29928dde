"""Beginning and ending a run of several ranks: all come together, and none outlives the fault of another for long."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from compressor.distributed.faults import AGAIN, LostRankError
from compressor.distributed.present import Ranks, enter, started
from compressor.errors import CompressionError, reason_of

ARRIVAL = timedelta(minutes=5)  # for all ranks to come together
PLANNING = timedelta(days=30)  # that others may wait for the first one: whether it lives, the watch tells


@contextmanager
def together() -> Iterator[Ranks]:
    """Work with the ranks that a launcher has started, until the block ends; alone where it has started none.

    Raises `CompressionError` where not all come, and in one rank of each machine when another has failed; the other
    ranks then leave with exit status 2 and without a word.
    """
    ranks = started()
    if ranks.is_alone:
        yield ranks
        return
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # broken connections are told by us
    from compressor.distributed import exchange

    watch = _meet(ranks)
    leave = enter(ranks)
    exchange.heard.append(watch.heard)
    try:
        yield ranks
        ranks.wait()
        watch.stop()
    except BaseException as error:
        if getattr(error, "exit_code", None) == 0 or (isinstance(error, SystemExit) and not error.code):
            raise
        watch.leaving = True
        mendable = isinstance(error, CompressionError)
        sentence = str(error) if mendable else f"rank {ranks.rank}: {reason_of(error)}"
        if isinstance(error, LostRankError):
            sentence = str(error) if AGAIN in str(error) else f"{error}; {AGAIN}"
        fault = watch.tell(sentence, mendable)
        if fault["rank"] == ranks.rank:
            watch.linger()
        watch.stop()
        if not watch.speaks(fault):
            raise SystemExit(2) from error
        if fault["sentence"] != sentence or isinstance(error, LostRankError):
            raise CompressionError(fault["sentence"]) from error
        raise
    else:
        import torch.distributed as dist

        dist.destroy_process_group()
    finally:
        exchange.heard.remove(watch.heard)
        leave()


def _meet(ranks: Ranks) -> Any:
    """Wait for all ranks; returns the watch over them, which is on."""
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import PrefixStore, TCPStore
    from torch.distributed.rendezvous import rendezvous

    from compressor.distributed.watch import Watch

    try:
        store, _, _ = next(iter(rendezvous("env://", ranks.rank, ranks.size, timeout=ARRIVAL)))
        round_ = f"{os.environ.get('TORCHELASTIC_RUN_ID', '')}-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        own = PrefixStore(f"moe-compressor/{round_}", store)
        own.set(f"here/{ranks.rank}", "1")
        own.set(f"beat/{ranks.rank}", "0")
        own.wait([f"here/{rank}" for rank in range(ranks.size)], ARRIVAL)
        if torch.cuda.is_available():
            torch.cuda.set_device(ranks.local % torch.cuda.device_count())
        local = int(os.environ.get("LOCAL_WORLD_SIZE") or ranks.size)
        own_gpu = torch.cuda.is_available() and local <= torch.cuda.device_count()  # nccl wants one for each rank
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if own_gpu else "gloo",
            store=PrefixStore("group", own),
            rank=ranks.rank,
            world_size=ranks.size,
            timeout=PLANNING,
        )
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        line = TCPStore(address, port, is_master=False, wait_for_workers=False)
    except (RuntimeError, ValueError, KeyError) as error:
        raise CompressionError(
            f"the {ranks.size} ranks did not come together ({reason_of(error, 160)}); start them with torchrun, and "
            "see that MASTER_ADDR can be reached"
        ) from error
    watch = Watch(ranks, PrefixStore(f"moe-compressor/{round_}", line))
    watch.start()
    return watch
