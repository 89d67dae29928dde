"""What reports measured, in the user's cache: by all that it depends on, and for a card the last of each output."""


import hashlib
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from compressor.checkpoint.reader import Checkpoint
from compressor.errors import CompressionError
from compressor.report.data import Measured
from compressor.run_record import cache_folder, digest_of, read_cached, write_cached

logger = logging.getLogger(__name__)


def keep(key: Mapping[str, Any], measured: Measured) -> None:
    """Remember what was measured under a key that names everything it depends on."""
    write_cached(_path(key), {"key": key, "measured": measured.to_dict()})


def kept(key: Mapping[str, Any]) -> Measured | None:
    """What an earlier report measured of the same; None if there is none, or none that can be read."""
    return _read(_path(key), "key", json.loads(json.dumps(key)))


def keep_measures(folder: Path, measured: Measured) -> None:
    """Remember what was measured of an output as it is now; where that cannot be written, nothing is kept."""
    key = digest_of(folder)
    if key is not None and measured.layers:
        write_cached(_latest(key), {"weights": _stamp(folder), "measured": measured.to_dict()})


def kept_measures(folder: Path) -> Measured | None:
    """What was measured last, unless the weights have changed since; None if nothing was."""
    key = digest_of(folder)
    return None if key is None else _read(_latest(key), "weights", _stamp(folder))


def _read(path: Path, field: str, wanted: Any) -> Measured | None:
    """The measures in a file whose `field` is as it should be; None without such a file."""
    content = read_cached(path)
    try:
        return Measured.from_dict(content["measured"]) if content is not None and content[field] == wanted else None
    except (KeyError, CompressionError) as error:
        logger.debug("the measures in %s are ignored: %s", path, error)
        return None


def _path(key: Mapping[str, Any]) -> Path:
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return cache_folder("reports") / f"{digest}.json"


def _latest(key: str) -> Path:
    return cache_folder("reports") / f"latest-{key}.json"


def _stamp(folder: Path) -> list[list[Any]]:
    """Name, size and time of change of each weight file; none of a folder with a graph alone."""
    try:
        return [list(entry) for entry in Checkpoint(folder).stamp()]
    except (CompressionError, OSError):
        return []
