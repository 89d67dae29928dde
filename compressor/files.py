"""Files that are there complete or not at all."""

import hashlib
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


def default_folder() -> Path:
    """Where results are kept: $MOE_COMPRESSOR_CACHE, or the user's cache folder."""
    if own := os.environ.get("MOE_COMPRESSOR_CACHE"):
        return Path(own).expanduser()
    caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(caches).expanduser() / "moe-compressor" / "gate"


def file_digest(path: Path) -> str:
    """SHA-256 of a file of any size."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
