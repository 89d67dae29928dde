"""One run at a time makes an output: it holds a hidden folder beside it, until it ends or is killed."""

import os
import shutil
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from compressor.errors import CompressionError

LOCK = "lock"
REPLACED = "replaced"  # where an older output lies between the two renames that put a new one in its place
_held: set[tuple[Path, int]] = set()  # by this process, with the thread


def work_folder(out: Path) -> Path:
    """The hidden sibling in which `out` is made."""
    place = Path(os.path.abspath(out))  # `out` may be "." or ".."; a link is not followed
    return place.parent / f".{place.name}.moe-compressor"


def refuse_linked_folder(folder: Path) -> None:
    """Refuse a folder to work in that is a link, or holds one: what is written there would land elsewhere."""
    inside = (os.path.join(place, name) for place, *names in os.walk(folder) for name in (*names[0], *names[1]))
    for path in (str(folder), *(() if folder.is_symlink() else inside)):
        if os.path.islink(path):
            raise CompressionError(f"{path} is a link, and nothing is written through one; remove it and run again")


def check_parent(out: Path) -> None:
    """Refuse an output beside which nothing can be written."""
    parent = Path(os.path.abspath(out)).parent
    if not parent.is_dir():
        raise CompressionError(f"{parent} is not a folder; create it or name another output folder")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise CompressionError(f"{parent} cannot be written to; change its permissions or name another output folder")


@contextmanager
def alone(out: Path) -> Iterator[Path]:
    """The hidden folder beside `out`, held by this run alone, which may ask for it again while it does.

    What lies in it in the end is left to the next run with this output. An older output that a killed run had moved
    away comes back. Raises `CompressionError` while another run holds it; a kill lets go of it. On a file system
    without locks nothing is refused.
    """
    folder = work_folder(out)
    if (mine := (folder, threading.get_ident())) in _held:
        yield folder
        return
    lock = _locked(folder, out)
    _held.add(mine)
    try:
        if (folder / REPLACED).exists() and not os.path.lexists(out):
            (folder / REPLACED).replace(out)
        yield folder
    finally:
        _held.discard(mine)
        with suppress(OSError):
            if os.listdir(folder) == [LOCK]:
                (folder / LOCK).unlink()
                folder.rmdir()
        lock.release()


def _locked(folder: Path, out: Path) -> FileLock:
    """The held lock of the folder, which is made if it is not there; not held on a file system without locks."""
    check_parent(out)
    lock = FileLock(folder / LOCK, timeout=0, fallback_to_soft=False)
    while not lock.is_locked:
        refuse_linked_folder(folder)
        folder.mkdir(exist_ok=True)
        try:
            lock.acquire()
        except Timeout as error:
            if (folder / LOCK).exists():  # otherwise the run that held it has just ended, and removed it
                raise CompressionError(f"another run is writing {out}; wait for it or stop it") from error
        except FileNotFoundError:
            continue  # the folder, too
        except OSError as error:
            if isinstance(error, PermissionError) or not (folder / LOCK).exists():
                raise
            break
    return lock


def clear(folder: Path, keep: Collection[str] = (LOCK,)) -> None:
    """Remove all that lies in a folder but what has one of the names to `keep`."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.name in keep:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
