"""Files and folders that are there complete or not at all, and where the tool keeps its own."""

import ctypes
import errno
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from compressor.errors import CompressionError
from compressor.locking import REPLACED, alone
from compressor.replaceable import json_object

AT_CWD, EXCHANGE = -100, 2  # of renameat2
FULL = (errno.ENOSPC, errno.EDQUOT)
REPORTED = ("rows", "senders")  # the fields that tell comparison.json and attribution.json; others name their format


@contextmanager
def full_disk_told(place: Path) -> Iterator[None]:
    """Turn a disk that is full, or a quota that is used up, into a sentence with the folder and the remedy."""
    try:
        yield
    except CompressionError:
        raise
    except Exception as error:  # safetensors has an exception of its own
        if getattr(error, "errno", None) not in FULL and "No space left" not in str(error):
            raise
        place = Path(os.path.abspath(place))
        raise CompressionError(f"the disk of {place} is full; free some space and run the command again") from error


@contextmanager
def replacing(path: Path, fresh: Path) -> Iterator[Path]:
    """Where to write a file: what lies at `fresh` at the end becomes `path`, or nothing when anything fails."""
    with full_disk_told(path.parent):
        try:
            if fresh.is_symlink():
                fresh.unlink()  # someone's link would be written through
            yield fresh
            fresh.replace(path)
        except BaseException:
            fresh.unlink(missing_ok=True)
            raise


def write_whole(path: Path, text: str, mode: int = 0o600, errors: str = "strict") -> None:
    """Write a file in a folder that exists, replacing what is there only once the new one is complete."""
    with full_disk_told(path.parent):
        handle, fresh = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    with replacing(path, Path(fresh)), os.fdopen(handle, "w", encoding="utf-8", errors=errors) as stream:
        stream.write(text)
        os.chmod(fresh, mode)


def replace_folder(made: Path, target: Path, old: Path) -> None:
    """Rename a finished folder into place; what it replaces then lies at `old`, and comes back when that fails.

    Where the file system can, both change places in one step, so that `target` is there at every moment.
    """
    if target.exists():
        made.replace(old)
        if _exchanged(old, target):
            return
        old.replace(made)
        target.replace(old)
    try:
        made.replace(target)
    except BaseException:
        if old.exists():
            old.replace(target)
        raise


def _exchanged(one: Path, two: Path) -> bool:
    """Let two folders change places; whether the system can do that."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    return rename is not None and rename(AT_CWD, os.fsencode(one), AT_CWD, os.fsencode(two), EXCHANGE) == 0


def check_folder(folder: Path, names: Sequence[str], overwrite: bool = False) -> None:
    """Refuse a folder for reports that cannot be made, or exists and is not to be replaced by files of these names.

    The first name tells a folder that may be replaced: of reports of the same sort, and nothing else.
    """
    parent = Path(os.path.abspath(folder)).parent
    if not parent.is_dir():
        raise CompressionError(f"{parent} is not a folder; create it or name another folder for the reports")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise CompressionError(
            f"{parent} cannot be written to; change its permissions or name another folder for the reports"
        )
    if not (folder.exists() or folder.is_symlink()):
        return
    if not overwrite:
        raise CompressionError(f"{folder} exists already; name a new folder for the reports or pass --overwrite")
    if folder.is_symlink() or not _is_report(folder / names[0]):
        raise CompressionError(
            f"{folder} holds no {names[0]}, so --overwrite will not replace it; name a new folder for the reports"
        )
    if others := sorted(path.name for path in folder.iterdir() if path.name not in names or not path.is_file()):
        raise CompressionError(
            f"{folder} holds {others[0]} beside {names[0]}, so --overwrite will not replace it; move that or name "
            "a new folder for the reports"
        )


def _is_report(path: Path) -> bool:
    """Whether a file is a report of this tool: JSON with its fields, or a picture."""
    if path.suffix != ".json":
        return path.is_file() and path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    content = json_object(path)
    return str(content.get("format", "")).startswith("moe-compressor-") or any(name in content for name in REPORTED)


@contextmanager
def whole_folder(folder: Path, names: Sequence[str], overwrite: bool = False) -> Iterator[Path]:
    """Where to write the reports: what lies there at the end becomes `folder`, or nothing when anything fails.

    With `overwrite` earlier reports are replaced once the new ones are complete, and stay when anything fails.
    """
    check_folder(folder, names, overwrite)
    target = Path(os.path.abspath(folder))
    with full_disk_told(target.parent), alone(folder) as work:
        made, old = work / "reports", work / REPLACED
        try:
            for leftover in (made, old):  # of a run that was killed
                shutil.rmtree(leftover, ignore_errors=True)
            made.mkdir()
            yield made
            check_folder(folder, names, overwrite)  # drawing takes a while, and a rename would replace an empty folder
            replace_folder(made, target, old)
        finally:
            for leftover in (made, old):
                shutil.rmtree(leftover, ignore_errors=True)


def default_folder() -> Path:
    """Where results are kept: $MOE_COMPRESSOR_CACHE, or the user's cache folder."""
    if own := os.environ.get("MOE_COMPRESSOR_CACHE"):
        return Path(own).expanduser()
    caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(caches).expanduser() / "moe-compressor" / "gate"


def file_digest(path: Path) -> str:
    """SHA-256 of a file of any size."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
