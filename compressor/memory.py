"""Resident memory of this process, sampled: anonymous pages apart from mapped file pages."""

import ctypes
import os
import resource
import threading
from pathlib import Path
from types import TracebackType
from typing import Self

STATUS = Path("/proc/self/status")
INTERVAL = 0.02  # seconds between samples


def resident() -> tuple[int, int]:
    """(anonymous, file-backed) resident bytes; where the system does not tell, (the peak so far, 0)."""
    try:
        lines = dict(line.split(":", 1) for line in STATUS.read_text().splitlines() if line.startswith("Rss"))
        return tuple(int(lines[key].split()[0]) * 1024 for key in ("RssAnon", "RssFile"))  # type: ignore[return-value]
    except (OSError, KeyError, ValueError):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, 0


class PeakMemory:
    """Samples resident memory in a thread while the block runs; `anonymous` is the peak, `mapped` file pages' peak."""

    def __init__(self) -> None:
        self.start = resident()[0]
        self.anonymous, self.mapped = resident()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        while not self._stop.wait(INTERVAL):
            anonymous, mapped = resident()
            self.anonymous, self.mapped = max(self.anonymous, anonymous), max(self.mapped, mapped)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        anonymous, mapped = resident()
        self.anonymous, self.mapped = max(self.anonymous, anonymous), max(self.mapped, mapped)


M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8  # glibc's mallopt parameters
KEPT_BYTES = 2**20  # freed blocks above this go back to the system at once
CACHED_KERNELS = "32"  # oneDNN compiles and keeps a kernel for every number of tokens that an expert gets


def give_memory_back() -> None:
    """Make freed memory leave the process: for a program's start, before torch computes anything.

    Without it glibc keeps freed activations and oneDNN hundreds of compiled kernels, which together outweigh a layer.
    """
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(name, CACHED_KERNELS)
    try:
        libc = ctypes.CDLL("libc.so.6")
    except OSError:
        return
    for parameter, value in ((M_MMAP_THRESHOLD, KEPT_BYTES), (M_TRIM_THRESHOLD, KEPT_BYTES), (M_ARENA_MAX, 2)):
        libc.mallopt(parameter, value)
