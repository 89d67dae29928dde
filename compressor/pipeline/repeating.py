"""The same command again: an output that is in place and is the one asked for is no fault.

What was asked for is kept in the user's cache before an output is put in place, so that a command which is stopped
at any moment after that finds it when it is repeated. Where nothing can be kept, the output merely exists already.
"""

import hashlib
import json
import logging
from pathlib import Path
from typing import Any

from compressor.replaceable import WEIGHTS
from compressor.run_record import cache_folder, digest_of, read_cached, write_cached

logger = logging.getLogger(__name__)


def request_key(*facts: Any) -> str:
    """SHA-256 of all that decides an output and whether it is accepted."""
    return hashlib.sha256(json.dumps(facts, default=str).encode()).hexdigest()


def note_request(folder: Path, key: str) -> None:
    """Keep that the finished `folder`, which is about to be renamed into place, is what `key` asks for."""
    write_cached(_path(folder, key), {"weights": _weights(folder)})


def answers(out: Path, key: str) -> bool:
    """Whether `out` was made for this request, on this machine, and its weights have not been touched since."""
    if out.is_symlink() or not out.is_dir() or (kept := read_cached(_path(out, key))) is None:
        return False
    return bool(kept.get("weights")) and kept["weights"] == _weights(out)


def tell_in_place(out: Path) -> None:
    """Say that there is nothing to do."""
    logger.warning("%s is in place already and is what this command asks for, so nothing was written", out)


def stamp(folder: Path) -> list[list[Any]]:
    """Path, size and time of change of each file, which a rename keeps; none where they cannot be read."""
    try:
        found = [(path, path.stat()) for path in sorted(folder.rglob("*")) if path.is_file()]
    except OSError:
        return []
    return [[path.relative_to(folder).as_posix(), entry.st_size, entry.st_mtime_ns] for path, entry in found]


def _path(folder: Path, key: str) -> Path:
    return cache_folder("requests") / f"{digest_of(folder)}-{key}.json"


def _weights(folder: Path) -> list[list[Any]]:
    """The stamp of the weight files, which alone must be as they were; of all files where none is known as weights."""
    entries = stamp(folder)
    return [entry for entry in entries if WEIGHTS.fullmatch(entry[0])] or entries
