"""The same command again: an output that is in place and is the one asked for is no fault.

What was asked for is kept in the user's cache before an output is put in place, so that a command which is stopped
at any moment after that finds it when it is repeated. Where nothing can be kept, the output merely exists already.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from compressor.checkpoint.reader import Checkpoint
from compressor.errors import CompressionError
from compressor.run_record import cache_folder, digest_of, read_cached, write_cached


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


def _path(folder: Path, key: str) -> Path:
    return cache_folder("requests") / f"{digest_of(folder)}-{key}.json"


def _weights(folder: Path) -> list[list[Any]]:
    """Name, size and time of change of each weight file, which a rename keeps; none where they cannot be read."""
    try:
        return [list(entry) for entry in Checkpoint(folder).stamp()]
    except (CompressionError, OSError):
        return []
