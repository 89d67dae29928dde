"""Reading endpoints: what a repository is, its tree, its history, its references and its files."""

import re
from collections.abc import Iterable
from itertools import pairwise
from typing import Any
from urllib.parse import parse_qs

from tests.hub.answers import Answer, Call, RefusedError, as_json
from tests.hub.cards import metadata
from tests.hub.objects import Entry, folders, pointer, tree_id
from tests.hub.state import Commit, Hub, Repository


def _revision(call: Call) -> str:
    return call.arguments.get("revision") or "main"


def _date(commit: Commit) -> str:
    return commit.date.strftime("%Y-%m-%dT%H:%M:%S.000Z")


def _large(entry: Entry) -> dict[str, Any]:
    size = len(pointer(entry.sha256, entry.size))
    return {"lfs": {"oid": entry.sha256, "size": entry.size, "pointerSize": size}} if entry.large else {}


def _sibling(path: str, entry: Entry, blobs: bool) -> dict[str, Any]:
    if not blobs:
        return {"rfilename": path}
    large = {"lfs": {**_large(entry)["lfs"], "sha256": entry.sha256}} if entry.large else {}
    return {"rfilename": path, "size": entry.size, "blobId": entry.git_id, **large}


def info(hub: Hub, repository: Repository, call: Call) -> Answer:
    """What model_info, dataset_info and snapshot_download ask first."""
    commit = repository.commit_at(_revision(call))
    card = repository.files(commit.oid).get("README.md", b"").decode("utf-8", "replace")
    blobs = call.flag("blobs")
    return as_json(
        {
            "id": repository.name,
            "author": repository.name.partition("/")[0],
            "sha": commit.oid,
            "lastModified": _date(commit),
            "createdAt": _date(repository.commits(commit.oid)[-1]),
            "private": repository.private,
            **{"gated": False, "disabled": False, "downloads": 0, "likes": 0, "tags": []},
            "cardData": metadata(card),
            "usedStorage": repository.size,
            "siblings": [_sibling(path, entry, blobs) for path, entry in sorted(commit.entries.items())],
        }
    )


def _last_commit(repository: Repository, commit: Commit, paths: frozenset[str]) -> dict[str, Any]:
    """The newest commit that changed one of the paths."""
    line = repository.commits(commit.oid)
    found = line[-1]
    for newer, older in pairwise(line):
        if any(newer.entries.get(path) != older.entries.get(path) for path in paths):
            found = newer
            break
    return {"lastCommit": {"id": found.oid, "title": found.title, "date": _date(found)}}


def _rows(repository: Repository, commit: Commit, paths: Iterable[str], expand: bool) -> list[dict[str, Any]]:
    """A row for each file or folder named; a name that is neither is left out."""
    rows: list[dict[str, Any]] = []
    known = folders(commit.entries)
    for path in paths:
        if path in commit.entries:
            entry = commit.entries[path]
            row = {"type": "file", "path": path, "size": entry.size, "oid": entry.git_id, **_large(entry)}
            inside = frozenset({path})
        elif path in known:
            row = {"type": "directory", "path": path, "size": 0, "oid": tree_id(commit.entries, path)}
            inside = frozenset(name for name in commit.entries if name.startswith(f"{path}/"))
        else:
            continue
        rows.append({**row, **(_last_commit(repository, commit, inside) if expand else {})})
    return rows


def tree(hub: Hub, repository: Repository, call: Call) -> Answer:
    """The files and folders of a folder, or of everything below it."""
    commit = repository.commit_at(_revision(call))
    folder = call.arguments.get("path") or ""
    known = folders(commit.entries)
    if folder and folder not in known:
        message = f'{folder} does not exist on "{_revision(call)}"'
        raise RefusedError(404, message, "EntryNotFound")
    prefix = f"{folder}/" if folder else ""
    found = sorted(path for path in {*commit.entries, *known} if path.startswith(prefix))
    if not call.flag("recursive"):
        found = [path for path in found if "/" not in path.removeprefix(prefix)]
    return as_json(_rows(repository, commit, found, call.flag("expand")))


def paths_info(hub: Hub, repository: Repository, call: Call) -> Answer:
    """The same rows for the paths of a form or of a JSON object."""
    if call.headers.get("content-type", "").startswith("application/json"):
        asked, expand = call.json().get("paths", []), bool(call.json().get("expand"))
    else:
        form = parse_qs(call.body.decode(), keep_blank_values=True)
        asked, expand = form.get("paths", []), form.get("expand", [""])[0].lower() == "true"
    return as_json(_rows(repository, repository.commit_at(_revision(call)), asked, expand))


def commits(hub: Hub, repository: Repository, call: Call) -> Answer:
    """The history of a revision, the newest commit first."""
    return as_json(
        [
            {
                **{"id": commit.oid, "title": commit.title, "message": commit.message},
                **{"authors": [{"user": "user"}], "date": _date(commit)},
            }
            for commit in repository.commits(_revision(call))
        ]
    )


def refs(hub: Hub, repository: Repository, call: Call) -> Answer:
    """Branches, tags and, if asked, pull requests."""

    def rows(prefix: str, named: dict[str, str]) -> list[dict[str, str]]:
        return [{"name": name, "ref": f"{prefix}{name}", "targetCommit": oid} for name, oid in named.items()]

    found = {
        "branches": rows("refs/heads/", repository.branches),
        "tags": rows("refs/tags/", repository.tags),
        "converts": [],
    }
    if call.flag("include_prs"):
        heads = {str(number): item.commit or "" for number, item in repository.pull_requests.items()}
        found["pullRequests"] = rows("refs/pr/", heads)
    return as_json(found)


def _part(asked: str, size: int) -> tuple[int, int]:
    """The first and the last byte that a Range header asks for."""
    match = re.fullmatch(r"bytes=(\d*)-(\d*)", asked)
    if match is None or not any(match.groups()):
        raise RefusedError(416, f"Cannot read the range {asked}")
    first, last = match.groups()
    start = int(first) if first else max(0, size - int(last))
    end = min(int(last), size - 1) if first and last else size - 1
    if start > end:
        raise RefusedError(416, f"The range {asked} is outside of {size} bytes")
    return start, end


def resolve(hub: Hub, repository: Repository, call: Call) -> Answer:
    """A file's content, or a part of it; a large file is served here too, without a redirection to a CDN."""
    commit = repository.commit_at(_revision(call))
    path = call.arguments["path"]
    if path not in commit.entries:
        refusal = RefusedError(404, "Entry not found", "EntryNotFound").answer()
        return Answer(404, refusal.body, {**refusal.headers, "X-Repo-Commit": commit.oid})
    entry = commit.entries[path]
    content = repository.stored[entry.sha256]
    headers = {"ETag": f'"{entry.identity}"', "X-Repo-Commit": commit.oid, "Accept-Ranges": "bytes"}
    if entry.large:
        headers |= {"X-Linked-Etag": f'"{entry.sha256}"', "X-Linked-Size": str(entry.size)}
    asked = call.headers.get("range")
    if asked is None:
        return Answer(200, content, headers)
    start, end = _part(asked, entry.size)
    return Answer(206, content[start : end + 1], {**headers, "Content-Range": f"bytes {start}-{end}/{entry.size}"})


def nothing(hub: Hub, repository: Repository, call: Call) -> Answer:
    """That the caller may do what the route asks for."""
    return as_json({})
