"""The measures of the last report on an output, kept in the user's cache, where its model card finds them."""

import logging
import shlex
from pathlib import Path
from typing import Any

from compressor.checkpoint.reader import Checkpoint
from compressor.errors import CompressionError
from compressor.report.data import Measured, report_data
from compressor.report.figures import ERRORS, SIMILARITY, VISITS
from compressor.run_record import cache_folder, digest_of, read_cached, read_record, write_cached

logger = logging.getLogger(__name__)


def keep_measures(folder: Path, measured: Measured) -> None:
    """Remember what was measured of an output as it is now; where that cannot be written, nothing is kept."""
    key = digest_of(folder)
    if key is not None and measured.layers:
        write_cached(_path(key), {"weights": _stamp(folder), "measured": measured.to_dict()})


def kept_measures(folder: Path) -> Measured | None:
    """What was measured last, unless the weights have changed since; None if nothing was."""
    key = digest_of(folder)
    content = None if key is None else read_cached(_path(key))
    try:
        if content is None or content["weights"] != _stamp(folder):
            return None
        return Measured.from_dict(content["measured"])
    except (CompressionError, OSError, KeyError) as error:
        logger.debug("the measures of %s are ignored: %s", folder, error)
        return None


def for_card(folder: Path) -> dict[str, Any]:
    """What only this machine knows of an output, as arguments of `card_text`: command, local base, measured figures."""
    record = read_record(folder)
    base = Path(record.source) if record is not None and record.revision is None else None
    return {
        "command": shlex.join(record.command) if record is not None and record.command else None,
        "base": base if base is not None and base.is_dir() else None,
        "pictures": _figures(folder),
    }


def _figures(folder: Path) -> dict[str, tuple[bytes, str]]:
    """The measured figures of the last report: path in the repository -> PNG and alternative text."""
    from compressor.report.figures import pictures, png

    measured = kept_measures(folder)
    if measured is None:
        return {}
    drawn = pictures(report_data(folder, measured), (SIMILARITY, VISITS, ERRORS))
    return {f"images/{picture.name}.png": (png(picture), picture.alt) for picture in drawn}


def _path(key: str) -> Path:
    return cache_folder("reports") / f"latest-{key}.json"


def _stamp(folder: Path) -> list[list[Any]]:
    """Name, size and time of change of each weight file; none of a folder with a graph alone."""
    try:
        return [list(entry) for entry in Checkpoint(folder).stamp()]
    except CompressionError:
        return []
