"""Files that are there complete or not at all."""

import os
import tempfile
from pathlib import Path


def write_whole(path: Path, text: str, mode: int = 0o600, errors: str = "strict") -> None:
    """Write a file in a folder that exists, replacing what is there only once the new one is complete."""
    handle, fresh = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8", errors=errors) as stream:
            stream.write(text)
        os.chmod(fresh, mode)
        os.replace(fresh, path)
    except BaseException:
        os.unlink(fresh)
        raise
