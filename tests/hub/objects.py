"""What git and Git LFS call a file: object ids, pointers, and which files are stored as large ones."""

import codecs
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

LARGE_PATTERNS = (
    *("*.safetensors", "*.bin", "*.onnx", "*.data", "*.png"),
    *("*.pt", "*.pth", "*.gguf", "*.npy", "*.npz", "*.h5", "*.msgpack", "*.zip", "*.parquet"),
)
LARGE_SIZE = 10 * 1024 * 1024
SAMPLE_SIZE = 512
ATTRIBUTES = "".join(f"{pattern} filter=lfs diff=lfs merge=lfs -text\n" for pattern in LARGE_PATTERNS).encode()


@dataclass(frozen=True, slots=True)
class Entry:
    """A file of a commit: the sha256 of its content, its size, its git id, and whether it is a large one."""

    sha256: str
    size: int
    git_id: str
    large: bool

    @property
    def identity(self) -> str:
        """What a client compares its own file with: sha256 of a large file, git's blob id of another."""
        return self.sha256 if self.large else self.git_id


def sha256(content: bytes) -> str:
    """The name of a content, in hexadecimal."""
    return hashlib.sha256(content).hexdigest()


def blob_id(content: bytes) -> str:
    """The id that git gives to a file."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def pointer(oid: str, size: int) -> bytes:
    """The small file that git keeps in place of a large one."""
    return f"version https://git-lfs.github.com/spec/v1\noid sha256:{oid}\nsize {size}\n".encode()


def entry_of(content: bytes, large: bool) -> Entry:
    """The entry of a file whose content is at hand."""
    name = sha256(content)
    stored = pointer(name, len(content)) if large else content
    return Entry(name, len(content), blob_id(stored), large)


def is_binary(sample: bytes) -> bool:
    """Whether the first bytes of a file are no text: a NUL, or not UTF-8 (a last character may be cut)."""
    try:
        codecs.getincrementaldecoder("utf-8")().decode(sample, final=False)
    except UnicodeDecodeError:
        return True
    return b"\0" in sample


def is_large(path: str, size: int, sample: bytes) -> bool:
    """Whether a file goes to large storage: by name, by size or as a binary; never an empty one."""
    if size == 0:
        return False
    named = any(fnmatchcase(path.rpartition("/")[2], pattern) for pattern in LARGE_PATTERNS)
    return named or size > LARGE_SIZE or is_binary(sample)


def is_ignored(path: str, rules: str) -> bool:
    """Whether a .gitignore keeps a path out: the last rule that matches it, or a folder above it, decides.

    Stars do not stop at a slash here, and there is no ** of its own.
    """
    parts = path.split("/")
    above = ["/".join(parts[:depth]) for depth in range(1, len(parts) + 1)]
    ignored = False
    for line in map(str.rstrip, rules.splitlines()):
        pattern = line.removeprefix("!").rstrip("/")
        if not pattern or line.startswith("#"):
            continue
        places = above[:-1] if line.endswith("/") else above
        whole = "/" in pattern
        if any(fnmatchcase(place if whole else place.rpartition("/")[2], pattern.lstrip("/")) for place in places):
            ignored = not line.startswith("!")
    return ignored


def folders(entries: Mapping[str, Entry]) -> frozenset[str]:
    """Every folder that holds one of the files, at any depth."""
    parts = [path.split("/")[:-1] for path in entries]
    return frozenset("/".join(part[:depth]) for part in parts for depth in range(1, len(part) + 1))


def tree_id(entries: Mapping[str, Entry], folder: str = "") -> str:
    """An id for a folder's content, equal exactly if the files below it are."""
    inside = sorted((path, entry.git_id) for path, entry in entries.items() if path.startswith(f"{folder}/"))
    return hashlib.sha1(repr(inside if folder else sorted(entries.items())).encode()).hexdigest()
