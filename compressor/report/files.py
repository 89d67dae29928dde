"""A report's files: the page, and its figures as PNG; each appears complete or not at all."""

import os
from pathlib import Path

from compressor.errors import CompressionError
from compressor.files import check_folder, whole_folder, write_whole
from compressor.report.data import ReportData
from compressor.report.figures import NAMES, pictures, png
from compressor.report.page import page

FIGURES = tuple(f"{name}.png" for name in NAMES)


def check_report(page_file: Path, figures: Path | None, overwrite: bool) -> None:
    """Refuse places that cannot be written, or exist and are not to be replaced."""
    parent = Path(os.path.abspath(page_file)).parent
    if not (parent.is_dir() and os.access(parent, os.W_OK | os.X_OK)):
        raise CompressionError(f"{parent} is not a folder that can be written to; name another place for the report")
    if page_file.is_dir():
        raise CompressionError(f"{page_file} is a folder; name a file, such as report.html")
    if page_file.exists() and not overwrite:
        raise CompressionError(f"{page_file} exists already; name another file or pass --overwrite")
    if figures is not None:
        check_folder(figures, FIGURES, overwrite)


def write_report(data: ReportData, page_file: Path, figures: Path | None = None, overwrite: bool = False) -> list[Path]:
    """Write the page and, into a new folder, its figures; returns the figures' files."""
    drawn = pictures(data)
    text = page(data, drawn)
    check_report(page_file, figures, overwrite)  # measuring takes a while
    written = []
    if figures is not None:
        with whole_folder(figures, FIGURES, overwrite) as made:
            for picture in drawn:
                (made / f"{picture.name}.png").write_bytes(png(picture))
                written.append(figures / f"{picture.name}.png")
    write_whole(Path(os.path.abspath(page_file)), text, 0o644, "backslashreplace")
    return written
