"""Links among a checkpoint's files: none may lead out of it or to what is hidden, or that would pass for part of it."""

import os
from pathlib import Path

from compressor.errors import CompressionError
from compressor.replaceable import TEMPLATES


def refuse_links(folder: Path, inside: tuple[str, ...] = ("", TEMPLATES)) -> None:
    """Raise `CompressionError` naming the first visible file of the folder, or of these in it, that leads elsewhere.

    A link to another folder is none of the checkpoint's files and stays where it is.
    """
    for inner in inside:
        place = folder / inner
        refuse_link(place, folder)
        for path in sorted(place.iterdir()) if place.is_dir() else ():
            if path.is_symlink() and not path.name.startswith(".") and not os.path.isdir(path):
                refuse_link(path, folder)


def refuse_link(path: Path, folder: Path) -> None:
    """Raise `CompressionError` if a file in a folder is a link out of it, or to a hidden file.

    The Hub's cache keeps a model's files in `blobs` and fills `snapshots/COMMIT` with links to them.
    """
    root, target = Path(os.path.realpath(folder)), Path(os.path.realpath(path))  # which bear a ring of links
    blobs = root.parent.parent / "blobs"
    cached = root.parent.name == "snapshots" and not blobs.is_symlink() and target.is_relative_to(blobs)
    if cached:
        return
    inside = target.is_relative_to(root)
    if not inside or any(part.startswith(".") for part in target.relative_to(root).parts):
        raise CompressionError(
            f"{path} is a link to a {'hidden file' if inside else 'file outside the folder'}, which is neither read "
            "nor published; put a copy in its place (cp -rL copies a folder with what its links lead to)"
        )
