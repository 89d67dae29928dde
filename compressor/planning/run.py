"""What one run owns: the opened model, the place it works in, the clock, and who is told how far it is."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.utils.deterministic

from compressor.checkpoint.source import ModelSource, locate
from compressor.distributed.present import here
from compressor.memory import PeakMemory
from compressor.model.opened import OpenModel, open_model
from compressor.progress import Progress, Silent
from compressor.surgery.cutting import CutFiles


@dataclass(slots=True)
class Clock:
    """Seconds per named phase."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the seconds that the block takes."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begin


@dataclass(slots=True)
class Run:
    """One run; `folder` keeps what a killed one has done for the next, None where nothing is written."""

    model: OpenModel
    progress: Progress
    clock: Clock
    peak: PeakMemory
    folder: Path | None = None
    digest: str = ""  # of what decides the output, so that another request does not take over what lies there

    @property
    def cut(self) -> CutFiles | None:
        """Where corrected layers wait to be written."""
        return None if self.folder is None else CutFiles(self.folder / f"cut-{self.digest[:16]}")


def find_model(model: str, revision: str | None = None, progress: Progress | None = None) -> ModelSource:
    """Where a model lies; of several ranks the first one downloads it."""
    return here().first_before_others(lambda: locate(model, revision, progress))


@contextmanager
def repeatable(wanted: bool) -> Iterator[None]:
    """Keep to deterministic operations while the block runs, if that is `wanted`; warn where torch has none."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    memory: Any = torch.utils.deterministic
    filled = memory.fill_uninitialized_memory
    if wanted:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without which CUDA's products may differ
        torch.use_deterministic_algorithms(True, warn_only=True)
        memory.fill_uninitialized_memory = False  # nothing is read that was not written
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        memory.fill_uninitialized_memory = filled


@contextmanager
def open_run(
    model: str,
    revision: str | None = None,
    dtype: str = "auto",
    device: str = "auto",
    progress: Progress | None = None,
    deterministic: bool = False,
) -> Iterator[Run]:
    """Find or download a model and open it lazily; memory is watched until the block ends.

    A deterministic run keeps to operations that give the same bits each time.
    """
    clock = Clock()
    with PeakMemory() as peak, repeatable(deterministic):
        with clock.phase("open"):
            opened = open_model(find_model(model, revision, progress), dtype, device)
        yield Run(opened, progress or Silent(), clock, peak)
