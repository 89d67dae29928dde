"""An output that several ranks make: the first one holds its hidden folder, the others work in it."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from compressor.distributed.present import here
from compressor.locking import alone, work_folder


@contextmanager
def held(out: Path) -> Iterator[Path]:
    """The hidden folder beside `out`, which lies on storage that all ranks see, held by the first of them."""
    if here().is_first:
        with alone(out) as folder:
            here().told(lambda: None)
            yield folder
            here().wait()
        return
    here().told(lambda: None)  # it is held now
    yield work_folder(out)
    here().wait()
