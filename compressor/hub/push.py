"""Publishing on the Hugging Face Hub: a verified folder and its card, in one commit, and nothing
that is there already.

The folder itself is only read; the card is written into the commit.
"""

import logging
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from compressor.answers.scores import REPORT
from compressor.document.blocks import Block, Table, Text
from compressor.errors import CompressionError
from compressor.files import write_whole
from compressor.formatting import counted, human_bytes
from compressor.frozen import frozen
from compressor.hub import repository as hub
from compressor.hub.card import CARD, HUGGING_FACE, card_text, is_hub_id, known_here, suggested_name
from compressor.hub.check import (
    EVAL_RESULTS,
    VerifiedFolder,
    default_message,
    refuse_altered,
    require_pass,
    superseded,
    verify_folder,
)
from compressor.hub.secrets import kind_of_secret, refuse_secrets
from compressor.model.remote_code import json_bytes, naming_code, without_code
from compressor.pipeline.outcome import Outcome
from compressor.quality_gate.report import eval_results, gate_of, verdict_line
from compressor.quality_gate.verdict import GateResult
from compressor.recipe.recipe import OutputOptions
from compressor.records import Json, read_object
from compressor.run_record import COMPRESSION

logger = logging.getLogger(__name__)


@frozen
class PushedFile:
    """One file that a push sends, or would send."""

    path: str  # in the repository
    nbytes: int
    state: hub.State


@dataclass(frozen=True, slots=True, kw_only=True)
class PushSummary:
    """Files that a push sends, or would send, and where they are."""

    repo_id: str
    url: str
    commit: str | None = None  # that was made; None where nothing has changed, and of a dry run
    branch: str  # or the one that the pull request is against
    create_pr: bool
    pull_request: str | None = None  # its address
    tag: str | None
    uploaded: tuple[PushedFile, ...] = ()
    uploaded_bytes: int = 0
    unchanged: tuple[str, ...] = ()
    # parts of an earlier model that would be taken for parts of this one
    removed: tuple[str, ...] = ()
    left_out: tuple[str, ...]  # what lies in the folder and does not belong on the Hub
    message: str
    dry_run: bool

    @property
    def changed(self) -> bool:
        return bool(self.uploaded or self.removed)

    def to_dict(self) -> Json:
        """Return plain JSON types."""
        return {**asdict(self), "changed": self.changed}

    def blocks(self) -> list[Block]:
        """Return the files that were sent, or would be, and where they are now."""
        verb, also = ("would go", "would be") if self.dry_run else ("went", "was")
        blocks, lines = list[Block](), list[str]()
        if self.changed:
            title = f"{self.repo_id}{' (dry run: nothing is sent)' if self.dry_run else ''}"
            rows = [
                (file.path, human_bytes(file.nbytes), str(file.state)) for file in self.uploaded
            ]
            rows += [(name, "-", "removed") for name in self.removed]
            blocks.append(Table(title, ("file", "size", "on the Hub"), rows, {"on the Hub"}))
            files = f"{counted(len(self.uploaded), 'file')}, {human_bytes(self.uploaded_bytes)}"
            target = (
                f"{'a pull request against ' if self.create_pr else ''}{self.branch} of "
                f"{self.repo_id}"
            )
            lines += [f"Commit: {self.message}", f"{files} {verb} to {target} in one commit."]
            if self.unchanged:
                lines.append(f"{len(self.unchanged)} more are there already.")
        else:
            lines.append(
                f"Nothing has changed: {self.branch} of {self.repo_id} has these files already."
            )
        if self.removed:
            lines.append(
                "Removed are parts of an earlier model that would be taken for parts of this one."
            )
        if self.left_out:
            lines.append(
                f"Not pushed, since it is no part of the model: {', '.join(self.left_out)}"
            )
        if self.tag is not None:
            lines.append(f"The commit {also} tagged {self.tag}.")
        if self.pull_request is not None:
            lines.append(f"Pull request: {self.pull_request}")
        return [*blocks, *map(Text, lines), Text(self.url)]


def push(
    folder: str | Path,
    repo_id: str,
    *,
    private: bool = False,
    revision: str | None = None,
    create_pr: bool = False,
    message: str | None = None,
    tag: str | None = None,
    dry_run: bool = False,
    require_gate: str | Path | None = None,
    base_model: str | None = None,
    yes: bool = False,
    card: str | Path | None = None,
) -> PushSummary:
    """Verify a checkpoint or ONNX folder and bring a model repository on the Hub to it, with a
    card, in one commit.

    A `repo_id` that ends with a slash gets a name as the field's. `base_model` is the id on the Hub
    of a local base. `card` is a new file for the model card, to read before it's sent. `yes`
    publishes what its gate did not pass, too. Raises `CompressionError` before anything is sent if
    the folder is not whole, holds a secret, did not pass its gate or the one that is required, or
    the repository is not fit for it. A push that was interrupted goes on when called again."""
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

    if repo_id.endswith("/"):
        repo_id += suggested_name(Path(folder))
    check_arguments(repo_id, revision, create_pr, message, tag)
    if base_model is not None and not is_hub_id(base_model):
        raise CompressionError(
            f"--base-model {base_model!r} is no model on the Hub; name it as owner/name"
        )
    verified = verify_folder(Path(folder))
    gate = None if require_gate is None else require_pass(verified, Path(require_gate))
    warning = gate_warning(verified.folder) if gate is None else None
    if warning is not None:
        if not (yes or dry_run):
            raise CompressionError(
                f"{warning} Nothing was pushed; pass --yes to publish it all the same"
            )
        logger.warning("%s", warning)
    files = {**verified.files, **_staged(verified, repo_id, gate, require_gate, base_model)}
    refuse_secrets(files, verified.prefixes)
    if card is not None:
        content, file = files.get(CARD), Path(card)
        if content is None:
            raise CompressionError(
                f"there is no card to write to {file}; write a README.md in the folder by hand"
            )
        if file.exists():
            raise CompressionError(f"{file} exists; name a new file with --card")
        write_whole(file, content if isinstance(content, bytes) else content.read_bytes())
    refuse_altered(verified.folder, known_here(verified.folder).get("base"))
    title, branch = message or default_message(verified), revision or hub.DEFAULT_BRANCH
    repository = hub.Repository(repo_id)
    api = repository.api
    # which remember their hashes
    added = {name: CommitOperationAdd(name, content) for name, content in files.items()}
    remote: hub.Remote | None = None  # where a dry run cannot ask the Hub
    try:
        remote = repository.look_up()
    except CompressionError as error:
        if not dry_run:
            raise
        logger.warning("the Hub could not be asked what it has: %s", error)
    if remote is not None:
        repository.refuse_public(remote, private)
        if not (remote.exists or dry_run):  # a new repository begins with files of the Hub's own
            repository.ask(lambda: api.create_repo(repo_id, private=private, exist_ok=True))
            remote = repository.look_up()
            repository.refuse_public(remote, private)
    branches = {} if remote is None else remote.branches
    # the commit of the branch, or of the one it will begin at
    head = branches.get(branch, branches.get(hub.DEFAULT_BRANCH))
    there = repository.files(head)
    changed, same = list[PushedFile](), list[str]()
    for name, addition in sorted(added.items()):
        state: hub.State = "unknown"
        if remote is not None:
            state = hub.state_of(addition, there.get(name))
        if state == "unchanged":
            same.append(name)
        else:
            changed.append(PushedFile(name, addition.upload_info.size, state))
    stale: Sequence[str] = ()
    if not verified.export:
        stale = superseded(there, added, not verified.weights <= {*same})
    tags = {} if remote is None else remote.tags
    if tag is not None and tag in tags and (changed or stale or tags[tag] != head):
        raise CompressionError(
            f"{repo_id} has a tag {tag!r} already, on the commit {tags[tag][:12]}, so nothing was "
            "pushed; name another tag, or delete that one on the Hub"
        )
    commit = pull_request = None
    if not dry_run and remote is not None:
        if branch not in branches and branch != hub.DEFAULT_BRANCH:
            repository.ask(
                lambda: api.create_branch(repo_id, branch=branch, revision=head, exist_ok=True)
            )
        if changed or stale:
            changes = [
                *(added[file.path] for file in changed),
                *map(CommitOperationDelete, stale),
            ]
            # The branch or a new pull request shows all changes at once or none of them;
            # `upload_folder` would make several commits, so that a branch could show half a model.
            # Large files are stored first, and the client does not send what is stored already.
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of a card's metadata, in the server's words
                done = repository.ask(
                    lambda: api.create_commit(
                        repo_id,
                        changes,
                        commit_message=title,
                        revision=branch,
                        create_pr=create_pr,
                        parent_commit=head,
                    )
                )
            commit, pull_request = done.oid, done.pr_url
            missing = []
            # the commit is made; that it cannot be listed yet is no fault of it
            with suppress(CompressionError):
                there = repository.files(commit)
                # a .gitignore there can keep a file out without a word
                missing = [
                    name
                    for name, addition in added.items()
                    if hub.state_of(addition, there.get(name)) != "unchanged"
                ]
            if missing:
                raise CompressionError(
                    f"{missing[0]} of the commit {commit[:12]} of {repo_id} is not the one that "
                    "was pushed; look for a .gitignore there that keeps it out, and for other runs "
                    "that change the folder here"
                )
        if tag is not None and tag not in tags:
            repository.ask(lambda: api.create_tag(repo_id, tag=tag, revision=commit or head))
    return PushSummary(
        repo_id=repo_id,
        url=f"{api.endpoint}/{repo_id}" + (f"/tree/{branch}" if revision is not None else ""),
        commit=commit,
        branch=branch,
        create_pr=create_pr,
        pull_request=pull_request,
        tag=tag,
        uploaded=tuple(changed),
        uploaded_bytes=sum(file.nbytes for file in changed),
        unchanged=tuple(same),
        removed=tuple(stale),
        left_out=verified.left_out,
        message=title,
        dry_run=dry_run,
    )


def gate_warning(folder: Path) -> str | None:
    """Return the verdict of the gate on these files, unless it is a pass or there is none."""
    gate = gate_of(folder)
    if gate is None or gate.verdict == "pass":
        return None
    return f"The gate did not pass {folder}. {verdict_line(gate)}"


def push_output(outcome: Outcome, output: OutputOptions) -> PushSummary:
    """Push a finished output where its recipe says; an error says that the output is whole and how
    to push it."""
    folder = outcome.out
    repo_id = str(output.push_to_hub)
    # else the user has decided
    is_passed = outcome.gate is not None and outcome.gate.verdict == "pass"
    require_gate = Path(folder) / REPORT if is_passed else None
    try:
        return push(folder, repo_id, private=output.private, require_gate=require_gate, yes=True)
    except CompressionError as error:
        again = f"moe-compress push {folder} {repo_id}{' --private' if output.private else ''}"
        message = str(error)
        if hub.AGAIN in message:
            message = message.replace(
                hub.AGAIN, f"then run {again}, which goes on where it stopped"
            )
        else:
            message = f"{message} (then: {again})"
        raise CompressionError(f"{folder} is complete, but was not pushed: {message}") from None


def check_arguments(
    repo_id: str, revision: str | None, create_pr: bool, message: str | None, tag: str | None
) -> None:
    """Refuse what cannot be meant, before anything is read."""
    if not is_hub_id(repo_id) or repo_id.count("/") != 1:
        raise CompressionError(
            f"{repo_id!r} is no repository on the Hub; name it NAMESPACE/NAME, such as org/model"
        )
    if create_pr and tag is not None:
        raise CompressionError(
            "--tag marks a commit of a branch and --create-pr makes none; tag it once it is merged"
        )
    for option, name in (("--revision", revision), ("--tag", tag), ("--message", message)):
        if name is not None and (not name.strip() or kind_of_secret(name.encode(errors="replace"))):
            raise CompressionError(
                f"{option} is empty or holds an access token; give it some other text"
            )
        if option != "--message" and name is not None and name.startswith("refs/"):
            raise CompressionError(
                f"{option} {name!r} is a reference; give the name of a branch or tag alone"
            )


def check_access(repo_id: str, private: bool) -> None:
    """Refuse a login that the Hub does not accept, and a public repository where a private one is
    meant.

    A Hub of one's own may want no login; huggingface.co always does.
    """
    from huggingface_hub import get_token

    check_arguments(repo_id, None, False, None, None)
    repository = hub.Repository(repo_id)
    if get_token() is not None:  # what is neither 401 nor 403 says nothing about the login
        repository.ask(repository.api.whoami, passed={None, *range(600)} - {401, 403})
    elif repository.api.endpoint == HUGGING_FACE:
        raise CompressionError(
            f"{repo_id} cannot be pushed to, for nobody is logged in; run `hf auth login` first"
        )
    repository.refuse_public(repository.look_up(), private)


def _staged(
    verified: VerifiedFolder,
    repo_id: str,
    gate: GateResult | None,
    report: str | Path | None,
    base_model: str | None,
) -> dict[str, hub.Content]:
    """Return files pushed beside the folder's own, or in their place: card, pictures, gate, configs
    without code."""
    # code itself is left out
    coded = [path for path in naming_code(verified.folder) if path.name in verified.files]
    staged: dict[str, hub.Content] = {
        path.name: json_bytes(without_code(read_object(path))) for path in coded
    }
    if report is not None:
        path = Path(report)
        staged[REPORT] = (path / REPORT if path.is_dir() else path).read_bytes()
    # by which it is known how it was made
    if CARD not in verified.files and COMPRESSION in verified.files:
        judged = gate_of(verified.folder, gate)
        results = eval_results(judged) if judged is not None else b""
        if results:
            staged[EVAL_RESULTS] = results
        card = card_text(
            verified.folder, repo_id, gate, base_model=base_model, **known_here(verified.folder)
        )
        return staged | {CARD: card.text.encode(), **card.pictures}
    return staged
