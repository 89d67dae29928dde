"""Progress of long jobs, silent by default, and the time of their phases; transformers,
silenced."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol


class Progress(Protocol):
    """A listener: `start` opens a phase of `total` steps, which may lie within another, `advance`
    finishes a step."""

    def start(self, phase: str, total: int) -> None: ...

    def advance(self, detail: str) -> None: ...


class Silent:
    """A listener that ignores everything."""

    def start(self, phase: str, total: int) -> None: ...

    def advance(self, detail: str) -> None: ...


SILENT = Silent()


@dataclass
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


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence transformers' own progress bars and warnings while its loader works on one part at a
    time."""
    from transformers.utils import logging as transformers_logging

    enabled = transformers_logging.is_progress_bar_enabled()
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.disable_progress_bar()
    # each change empties the caches of all loggers
    if verbosity != transformers_logging.ERROR:
        transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        if verbosity != transformers_logging.ERROR:
            transformers_logging.set_verbosity(verbosity)
        if enabled:
            transformers_logging.enable_progress_bar()
