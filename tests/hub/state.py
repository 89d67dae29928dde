"""The repositories of the Hub on loopback: commits, branches, tags, pull requests and what is stored."""

import hashlib
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from threading import RLock

from tests.hub.answers import RefusedError
from tests.hub.faults import Fault
from tests.hub.objects import SAMPLE_SIZE, Entry, entry_of, is_large

EPOCH = datetime(2026, 1, 1, tzinfo=UTC)


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
class Commit:
    """A commit: `files` is the whole tree after it, path to sha256 of the content."""

    oid: str
    title: str
    message: str
    parents: tuple[str, ...]
    entries: Mapping[str, Entry]
    date: datetime

    @property
    def files(self) -> dict[str, str]:
        return {path: entry.sha256 for path, entry in self.entries.items()}


@dataclass(frozen=True, slots=True)
class PullRequest:
    """A pull request (or, without `commit`, a discussion): `commit` is the head of refs/pr/N."""

    number: int
    title: str
    description: str
    base: str
    commit: str | None
    date: datetime
    status: str = "open"

    @property
    def reference(self) -> str:
        return f"refs/pr/{self.number}"


@dataclass(slots=True)
class Repository:
    """A git repository with large storage; change it through its methods, read its mappings freely."""

    name: str
    kind: str
    private: bool = False
    branches: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    discussions: dict[int, PullRequest] = field(default_factory=dict)
    stored: dict[str, bytes] = field(default_factory=dict)  # contents of commits and large objects, by sha256
    large: set[str] = field(default_factory=set)  # the large objects among them
    history: dict[str, Commit] = field(default_factory=dict)

    @property
    def pull_requests(self) -> dict[int, PullRequest]:
        return {number: item for number, item in self.discussions.items() if item.commit is not None}

    @property
    def size(self) -> int:
        """Bytes that count towards the quota."""
        return sum(map(len, self.stored.values()))

    def commit_at(self, revision: str = "main") -> Commit:
        """The commit that a branch, tag, refs/pr/N or full id names."""
        pulls = {item.reference: item.commit for item in self.discussions.values() if item.commit is not None}
        heads = {f"refs/heads/{name}": oid for name, oid in self.branches.items()}
        oid = {**self.tags, **pulls, **heads, **self.branches}.get(revision, revision)
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
        date = EPOCH + timedelta(seconds=len(self.history))
        text = repr((self.kind, self.name, title, message, parents, sorted(entries.items()), len(self.history)))
        commit = Commit(hashlib.sha1(text.encode()).hexdigest(), title, message, parents, dict(entries), date)
        self.history[commit.oid] = commit
        return commit

    def move(self, revision: str, oid: str) -> None:
        """Let a branch or a pull request name another commit."""
        for number, item in self.discussions.items():
            if item.reference == revision:
                self.discussions[number] = replace(item, commit=oid)
                return
        self.branches[revision] = oid

    def open(self, title: str, description: str, commit: str | None, base: str = "main") -> PullRequest:
        """Open a pull request at a commit, or a discussion."""
        number, date = len(self.discussions) + 1, EPOCH + timedelta(seconds=len(self.history))
        self.discussions[number] = PullRequest(number, title, description, base, commit, date)
        return self.discussions[number]

    def store(self, content: bytes, large: bool) -> Entry:
        """Keep a content."""
        entry = entry_of(content, large)
        self.stored[entry.sha256] = content
        if large:
            self.large.add(entry.sha256)
        return entry


@dataclass(slots=True)
class Grant:
    """Leave to send one large object to a signed address, whole or in parts."""

    repository: Repository
    oid: str
    size: int
    part_size: int | None
    parts: dict[int, bytes] = field(default_factory=dict)


@dataclass(slots=True)
class Hub:
    """A running Hub; `uploaded` lists the large objects whose bytes arrived whole, as (sha256, size)."""

    url: str
    quota: int | None = None
    tokens: Mapping[str, str] | None = field(default=None, repr=False)
    part_size: int | None = None
    requests: list[Request] = field(default_factory=list)
    repositories: dict[str, Repository] = field(default_factory=dict)  # a data set is "datasets/org/name"
    uploaded: list[tuple[str, int]] = field(default_factory=list)
    grants: dict[str, Grant] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    lock: RLock = field(default_factory=RLock)

    @property
    def uploaded_bytes(self) -> int:
        """Bytes of the large objects that were sent."""
        return sum(size for _, size in self.uploaded)

    def create(
        self, name: str, files: Mapping[str, bytes] | None = None, private: bool = False, kind: str = "model"
    ) -> Repository:
        """Make a repository with one commit of exactly these files."""
        with self.lock:
            repository = Repository(name, kind, private)
            entries = {
                path: repository.store(content, is_large(path, len(content), content[:SAMPLE_SIZE]))
                for path, content in (files or {}).items()
            }
            repository.branches["main"] = repository.commit("initial commit", "", (), entries).oid
            self.repositories[name if kind == "model" else f"{kind}s/{name}"] = repository
            return repository

    def fail(self, fault: Fault) -> None:
        """Let the next requests that match the fault meet it; several faults are met in the order given."""
        with self.lock:
            self.faults.append(fault)

    def fault_for(self, method: str, path: str) -> Fault | None:
        """The fault that a request meets, which is then used up once."""
        with self.lock:
            for position, fault in enumerate(self.faults):
                if fault.matches(method, path):
                    rest = [replace(fault, times=fault.times - 1)] if fault.times > 1 else []
                    self.faults[position : position + 1] = rest
                    return fault
            return None

    def grant(self, repository: Repository, oid: str, size: int, part_size: int | None) -> str:
        """Leave to send an object: the signature that the address must carry."""
        signature = secrets.token_hex(8)
        self.grants[signature] = Grant(repository, oid, size, part_size)
        return signature

    def demand(self, size: int) -> None:
        """Refuse what would take the storage beyond the quota."""
        used = sum(repository.size for repository in self.repositories.values())
        if self.quota is not None and used + size > self.quota:
            raise RefusedError(
                403,
                "Private repository storage limit reached, please upgrade your plan to increase your private storage"
                " limit: https://hf.co/settings/billing",
            )
