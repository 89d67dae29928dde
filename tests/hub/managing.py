"""Endpoints round a repository: its creation, branches, tags, discussions, and who is asking."""

import re
from typing import Any

from tests.hub.answers import Answer, Call, RefusedError, as_json, only, required
from tests.hub.objects import ATTRIBUTES
from tests.hub.state import Hub, PullRequest, Repository

NAME = re.compile(r"(?!.*(--|\.\.))(?!.*\.git$)[A-Za-z0-9_]([A-Za-z0-9_.-]{0,94}[A-Za-z0-9_])?")
CREATION = frozenset({"name", "organization", "type", "private", "visibility", "sdk", "resourceGroupId", "region"})


def whoami(hub: Hub, call: Call) -> Answer:
    """The one user, and what the token may do."""
    token = call.headers.get("authorization", "").removeprefix("Bearer ")
    role = "write" if hub.tokens is None else hub.tokens[token]
    access = {"displayName": "test", "role": role}
    user = {"type": "user", "id": "0" * 24, "name": "user", "fullname": "User", "orgs": [{"name": "org"}]}
    return as_json({**user, "auth": {"type": "access_token", "accessToken": access}})


def create(hub: Hub, call: Call) -> Answer:
    """A new repository; as on the Hub its first commit holds the .gitattributes."""
    content = call.json()
    only(content, CREATION)
    kind = content.get("type", "model")
    if kind not in ("model", "dataset"):
        raise RefusedError(400, f'Repositories of type "{kind}" are not served')
    part, owner = required(content, "name", str), content.get("organization") or "user"
    if NAME.fullmatch(part) is None or NAME.fullmatch(owner) is None:
        raise RefusedError(400, f"{owner}/{part} is not a valid name of a repository")
    visibility = content.get("visibility", "private" if content.get("private") else "public")
    if visibility not in ("public", "private"):
        raise RefusedError(400, '"visibility" must be one of [public, private]')
    key = f"{owner}/{part}" if kind == "model" else f"{kind}s/{owner}/{part}"
    url = f"{hub.url}/{key}"
    if key in hub.repositories:
        raise RefusedError(409, f"You already created this {kind} repo", url=url)
    repository = hub.create(f"{owner}/{part}", {".gitattributes": ATTRIBUTES}, visibility == "private", kind)
    return as_json({"url": url, "name": repository.name, "id": "0" * 24})


def branch(hub: Hub, repository: Repository, call: Call) -> Answer:
    """A branch at a revision, or at the head of main."""
    content, name = call.json(), call.arguments["name"]
    only(content, frozenset({"startingPoint", "emptyBranch", "overwrite"}))
    if name in repository.branches:
        raise RefusedError(409, "Reference already exists")
    repository.branches[name] = repository.commit_at(content.get("startingPoint") or "main").oid
    return as_json({})


def delete_branch(hub: Hub, repository: Repository, call: Call) -> Answer:
    """A branch removed; main stays."""
    name = call.arguments["name"]
    if name == "main":
        raise RefusedError(403, "The default branch cannot be removed")
    if repository.branches.pop(name, None) is None:
        raise RefusedError(404, f"Invalid rev id: {name}", "RevisionNotFound")
    return as_json({})


def tag(hub: Hub, repository: Repository, call: Call) -> Answer:
    """A tag on a revision."""
    content = call.json()
    only(content, frozenset({"tag", "message"}))
    name = required(content, "tag", str)
    if name in repository.tags:
        raise RefusedError(409, f"Tag reference already exists: {name}")
    repository.tags[name] = repository.commit_at(call.arguments["name"]).oid
    return as_json({})


def delete_tag(hub: Hub, repository: Repository, call: Call) -> Answer:
    """A tag removed."""
    if repository.tags.pop(call.arguments["name"], None) is None:
        raise RefusedError(404, f"Invalid rev id: {call.arguments['name']}", "RevisionNotFound")
    return as_json({})


def _summary(repository: Repository, item: PullRequest) -> dict[str, Any]:
    return {
        **{"num": item.number, "title": item.title, "status": item.status, "author": {"name": "user"}},
        "createdAt": item.date.strftime("%Y-%m-%dT%H:%M:%S.000Z"),
        "isPullRequest": item.commit is not None,
        "repo": {"name": repository.name, "type": repository.kind},
    }


def open_discussion(hub: Hub, repository: Repository, call: Call) -> Answer:
    """A discussion, or a pull request that starts at main as it is."""
    content = call.json()
    only(content, frozenset({"title", "description", "pullRequest"}))
    title, description = required(content, "title", str), required(content, "description", str)
    if len(title) < 3:
        raise RefusedError(400, '"title" length must be at least 3 characters long')
    head = repository.commit_at("main").oid if content.get("pullRequest") else None
    item = repository.open(title, description, head)
    return as_json({**_summary(repository, item), "pullRequest": head is not None})


def list_discussions(hub: Hub, repository: Repository, call: Call) -> Answer:
    """Every discussion, the newest first, or those of one type or status."""
    wanted = call.query.get("type", "all"), call.query.get("status", "all")
    rows = [_summary(repository, item) for item in reversed(list(repository.discussions.values()))]
    kinds = {True: "pull_request", False: "discussion"}
    rows = [row for row in rows if wanted[0] in ("all", kinds[row["isPullRequest"]])]
    rows = [row for row in rows if wanted[1] in ("all", row["status"])]
    return as_json({"discussions": rows, "count": len(rows), "start": 0})


def discussion(hub: Hub, repository: Repository, call: Call) -> Answer:
    """One discussion, with its first comment and the commits of its pull request."""
    item = repository.discussions.get(int(call.arguments["number"]))
    if item is None:
        raise RefusedError(404, f"Discussion {call.arguments['number']} does not exist")
    summary = _summary(repository, item)
    stamp = {"createdAt": summary["createdAt"], "author": {"name": "user"}}
    latest = {"raw": item.description, "html": item.description, "updatedAt": summary["createdAt"]}
    comment = {"edited": False, "hidden": False, "latest": latest, "history": []}
    events = [{"id": "0", "type": "comment", **stamp, "data": comment}]
    if item.commit is not None:
        since = {commit.oid for commit in repository.commits(item.base)}
        new = [commit for commit in reversed(repository.commits(item.commit)) if commit.oid not in since]
        data = [{"subject": commit.title, "oid": commit.oid} for commit in new]
        events += [{"id": str(1 + place), "type": "commit", **stamp, "data": row} for place, row in enumerate(data)]
        summary |= {"changes": {"base": f"refs/heads/{item.base}"}, "filesWithConflicts": [], "diff": ""}
    return as_json({**summary, "events": events})
