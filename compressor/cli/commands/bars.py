"""Progress bars while a command works."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def progress_bars(quiet: bool) -> Iterator[Any]:
    """Bars on stderr, unless only JSON is wanted."""
    from compressor.cli.rendering import Bars
    from compressor.progress import Silent

    if quiet:
        yield Silent()
    else:
        with Bars() as bars:
            yield bars
