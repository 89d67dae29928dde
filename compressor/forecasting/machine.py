"""How fast this machine is, measured in about a second: products of given shapes, updates, reading and writing.

Every shape is measured for itself, for a product of few rows waits for memory and one of many computes.
"""

import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

SPAN = 0.04  # seconds that a measurement takes at the least
LARGEST = 5e8  # floating-point operations of a product that is measured; a larger one is taken to go on at its rate
WEIGHTS = 2**26  # bytes of right factors to go through, so that they come from memory as a layer's do
READ, WRITTEN = 2**27, 2**25  # bytes read and written to measure the disk


@dataclass(frozen=True, slots=True)
class Product:
    """A matrix product [rows, inner] x [inner, columns], done so many times; rows may be a mean of whole numbers."""

    rows: float
    inner: int
    columns: int
    times: float = 1.0
    dtype: torch.dtype = torch.float32

    @property
    def flops(self) -> float:
        """Floating-point operations of all of them, a multiplication and an addition counting two."""
        return 2.0 * self.rows * self.inner * self.columns * self.times


@dataclass(slots=True)
class Machine:
    """A device and the disks, measured when first asked and remembered by shape."""

    device: torch.device
    _seconds: dict[tuple[object, ...], float] = field(default_factory=dict)

    def seconds(self, product: Product) -> float:
        """Seconds that the product takes, all times of it."""
        most = max(1.0, LARGEST / (2.0 * product.inner * product.columns))
        rows = max(1, round(min(product.rows, most)))
        key = (rows, product.inner, product.columns, product.dtype)
        if key not in self._seconds:
            self._seconds[key] = self._of_product(rows, product.inner, product.columns, product.dtype)
        return self._seconds[key] * max(product.rows / rows, 1.0 if product.rows < 1 else 0.0) * product.times

    def update_seconds(self, rows: int, columns: int) -> float:
        """Seconds of one step of Adafactor on a float32 matrix of this shape."""
        key = ("update", rows, columns)
        if key not in self._seconds:
            matrix = torch.zeros(rows, columns, device=self.device, requires_grad=True)
            matrix.grad = torch.ones_like(matrix)
            self._seconds[key] = self._timed(torch.optim.Adafactor([matrix], lr=0.01).step)
        return self._seconds[key]

    def _of_product(self, rows: int, inner: int, columns: int, dtype: torch.dtype) -> float:
        left = torch.ones(rows, inner, dtype=dtype, device=self.device)
        size = inner * columns * dtype.itemsize
        rights = [
            torch.ones(columns, inner, dtype=dtype, device=self.device) for _ in range(max(1, min(8, WEIGHTS // size)))
        ]
        turn = iter(range(10**9))
        return self._timed(lambda: torch.nn.functional.linear(left, rights[next(turn) % len(rights)]))

    @torch.no_grad()
    def _timed(self, work: Callable[[], object]) -> float:
        """Mean seconds of a call, warmed up; what a GPU still has to do is waited for."""
        work()
        self._wait()
        begin, calls = time.perf_counter(), 0
        while time.perf_counter() - begin < SPAN:
            work()
            calls += 1
            if self.device.type != "cpu" and calls >= 8:
                break
        self._wait()
        return (time.perf_counter() - begin) / calls

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def reading_rate(self, file: Path) -> float:
        """Bytes a second that come of a file, around its middle; from the system's cache, if they lie there."""
        size = file.stat().st_size
        begin = time.perf_counter()
        with file.open("rb", buffering=0) as stream:
            stream.seek(max(0, size // 2 - READ // 2))
            read = 0
            while read < READ and (part := stream.read(2**22)):
                read += len(part)
        return max(read, 1) / (time.perf_counter() - begin)

    def writing_rate(self, folder: Path) -> float:
        """Bytes a second that reach the disk of a folder."""
        part = bytes(2**22)
        with tempfile.TemporaryFile(dir=folder) as stream:
            begin = time.perf_counter()
            for _ in range(WRITTEN // len(part)):
                stream.write(part)
            stream.flush()
            os.fsync(stream.fileno())
            return WRITTEN / (time.perf_counter() - begin)


class Slowest(Machine):
    """A machine that nobody has, and that need not be measured: what is short on it is short on any."""

    def seconds(self, product: Product) -> float:
        """Two billion operations a second."""
        return product.flops / 2e9

    def update_seconds(self, rows: int, columns: int) -> float:
        """A hundred million elements a second."""
        return rows * columns / 1e8

    def reading_rate(self, file: Path) -> float:
        """A hundred megabytes a second."""
        return 1e8

    def writing_rate(self, folder: Path) -> float:
        """A hundred megabytes a second."""
        return 1e8
