"""A repository on the Hub as it is now, how it differs from what is pushed, and the one commit that brings it there."""

import warnings
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha1
from pathlib import Path
from typing import Any, Literal

from compressor.errors import CompressionError
from compressor.publishing.faults import asked, status_of
from compressor.publishing.files import Content
from compressor.run_record import versions

State = Literal["new", "changed", "unchanged", "unknown"]
DEFAULT_BRANCH = "main"


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file on the Hub: what tells its content from another's."""

    nbytes: int
    digest: str  # SHA-256 of a large file, git's blob id of another
    large: bool


@dataclass(frozen=True, slots=True)
class Remote:
    """A repository before anything is sent to it."""

    exists: bool
    private: bool | None = None  # None where the Hub does not say
    branches: Mapping[str, str] = field(default_factory=dict)  # to their commits
    tags: Mapping[str, str] = field(default_factory=dict)


def open_api() -> Any:
    """The Hub's client, with its own token."""
    from huggingface_hub import HfApi

    name = "moe-compressor"
    return HfApi(library_name=name, library_version=versions((name,)).get(name))


def look_up(api: Any, repo_id: str) -> Remote:
    """The repository as far as it is visible; one that is not is told from a missing one by nobody."""
    try:
        info = api.repo_info(repo_id)
    except Exception as error:
        if status_of(error) not in (401, 404):
            raise
        return Remote(exists=False)
    refs = api.list_repo_refs(repo_id)
    return Remote(
        exists=True,
        private=info.private,
        branches={ref.name: ref.target_commit for ref in refs.branches},
        tags={ref.name: ref.target_commit for ref in refs.tags},
    )


def list_files(api: Any, repo_id: str, commit: str | None) -> dict[str, RemoteFile]:
    """Every file of a commit by its path; none without a commit, or where the Hub shows none."""
    if commit is None:
        return {}
    try:
        entries = list(api.list_repo_tree(repo_id, recursive=True, revision=commit))
    except Exception as error:
        if status_of(error) != 404:
            raise
        entries = []
    found = {}
    for entry in entries:
        if hasattr(entry, "blob_id"):  # no folder
            large = entry.lfs is not None
            found[entry.path] = RemoteFile(entry.size, entry.lfs.sha256 if large else entry.blob_id, large)
    return found


def additions(files: Mapping[str, Content]) -> dict[str, Any]:
    """The client's objects for files to be pushed, which remember what they hash."""
    from huggingface_hub import CommitOperationAdd

    return {name: CommitOperationAdd(name, content) for name, content in files.items()}


def state_of(addition: Any, remote: RemoteFile | None) -> State:
    """How a file compares with the one on the Hub; it is read only where both have the same size."""
    if remote is None:
        return "new"
    if remote.nbytes != addition.upload_info.size:
        return "changed"
    digest = addition.upload_info.sha256.hex() if remote.large else _blob_id(addition.path_or_fileobj)
    return "unchanged" if digest == remote.digest else "changed"


def _blob_id(content: str | bytes) -> str:
    """What git calls a file."""
    data = content if isinstance(content, bytes) else Path(content).read_bytes()
    return sha1(b"blob %d\0" % len(data) + data).hexdigest()


def refuse_public(repo_id: str, remote: Remote, private: bool) -> None:
    """Never publish by mistake what was meant to be private."""
    if private and remote.exists and remote.private is False:
        raise CompressionError(
            f"{repo_id} exists on the Hub and is public, so nothing was pushed; make it private in its settings, or "
            "name another repository"
        )


def refuse_tag(repo_id: str, remote: Remote, tag: str | None, commit: str | None) -> None:
    """Refuse a tag that exists, unless on the commit that already holds all that is pushed."""
    if tag is not None and tag in remote.tags and remote.tags[tag] != commit:
        raise CompressionError(
            f"{repo_id} has a tag {tag!r} already, on the commit {remote.tags[tag][:12]}, so nothing was pushed; name "
            "another tag, or delete that one on the Hub"
        )


def open_repository(api: Any, repo_id: str, remote: Remote, private: bool) -> Remote:
    """Make the repository unless it is there."""
    if remote.exists:
        return remote
    asked(repo_id, api.create_repo, repo_id, private=private, exist_ok=True)
    fresh: Remote = asked(repo_id, look_up, api, repo_id)
    if not fresh.exists:
        raise CompressionError(f"{repo_id} was made on the Hub but cannot be seen there; check who is logged in")
    refuse_public(repo_id, fresh, private)
    return fresh


def commit(
    api: Any, repo_id: str, changes: Iterable[Any], message: str, branch: str, head: str | None, create_pr: bool
) -> Any:
    """One commit of all changes, which the branch or a new pull request shows at once or not at all.

    `upload_folder` would do it in several commits, so that a branch could show half a model. Large files are stored
    first and the commit comes last; when it is run again, the client does not send what is stored already.
    """

    def send() -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a card's metadata, in the server's words
            return api.create_commit(
                repo_id,
                list(changes),
                commit_message=message,
                revision=branch,
                create_pr=create_pr,
                parent_commit=head,
            )

    return asked(repo_id, send)


def check_arrived(api: Any, repo_id: str, commit: str, files: Mapping[str, Any]) -> None:
    """Whether the commit holds every file as it is here: a .gitignore there can keep one out without a word."""
    there: Mapping[str, RemoteFile] | None = None
    with suppress(Exception):  # the commit is made; that it cannot be listed yet is no fault of it
        there = list_files(api, repo_id, commit)
    if there is None:
        return
    for name, addition in files.items():
        if state_of(addition, there.get(name)) != "unchanged":
            raise CompressionError(
                f"{name} of the commit {commit[:12]} of {repo_id} is not the one that was pushed; look for a "
                ".gitignore there that keeps it out, and for other runs that change the folder here"
            )


def deletions(names: Iterable[str]) -> list[Any]:
    """The client's objects for files that the commit removes."""
    from huggingface_hub import CommitOperationDelete

    return [CommitOperationDelete(name) for name in names]
