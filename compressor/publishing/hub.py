"""A repository on the Hub as it is now, how it differs from what is pushed, and the one commit that brings it there.

What goes wrong between here and the Hub becomes one sentence with its remedy and without any token.
"""

import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import sha1
from pathlib import Path
from typing import Any, Literal, ParamSpec, TypeVar

from compressor.errors import CompressionError, reason_of
from compressor.run_record import versions

P = ParamSpec("P")
R = TypeVar("R")
Content = Path | bytes  # of one file: where it lies, or what it holds
State = Literal["new", "changed", "unchanged", "unknown"]

DEFAULT_BRANCH = "main"
AGAIN = "then run the same command again, which goes on where it stopped"
ROOM = re.compile(r"quota|storage|upgrade", re.IGNORECASE)  # how a refusal for want of room reads
MOST = 160  # letters of what the Hub itself says
REMEDIES = {  # by status: what it means, and what helps
    401: ("the Hub does not accept the login", "log in with `hf auth login` and a token that may write"),
    403: ("you may not write there", "ask its owner for write permission, or log in with a token that has it"),
    404: ("it is not there or not visible to you", "check the name and who is logged in (`hf auth whoami`)"),
    409: ("the Hub is busy with another change of it", "wait for that to end"),
    412: ("somebody else has committed to it meanwhile", "look at their commit"),
    413: ("the Hub takes no commit of this size", "make the shards smaller"),
    429: ("the Hub takes no more requests for now", "wait some minutes"),
}
NO_ROOM = ("there is no room left on the Hub", "free some storage there or choose a larger plan")
OWN_TROUBLE = ("the Hub has trouble of its own", "wait a while")
REFUSED = ("the Hub refuses it", "mend what it names")
BROKEN = ("the connection to the Hub broke", "check the network")
OTHER = ("pushing failed", "mend what it names")


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


def asked(repo_id: str, function: Callable[P, R], /, *args: P.args, **named: P.kwargs) -> R:
    """What the Hub's client answers; its exceptions become a `CompressionError` that does not refer to them.

    A server may echo a token in what it says, and a chained traceback would show it.
    """
    try:
        return function(*args, **named)
    except CompressionError:
        raise
    except Exception as error:
        fault = hub_fault(repo_id, error)
    raise fault


def hub_fault(repo_id: str, error: BaseException) -> CompressionError:
    """The sentence for an exception of the Hub's client."""
    status, said = status_of(error), _reason(error)
    if status == 403 and ROOM.search(said):
        what, remedy = NO_ROOM
    elif status is not None:
        what, remedy = REMEDIES.get(status, OWN_TROUBLE if status >= 500 else REFUSED)
    elif _connection(error):
        what, remedy = BROKEN
    else:
        what, remedy = REFUSED if isinstance(error, ValueError) else OTHER
    shown = f"{status}: {said}" if status is not None else said
    return CompressionError(f"{repo_id}: {what} ({shown}); {remedy}, {AGAIN}")


def status_of(error: BaseException) -> int | None:
    """The status that the Hub answered; None where it did not come to an answer."""
    for each in _chain(error):
        status = getattr(getattr(each, "response", None), "status_code", None)
        if isinstance(status, int):
            return status
    return None


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An exception and what it was raised from: the client wraps the faults of an upload."""
    found: BaseException | None = error
    while found is not None:
        yield found
        found = found.__cause__ or found.__context__


def _reason(error: BaseException) -> str:
    """What the Hub says, else what the exception that carries its answer does, else the innermost one."""
    chain = list(_chain(error))
    for each in chain:
        if said := getattr(each, "server_message", None):
            return reason_of(Exception(said), MOST)
    answered = [each for each in chain if getattr(each, "response", None) is not None]
    return reason_of((answered or chain[-1:])[0], MOST)


def _connection(error: BaseException) -> bool:
    """Whether it is a fault of the network rather than an answer."""
    kinds = {kind.__name__ for each in _chain(error) for kind in type(each).__mro__}
    return bool(kinds & {"TransportError", "ConnectionError", "TimeoutError"})


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
    files = [entry for entry in entries if hasattr(entry, "blob_id")]  # no folders
    large = {entry.path: entry.lfs.sha256 for entry in files if entry.lfs is not None}
    return {e.path: RemoteFile(e.size, large.get(e.path, e.blob_id), e.path in large) for e in files}


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
    if remote.large:
        digest = addition.upload_info.sha256.hex()
    else:  # what git calls it
        content = addition.path_or_fileobj
        data = content if isinstance(content, bytes) else Path(content).read_bytes()
        digest = sha1(b"blob %d\0" % len(data) + data).hexdigest()
    return "unchanged" if digest == remote.digest else "changed"


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

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a card's metadata, in the server's words
        return asked(
            repo_id, api.create_commit, repo_id, list(changes), commit_message=message, revision=branch,
            create_pr=create_pr, parent_commit=head,
        )  # fmt: skip


def check_arrived(api: Any, repo_id: str, commit: str, files: Mapping[str, Any]) -> None:
    """Whether the commit holds every file as it is here: a .gitignore there can keep one out without a word."""
    try:
        there = list_files(api, repo_id, commit)
    except Exception:  # the commit is made; that it cannot be listed yet is no fault of it
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
