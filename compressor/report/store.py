"""What was measured of an output, in the user's cache: by the run that made it, and by the last report."""

import logging
from pathlib import Path
from typing import Any, Literal

from compressor.checkpoint.reader import Checkpoint
from compressor.errors import CompressionError
from compressor.report.data import Measured
from compressor.run_record import cache_folder, digest_of, read_cached, write_cached

logger = logging.getLogger(__name__)

By = Literal["run", "report"]


def keep_measures(folder: Path, measured: Measured, by: By, key: str = "") -> None:
    """Remember what was measured of an output as it is now, under a `key` that names what else it depends on.

    Where that cannot be written, nothing is kept.
    """
    if measured.layers:
        write_cached(_path(folder, by), {**_facts(folder), "key": key, "measured": measured.to_dict()})


def kept_measures(folder: Path, by: By = "report", key: str | None = None) -> Measured | None:
    """What was measured last, unless the weights or the key, if one is given, are others; None if nothing was."""
    path, wanted = _path(folder, by), _facts(folder) | ({} if key is None else {"key": key})
    content = read_cached(path)
    try:
        fits = content is not None and all(content[name] == value for name, value in wanted.items())
        return Measured.from_dict(content["measured"]) if content is not None and fits else None
    except (KeyError, CompressionError) as error:
        logger.debug("the measures in %s are ignored: %s", path, error)
        return None


def _path(folder: Path, by: By) -> Path:
    return cache_folder("reports") / f"{by}-{digest_of(folder)}.json"


def _facts(folder: Path) -> dict[str, Any]:
    """Name, size and time of change of each weight file; none of a folder with a graph alone."""
    try:
        return {"weights": [list(entry) for entry in Checkpoint(folder).stamp()]}
    except (CompressionError, OSError):
        return {"weights": []}
