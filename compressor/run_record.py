"""Facts of a run that its output does not record: folders, times, memory and the command, in the
user's cache.

compression.json holds none of them, so that equal runs write equal bytes. The record is found again
by the SHA-256 of that file; only its owner can read it, and without it a report merely says less of
the run.

The request is kept before an output is put in place: a command that is stopped at any moment after
that finds it when it is repeated, and does nothing."""

import hashlib
import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from compressor.errors import CompressionError, without_tokens
from compressor.files import WEIGHTS, default_folder, file_digest, json_object, write_whole
from compressor.frozen import frozen
from compressor.records import Json, plain_json, read_as

logger = logging.getLogger(__name__)

COMPRESSION = "compression.json"
# which decide the bytes of an output
PACKAGES = ("moe-compressor", "torch", "transformers", "safetensors")


@frozen
class RunRecord:
    """One run of compress or apply."""

    source: str  # the folder's absolute path, or the Hub id
    revision: str | None  # the commit of a Hub id
    calibration: Json | None = None  # the plan's, with absolute folders
    seconds: Mapping[str, float] = field(default_factory=dict)  # by phase
    peak_memory: int = 0  # bytes of anonymous memory at the highest
    command: tuple[str, ...] | None = None  # None: not through the command line
    finished: str = ""  # UTC, ISO 8601; set when the record is written
    # of multi-token-prediction heads, by experts module
    acceptance: Json = field(default_factory=dict)
    base: str | None = None  # that was named, as `source`; None without one
    speed: Json = field(default_factory=dict)  # of inference, if a report measured it


def versions(packages: Sequence[str] = PACKAGES) -> dict[str, str]:
    """Return the version of each package, or that it is not installed."""
    by_package = {}
    for package in packages:
        try:
            by_package[package] = version(package)
        except PackageNotFoundError:
            by_package[package] = "not installed"
    return by_package


def cache_folder(name: str) -> Path:
    """Return a folder of the user's cache: in $MOE_COMPRESSOR_CACHE, or beside the stored
    evaluations."""
    own = os.environ.get("MOE_COMPRESSOR_CACHE")
    try:
        return (default_folder() if own else default_folder().parent) / name
    # the user has no home folder: a place where nothing can be written or found
    except RuntimeError:
        return Path(os.devnull) / name


def digest_of(folder: Path) -> str | None:
    """SHA-256 of an output's compression.json; None if there is none to read."""
    try:
        return file_digest(folder / COMPRESSION)
    except OSError:
        return None


def record_run(folder: Path, record: RunRecord) -> None:
    """Store the record of this run without access tokens; a read-only home is no error."""
    finished = record.finished or datetime.now(UTC).isoformat(timespec="seconds")
    key = digest_of(folder)
    if key is not None:
        content = without_tokens(json.dumps(plain_json(replace(record, finished=finished))))
        write_cached(cache_folder("runs") / f"{key}.json", json.loads(content))


def read_record(folder: Path) -> RunRecord | None:
    """Return the record of the run that made an output; None if this machine has none, or none that
    can be read."""
    key = digest_of(folder)
    content = None if key is None else read_cached(cache_folder("runs") / f"{key}.json")
    try:
        return None if content is None else read_as(RunRecord, content)
    except CompressionError as error:
        logger.debug("the record of %s is ignored: %s", folder, error)
        return None


def write_cached(path: Path, content: Json) -> Exception | None:
    """Write a private file of the cache atomically; return the error if that fails."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(content))
    except (OSError, ValueError, CompressionError) as error:
        logger.debug("%s could not be written: %s", path, error)
        return error
    return None


def read_cached(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in a file of the cache; None if there is none that can be read."""
    return json_object(path) or None


def request_key(*facts: Any) -> str:
    """SHA-256 of all that decides an output and whether it is accepted."""
    return hashlib.sha256(json.dumps(facts, default=str).encode()).hexdigest()


def record_request(folder: Path, key: str) -> None:
    """Record that the finished `folder`, which is about to be renamed into place, is what `key`
    requests."""
    path = cache_folder("requests") / f"{digest_of(folder)}-{key}.json"
    write_cached(path, {"weights": _weights(folder)})


def answers(out: Path, key: str) -> bool:
    """Return True if `out` was made for this request on this machine, and its weights have not been
    touched since."""
    if out.is_symlink() or not out.is_dir():
        return False
    path = cache_folder("requests") / f"{digest_of(out)}-{key}.json"
    weights = json_object(path).get("weights")
    return bool(weights) and weights == _weights(out)


def report_in_place(out: Path) -> None:
    logger.warning(
        "%s is in place already and is what this command asks for, so nothing was written", out
    )


def stamp(folder: Path) -> list[list[Any]]:
    """Return path, size and time of change of each file, which a rename keeps; nothing if they
    cannot be read.

    A file is treated like a folder that holds it alone.
    """
    try:
        paths = [folder] if folder.is_file() else sorted(folder.rglob("*"))
        files = [(path, path.stat()) for path in paths if path.is_file()]
    except OSError:
        return []
    return [
        [path.relative_to(folder).as_posix(), entry.st_size, entry.st_mtime_ns]
        for path, entry in files
    ]


def _weights(folder: Path) -> list[list[Any]]:
    """Return the stamp of the weight files, which alone must be unchanged.

    Of all files where none is known as weights.
    """
    entries = stamp(folder)
    return [entry for entry in entries if WEIGHTS.fullmatch(entry[0])] or entries
