"""Resident memory of this process, sampled: anonymous pages alone, for those of mapped files can be read again."""

import ctypes
import os
import re
import resource
import threading
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, Self

STATUS = Path("/proc/self/status")
INTERVAL = 0.02  # seconds between samples


def resident() -> int:
    """Anonymous resident bytes; where the system does not tell, the peak of all so far."""
    with suppress(OSError):
        if found := re.search(r"^RssAnon:\s*(\d+) kB", STATUS.read_text(), re.MULTILINE):
            return int(found[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class PeakMemory:
    """Samples resident memory in a thread while the block runs; `anonymous` is the peak."""

    def __init__(self) -> None:
        self.start = self.anonymous = resident()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        while not self._stop.wait(INTERVAL):
            self.anonymous = max(self.anonymous, resident())

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *fault: object) -> None:
        self._stop.set()
        self._thread.join()
        self.anonymous = max(self.anonymous, resident())


CACHED_KERNELS = "32"  # oneDNN compiles and keeps a kernel for every number of tokens that an expert gets
M_ARENA_MAX = -8  # glibc's name for it


@cache
def _libc() -> Any:
    """The C library, or None where it is not glibc."""
    try:
        library = ctypes.CDLL("libc.so.6")
    except OSError:
        return None
    return library if hasattr(library, "malloc_trim") else None


def limit_caches() -> None:
    """Bound what stays behind of computing: for a program's start, before torch computes anything.

    Otherwise oneDNN keeps up to a thousand compiled kernels, and every loading thread its own heap.
    """
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(name, CACHED_KERNELS)
    if _libc() is not None:
        _libc().mallopt(M_ARENA_MAX, 2)


def give_back() -> None:
    """Return freed memory to the system: what a finished layer leaves in the heap would outweigh the next one."""
    if _libc() is not None:
        _libc().malloc_trim(0)
