"""A folder of reports that appears complete or not at all, and Markdown that shows text as it is written."""

import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from compressor.errors import CompressionError

SPECIAL = re.compile(r"[\\|*`<\[\]]")  # what Markdown would not show as it is written


def plain(text: str) -> str:
    """Text on one line, for Markdown and its tables."""
    return SPECIAL.sub(r"\\\g<0>", " ".join(text.split()))


def table_line(cells: Sequence[str]) -> str:
    """One row of a Markdown table."""
    return f"| {' | '.join(cells)} |"


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
    if folder.is_symlink() or not (folder / names[0]).is_file():
        raise CompressionError(
            f"{folder} holds no {names[0]}, so --overwrite will not replace it; name a new folder for the reports"
        )
    if others := sorted({path.name for path in folder.iterdir()} - set(names)):
        raise CompressionError(
            f"{folder} holds {others[0]} beside {names[0]}, so --overwrite will not replace it; move that or name "
            "a new folder for the reports"
        )


@contextmanager
def whole_folder(folder: Path, names: Sequence[str], overwrite: bool = False) -> Iterator[Path]:
    """Where to write the reports: what lies there at the end becomes `folder`, or nothing when anything fails.

    With `overwrite` earlier reports are replaced once the new ones are complete, and stay when anything fails.
    """
    check_folder(folder, names, overwrite)
    target = Path(os.path.abspath(folder))
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as scratch:
        made, old = Path(scratch) / "reports", Path(scratch) / "old"  # the scratch folder is private to its owner
        made.mkdir()
        yield made
        check_folder(folder, names, overwrite)  # drawing takes a while, and a rename would replace an empty folder
        if target.exists():
            target.rename(old)
        try:
            made.rename(target)
        except BaseException:
            if old.exists():
                old.rename(target)
            raise
