"""The repositories of the Hub on loopback: commits, branches, tags, pull requests, contents; and faults to come."""

import codecs
import hashlib
import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from threading import RLock
from typing import Any
from urllib.parse import unquote

LARGE_PATTERNS = ("*.safetensors", "*.bin", "*.onnx", "*.data", "*.png", "*.gguf", "*.npz", "*.zip")
LARGE_SIZE = 10 * 1024 * 1024
SAMPLE_SIZE = 512
ATTRIBUTES = "".join(f"{pattern} filter=lfs diff=lfs merge=lfs -text\n" for pattern in LARGE_PATTERNS).encode()
QUOTA = "Private repository storage limit reached, please upgrade your plan: https://hf.co/settings/billing"


class RefusedError(Exception):
    """An answer that is an error, with the Hub's X-Error-Code if there is one."""

    def __init__(self, status: int, message: str, code: str = "", **extra: Any) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.extra = status, message, code, extra


@dataclass(frozen=True, slots=True)
class Fault:
    """What the next `times` requests that match meet instead of, or before, the right answer.

    `path` is a regular expression searched in the path without its query. With `status` the request is answered that,
    with `headers` and `body`; with `half` the right answer stops in the middle of its body, quietly or by `reset`; with
    `reset` alone the connection is cut by a TCP reset once `after_bytes` of the body were read (all of it when None).
    """

    method: str
    path: str
    status: int | None = None
    times: int = 1
    after_bytes: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    reset: bool = False
    half: bool = False


@dataclass(frozen=True, slots=True)
class Request:
    """A request that was answered (`status` None: cut off); `path` and `query` are as sent, still quoted."""

    method: str
    path: str
    query: str
    headers: Mapping[str, str] = field(repr=False)  # a token is kept here and nowhere else
    size: int
    sent: int
    status: int | None


@dataclass(frozen=True, slots=True)
class Entry:
    """A file of a commit: the sha256 of its content, its size, git's id of it, and whether it is a large one."""

    sha256: str
    size: int
    git_id: str
    large: bool

    @classmethod
    def of(cls, content: bytes, large: bool) -> "Entry":
        """That of a content; git keeps a pointer in place of a large one."""
        name = hashlib.sha256(content).hexdigest()
        pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{name}\nsize {len(content)}\n"
        stored = pointer.encode() if large else content
        return cls(name, len(content), hashlib.sha1(b"blob %d\0" % len(stored) + stored).hexdigest(), large)


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a folder by its path in it."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def is_large(path: str, size: int, sample: bytes) -> bool:
    """Whether a file goes to large storage: by name, by size or as a binary; never an empty one."""
    try:  # a last character may be cut
        codecs.getincrementaldecoder("utf-8")().decode(sample, final=False)
        is_binary = b"\0" in sample
    except UnicodeDecodeError:
        is_binary = True
    named = any(fnmatchcase(path.rpartition("/")[2], pattern) for pattern in LARGE_PATTERNS)
    return size > 0 and (named or size > LARGE_SIZE or is_binary)


@dataclass(frozen=True, slots=True)
class Commit:
    """A commit with the whole tree after it."""

    oid: str
    title: str
    message: str
    parents: tuple[str, ...]
    entries: Mapping[str, Entry]


@dataclass(frozen=True, slots=True)
class PullRequest:
    """A pull request: `commit` is the head of refs/pr/N."""

    number: int
    title: str
    commit: str


@dataclass(slots=True)
class Repository:
    """A git repository with large storage; change it through its methods, read its mappings freely."""

    name: str
    private: bool = False
    branches: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    pull_requests: dict[int, PullRequest] = field(default_factory=dict)
    stored: dict[str, bytes] = field(default_factory=dict)  # contents of commits and large objects, by sha256
    large: set[str] = field(default_factory=set)  # the large objects among them
    history: dict[str, Commit] = field(default_factory=dict)

    def commit_at(self, revision: str = "main") -> Commit:
        """The commit that a branch, tag, refs/pr/N or full id names."""
        pulls = {f"refs/pr/{number}": item.commit for number, item in self.pull_requests.items()}
        oid = {**self.tags, **pulls, **self.branches}.get(revision, revision)
        if oid not in self.history:
            raise RefusedError(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return self.history[oid]

    def files(self, revision: str = "main") -> dict[str, bytes]:
        """Every file of a revision with its content."""
        return {path: self.stored[entry.sha256] for path, entry in self.commit_at(revision).entries.items()}

    def commits(self, revision: str = "main") -> list[Commit]:
        """The commits that led to a revision, the newest first."""
        found = [self.commit_at(revision)]
        while found[-1].parents:
            found.append(self.history[found[-1].parents[0]])
        return found

    def commit(self, title: str, message: str, parents: tuple[str, ...], entries: Mapping[str, Entry]) -> Commit:
        """Add a commit that no reference names yet."""
        text = repr((self.name, title, message, parents, sorted(entries.items()), len(self.history)))
        commit = Commit(hashlib.sha1(text.encode()).hexdigest(), title, message, parents, dict(entries))
        self.history[commit.oid] = commit
        return commit

    def add(self, files: Mapping[str, bytes]) -> str:
        """Add a commit of exactly these files that no reference names yet."""
        entries = {
            path: self.store(content, is_large(path, len(content), content[:SAMPLE_SIZE]))
            for path, content in files.items()
        }
        return self.commit("initial commit", "", (), entries).oid

    def store(self, content: bytes, large: bool) -> Entry:
        """Keep a content."""
        entry = Entry.of(content, large)
        self.stored[entry.sha256] = content
        if large:
            self.large.add(entry.sha256)
        return entry


@dataclass(slots=True)
class Hub:
    """A running Hub; `uploaded` lists the large objects whose bytes arrived whole, as (sha256, size)."""

    url: str
    quota: int | None = None  # bytes stored in all
    tokens: Mapping[str, str] | None = field(default=None, repr=False)  # "read" or "write" by token; None: all may
    requests: list[Request] = field(default_factory=list)
    repositories: dict[str, Repository] = field(default_factory=dict)
    uploaded: list[tuple[str, int]] = field(default_factory=list)
    grants: dict[str, tuple[Repository, str, int]] = field(default_factory=dict)  # by signature: object and its size
    faults: list[Fault] = field(default_factory=list)
    meanwhile: Callable[[str], object] = lambda path: None  # called with a request's path before it is answered
    lock: RLock = field(default_factory=RLock)

    def create(self, name: str, files: Mapping[str, bytes] | None = None, private: bool = False) -> Repository:
        """Make a repository with one commit of exactly these files."""
        with self.lock:
            repository = self.repositories[name] = Repository(name, private)
            repository.branches["main"] = repository.add(files or {})
            return repository

    def serve(self, name: str, folder: Path) -> Repository:
        """Make a repository of a folder's files."""
        return self.create(name, contents(folder))

    def fetched(self) -> list[str]:
        """The files whose bytes were sent, in order; several times if they were asked for again."""
        found = (unquote(request.path).partition("/resolve/")[2] for request in self.requests if request.sent)
        return [path.partition("/")[2] for path in found if path]

    def fail(self, fault: Fault) -> None:
        """Let the next requests that match the fault meet it; several faults are met in the order given."""
        with self.lock:
            self.faults.append(fault)

    def fault_for(self, method: str, path: str) -> Fault | None:
        """The fault that a request meets, which is then used up once."""
        with self.lock:
            for place, fault in enumerate(self.faults):
                if method == fault.method and re.search(fault.path, path):
                    rest = [replace(fault, times=fault.times - 1)] if fault.times > 1 else []
                    self.faults[place : place + 1] = rest
                    return fault
            return None

    def grant(self, repository: Repository, oid: str, size: int) -> str:
        """Leave to send an object: the signature that the address must carry."""
        signature = secrets.token_hex(8)
        self.grants[signature] = repository, oid, size
        return signature

    def demand(self, size: int) -> None:
        """Refuse what would take the storage beyond the quota."""
        used = sum(len(content) for each in self.repositories.values() for content in each.stored.values())
        if self.quota is not None and used + size > self.quota:
            raise RefusedError(403, QUOTA)
