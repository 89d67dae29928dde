"""The two calls of a commit: how each file is to be sent, and the commit itself."""

import base64
import binascii
import json
from collections.abc import Mapping
from typing import Any

from tests.hub.answers import Answer, Call, RefusedError, as_json, only, required
from tests.hub.objects import SAMPLE_SIZE, Entry, folders, is_ignored, is_large, sha256
from tests.hub.state import Commit, Hub, Repository

HEADER = frozenset({"summary", "description", "parentCommit"})
FILE = frozenset({"content", "path", "encoding"})
LARGE_FILE = frozenset({"path", "algo", "oid", "size"})
DELETION = frozenset({"path"})


def decoded(text: str, where: str) -> bytes:
    """Base64, read strictly."""
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise RefusedError(400, f"{where} is not base64: {error}") from error


def checked(path: str) -> str:
    """A path that a repository can hold."""
    if not path or path.startswith("/") or {"", ".", "..", ".git"} & set(path.split("/")):
        raise RefusedError(400, f'"{path}" is not a valid path in a repository')
    return path


def preupload(hub: Hub, repository: Repository, call: Call) -> Answer:
    """Whether each file is to be sent as a large one or left out, and what the revision holds under its name."""
    commit = repository.commit_at(call.arguments["revision"])
    content = call.json()
    only(content, frozenset({"files", "gitIgnore", "gitAttributes", "sample"}))
    kept = repository.files(commit.oid).get(".gitignore", b"").decode()
    rules = required(content, "gitIgnore", str) if "gitIgnore" in content else kept
    rows: list[dict[str, Any]] = []
    for file in required(content, "files", list):
        path, size = checked(required(file, "path", str)), required(file, "size", int)
        sample = decoded(required(file, "sample", str), f"The sample of {path}")
        if len(sample) != min(size, SAMPLE_SIZE):
            raise RefusedError(400, f"The sample of {path} has {len(sample)} bytes, not {min(size, SAMPLE_SIZE)}")
        mode = "lfs" if is_large(path, size, sample) else "regular"
        row = {"path": path, "uploadMode": mode, "shouldIgnore": is_ignored(path, rules)}
        if path in commit.entries:
            row["oid"] = commit.entries[path].identity
        rows.append(row)
    return as_json({"files": rows})


def _regular(hub: Hub, repository: Repository, value: Mapping[str, Any]) -> Entry:
    """The entry of a file sent in the commit itself."""
    only(value, FILE)
    path, text = required(value, "path", str), required(value, "content", str)
    encoding = value.get("encoding", "utf-8")
    if encoding not in ("base64", "utf-8"):
        raise RefusedError(400, f'"encoding" of {path} must be base64 or utf-8')
    content = decoded(text, f"The content of {path}") if encoding == "base64" else text.encode()
    if is_large(path, len(content), content[:SAMPLE_SIZE]):
        raise RefusedError(
            400,
            f"Your push was rejected because it contains binary files or files larger than 10 MiB: {path}. "
            "Please use https://git-lfs.github.com/ to store them.",
        )
    hub.demand(0 if sha256(content) in repository.stored else len(content))
    return repository.store(content, large=False)


def _large(repository: Repository, value: Mapping[str, Any]) -> Entry:
    """The entry of a large file whose object must be there."""
    only(value, LARGE_FILE)
    path, oid = required(value, "path", str), required(value, "oid", str)
    if value.get("algo") != "sha256":
        raise RefusedError(400, f'"algo" of {path} must be sha256')
    if oid not in repository.large:
        raise RefusedError(400, f"LFS pointer pointed to a file that does not exist: {path} ({oid})")
    size = len(repository.stored[oid])
    if value.get("size", size) != size:
        raise RefusedError(400, f"{path} has {size} bytes, not {value['size']}")
    return repository.store(repository.stored[oid], large=True)


def _delete(entries: dict[str, Entry], path: str, folder: bool) -> None:
    name = path.rstrip("/") if folder else path
    gone = [known for known in entries if (known.startswith(f"{name}/") if folder else known == name)]
    if not gone:
        kind = "folder" if folder else "file"
        raise RefusedError(404, f"A {kind} with this name doesn't exist: {path}", "EntryNotFound")
    for known in gone:
        del entries[known]


def changed(hub: Hub, repository: Repository, base: Commit, operations: list[tuple[str, Any]]) -> dict[str, Entry]:
    """The files after a commit's operations, in their order."""
    entries = dict(base.entries)
    for key, value in operations:
        path = checked(required(value, "path", str).rstrip("/" if key == "deletedFolder" else ""))
        if key == "file":
            entries[path] = _regular(hub, repository, value)
        elif key == "lfsFile":
            entries[path] = _large(repository, value)
        elif key in ("deletedFile", "deletedFolder"):
            only(value, DELETION)
            _delete(entries, path, folder=key == "deletedFolder")
        else:
            raise RefusedError(400, f'Unknown operation "{key}"')
    both = sorted(folders(entries) & set(entries))
    if both:
        raise RefusedError(400, f"{both[0]} is a file and a folder")
    return entries


def _lines(body: bytes) -> list[tuple[str, dict[str, Any]]]:
    """The key and the value of each line of ndjson."""
    found: list[tuple[str, dict[str, Any]]] = []
    for line in body.splitlines():
        try:
            item = json.loads(line)
        except ValueError as error:
            raise RefusedError(400, f"Line {len(found) + 1} is not JSON: {error}") from error
        if not isinstance(item, dict) or set(item) != {"key", "value"} or not isinstance(item["value"], dict):
            raise RefusedError(400, f"Line {len(found) + 1} must be an object of a key and a value")
        found.append((item["key"], item["value"]))
    if not found or found[0][0] != "header" or any(key == "header" for key, _ in found[1:]):
        raise RefusedError(400, "A commit starts with its one header")
    return found


def commit(hub: Hub, repository: Repository, call: Call) -> Answer:
    """A commit to a branch or to refs/pr/N, or, with create_pr, one that opens a pull request."""
    if call.headers.get("content-type") != "application/x-ndjson":
        raise RefusedError(415, "A commit is application/x-ndjson")
    revision = call.arguments["revision"]
    base = repository.commit_at(revision)
    references = {item.reference for item in repository.pull_requests.values()}
    if revision not in repository.branches and revision not in references:
        raise RefusedError(400, f"{revision} is no branch and no pull request, so nothing can be committed to it")
    (_, header), *operations = _lines(call.body)
    only(header, HEADER)
    title, description = required(header, "summary", str), header.get("description", "")
    if not title.strip():
        raise RefusedError(400, '"summary" must not be empty')
    if header.get("parentCommit", base.oid) != base.oid:
        raise RefusedError(412, "A commit has happened since. Please refresh and try again.")
    before = dict(repository.stored)
    try:
        entries = changed(hub, repository, base, operations)
    except RefusedError:
        repository.stored = before
        raise
    made = repository.commit(title, description, (base.oid,), entries)
    home = f"{hub.url}/{'' if repository.kind == 'model' else repository.kind + 's/'}{repository.name}"
    reply = {"success": True, "commitOid": made.oid, "commitUrl": f"{home}/commit/{made.oid}", "hookOutput": ""}
    if call.flag("create_pr"):
        number = repository.open(title, description, made.oid, revision).number
        reply["pullRequestUrl"] = f"{home}/discussions/{number}"
    else:
        repository.move(revision, made.oid)
    return as_json(reply)
