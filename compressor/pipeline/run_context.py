"""A model opened for one run: memory is watched, and deterministic operations kept to where that is asked for."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils.deterministic

from compressor.checkpoint.source import ModelSource, locate
from compressor.distributed.ranks import here
from compressor.memory import PeakMemory
from compressor.model.opened import OpenModel, open_model
from compressor.progress import Clock, Progress, Silent


@dataclass(slots=True)
class Run:
    """One run on a model."""

    model: OpenModel
    progress: Progress
    clock: Clock
    peak: PeakMemory


def find_model(model: str, revision: str | None = None, progress: Progress | None = None) -> ModelSource:
    """Where a model lies; of several processes the first one downloads it."""
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
    """Find or download a model and open it lazily; memory is watched until the block ends."""
    clock = Clock()
    with PeakMemory() as peak, repeatable(deterministic):
        with clock.phase("open"):
            opened = open_model(find_model(model, revision, progress), dtype, device)
        yield Run(opened, progress or Silent(), clock, peak)
