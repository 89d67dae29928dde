"""Progress bars while a command works."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def progress_bars(quiet: bool) -> Iterator[Any]:
    """Bars on stderr, unless only JSON is wanted."""
    from compressor.progress import Silent
    from compressor.rendering import Bars

    if quiet:
        yield Silent()
    else:
        with Bars() as bars:
            yield bars
