"""A repository on the Hub as it is now, how it differs from what is pushed, and the one commit that
brings it there.

What goes wrong between here and the Hub becomes one sentence with its remedy and without any token.
"""

import re
from collections.abc import Callable, Container, Mapping
from dataclasses import field
from pathlib import Path
from typing import Any, Literal

from compressor.errors import CompressionError, reason_of
from compressor.frozen import frozen
from compressor.run_record import versions

Content = Path | bytes  # of one file: where it lies, or what it holds
State = Literal["new", "changed", "unchanged", "unknown"]

DEFAULT_BRANCH = "main"
AGAIN = "then run the same command again, which goes on where it stopped"
ROOM = re.compile(r"quota|storage|upgrade", re.IGNORECASE)  # how a refusal for want of room reads
MOST = 160  # letters of what the Hub itself says
REMEDIES = {  # by status: what it means, and what helps
    401: (
        "the Hub does not accept the login",
        "log in with `hf auth login` and a token that may write",
    ),
    403: (
        "you may not write there",
        "ask its owner for write permission, or log in with a token that has it",
    ),
    404: (
        "it is not there or not visible to you",
        "check the name and who is logged in (`hf auth whoami`)",
    ),
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


@frozen
class Remote:
    """A repository before anything is sent to it."""

    exists: bool
    private: bool | None = None  # None where the Hub does not say
    branches: Mapping[str, str] = field(default_factory=dict)  # to their commits
    tags: Mapping[str, str] = field(default_factory=dict)


class Repository:
    """A model repository on the Hub; all that goes wrong between here and there is a
    `CompressionError`."""

    def __init__(self, repo_id: str) -> None:
        """Open it by the Hub's client, with the client's own token."""
        from huggingface_hub import HfApi

        name = "moe-compressor"
        self.repo_id = repo_id
        self.api = HfApi(library_name=name, library_version=versions((name,))[name])

    def ask(self, question: Callable[[], Any], passed: Container[int | None] = ()) -> Any:
        """Return the answer of the Hub's client, None at a status in `passed`; errors do not refer
        to the client's.

        A server may echo a token in what it says, and a chained traceback would show it.
        """
        try:
            return question()
        except Exception as error:
            fault = hub_error(self.repo_id, error, passed)
        if fault is None:
            return None
        raise fault

    def look_up(self) -> Remote:
        """Return the repository as far as it is visible; an invisible one looks like a missing
        one."""
        info = self.ask(lambda: self.api.repo_info(self.repo_id), passed=(401, 404))
        if info is None:
            return Remote(exists=False)
        refs = self.ask(lambda: self.api.list_repo_refs(self.repo_id))
        branches = {ref.name: ref.target_commit for ref in refs.branches}
        tags = {ref.name: ref.target_commit for ref in refs.tags}
        return Remote(True, info.private, branches, tags)

    def files(self, commit: str | None) -> dict[str, Any]:
        """Return the client's entry for every file of a commit by its path; none without a commit,
        or a visible one."""
        if commit is None:
            return {}
        tree = self.ask(
            lambda: list(self.api.list_repo_tree(self.repo_id, recursive=True, revision=commit)),
            passed=(404,),
        )
        # no folders
        return {entry.path: entry for entry in tree or () if hasattr(entry, "blob_id")}

    def refuse_public(self, remote: Remote, private: bool) -> None:
        """Refuse a public repository where a private one is meant."""
        if private and remote.exists and remote.private is False:
            raise CompressionError(
                f"{self.repo_id} exists on the Hub and is public, so nothing was pushed; make it "
                "private in its settings, or name another repository"
            )


# classes of faults that are no answer of the Hub
NETWORK = {"TransportError", "ConnectionError", "TimeoutError"}


def state_of(addition: Any, entry: Any) -> State:
    """Compare a file with the Hub's entry for it; it is read only where both have the same size."""
    from huggingface_hub.utils.sha import git_hash

    if entry is None:
        return "new"
    if entry.size != addition.upload_info.size:
        return "changed"
    if entry.lfs is not None:
        same = addition.upload_info.sha256.hex() == entry.lfs.sha256
    else:
        with addition.as_file() as stream:
            same = git_hash(stream.read()) == entry.blob_id
    return "unchanged" if same else "changed"


def hub_error(repo_id: str, error: Any, passed: Container[int | None]) -> CompressionError | None:
    """Return an exception of the Hub's client in a sentence, with its remedy; None at a status in
    `passed`, which is None if there was no answer."""
    # the client wraps the faults of an upload
    chain = [error]
    while chain[-1].__cause__ or chain[-1].__context__:
        chain.append(chain[-1].__cause__ or chain[-1].__context__)
    answered = [each for each in chain if getattr(each, "response", None) is not None]
    status = answered[0].response.status_code if answered else None
    if status in passed:
        return None
    # the Hub's own message, that of the exception with its answer, or that of the innermost one
    messages = [getattr(each, "server_message", None) for each in chain]
    said = [Exception(message) for message in messages if message]
    reason = reason_of([*said, *answered, chain[-1]][0], MOST)
    if status == 403 and ROOM.search(reason):
        what, remedy = NO_ROOM
    elif status is not None:
        what, remedy = REMEDIES.get(status, OWN_TROUBLE if status >= 500 else REFUSED)
    else:
        what, remedy = REFUSED if isinstance(error, ValueError) else OTHER
        for each in chain:
            if NETWORK & {kind.__name__ for kind in type(each).__mro__}:
                what, remedy = BROKEN
    shown = f"{status}: {reason}" if status is not None else reason
    return CompressionError(f"{repo_id}: {what} ({shown}); {remedy}, {AGAIN}")
