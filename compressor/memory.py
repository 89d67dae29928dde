"""Memory: what this process holds, sampled without the pages of mapped files, and what it may still
take."""

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
MACHINE = Path("/proc/meminfo")
GROUP = Path("/proc/self/cgroup")
GROUPS = Path("/sys/fs/cgroup")  # of version 2, where a container sees its own as the root
INTERVAL = 0.02  # seconds between samples


def resident() -> int:
    """Anonymous resident bytes; where the system does not report them, the peak of all so far."""
    nbytes = _field(STATUS, "RssAnon")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 if nbytes is None else nbytes


def _field(file: Path, field: str) -> int | None:
    with suppress(OSError):
        match = re.search(rf"^{field}:\s*(\d+) kB", file.read_text(), re.MULTILINE)
        if match:
            return int(match[1]) * 1024
    return None


def available() -> int | None:
    """Return the bytes that this process may still take: the least that machine, cgroup and limits
    leave.

    None: not known.
    """
    remaining = list[int]()
    with suppress(OSError):
        match = re.search(r"^0::/(.*)$", GROUP.read_text(), re.MULTILINE)
        group = GROUPS / match[1] if match else GROUPS.parent
        # what each control group (version 2) around this process leaves
        for folder in (group, *group.parents):
            if folder == GROUPS.parent:
                break
            with suppress(OSError, ValueError):  # the root has no limit, and `max` is none
                most = int((folder / "memory.max").read_text())
                held = int((folder / "memory.current").read_text())
                statistics = (folder / "memory.stat").read_text()
                # the page cache, which it can drop
                cached = re.search(r"^inactive_file (\d+)$", statistics, re.MULTILINE)
                remaining.append(most - held + (int(cached[1]) if cached else 0))
    machine = _field(MACHINE, "MemAvailable")
    if machine is not None:
        remaining.append(machine)
    for limit, field in ((resource.RLIMIT_AS, "VmSize"), (resource.RLIMIT_DATA, "VmData")):
        most = resource.getrlimit(limit)[0]
        taken = _field(STATUS, field)
        if taken is not None and most != resource.RLIM_INFINITY:
            remaining.append(most - taken)
    return max(0, min(remaining)) if remaining else None


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

    def __exit__(self, *message: object) -> None:
        self._stop.set()
        self._thread.join()
        self.anonymous = max(self.anonymous, resident())


# oneDNN compiles and keeps a kernel for every number of tokens that an expert gets
CACHED_KERNELS = "32"
# glibc's names for them
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
M_MMAP_MAX = -4
M_ARENA_MAX = -8
# bytes: smaller blocks come from the heap, larger ones each time from the system, in fresh pages
HEAP = 2**25

_bounded = list[bool]()  # not empty once a program has bounded its heap


@cache
def _libc() -> Any:
    try:
        library = ctypes.CDLL("libc.so.6")
    except OSError:
        return None
    return library if hasattr(library, "malloc_trim") else None


def limit_caches() -> None:
    """Bound what stays behind of computing: for a program's start, before torch computes anything.

    Otherwise oneDNN keeps up to a thousand compiled kernels, and every loading thread its own heap.
    What is computed with in small pieces stays in the heap: fresh pages for each would take longer
    than the computation."""
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(name, CACHED_KERNELS)
    if _libc() is not None:
        for parameter, value in (
            (M_ARENA_MAX, 2),
            (M_MMAP_THRESHOLD, HEAP),
            (M_TRIM_THRESHOLD, 2 * HEAP),
        ):
            _libc().mallopt(parameter, value)
        _bounded.append(True)


def keep_freed() -> None:
    """Have large blocks come from the heap, too, in a program that has bounded it: for a model that
    memory holds whole anyway.

    Fresh pages for each of them take up to a third of a pass's time."""
    if _bounded:
        _libc().mallopt(M_MMAP_MAX, 0)
        _libc().mallopt(M_TRIM_THRESHOLD, 8 * HEAP)


def give_back() -> None:
    """Return freed memory to the system: what a finished layer leaves in the heap would outweigh
    the next one."""
    if _libc() is not None:
        _libc().malloc_trim(0)
