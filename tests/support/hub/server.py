"""The endpoints of the Hub on loopback and its HTTP side."""

import base64
import hashlib
import json
import os
import re
import socket
import struct
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import parse_qs, parse_qsl, unquote

import pytest

from tests.support.hub import cards
from tests.support.hub.state import (
    ATTRIBUTES,
    SAMPLE_SIZE,
    Commit,
    Entry,
    Hub,
    PullRequest,
    RefusedError,
    Repository,
    Request,
    is_large,
)

RESET = struct.pack("ii", 1, 0)  # linger for no time: closing sends RST in place of FIN
MIME = "application/vnd.git-lfs+json"


@dataclass(frozen=True, slots=True)
class Call:
    """A request read to its end: `arguments` are the parts of the path, unquoted; header names are lower case."""

    hub: Hub
    arguments: Mapping[str, str]
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """The body as JSON."""
        return json.loads(self.body)

    @property
    def repository(self) -> Repository:
        """The repository that the path names; a private one does not exist for who sent no token."""
        found = self.hub.repositories.get(f"{self.arguments['owner']}/{self.arguments['name']}")
        if found is None or (found.private and self.role is None):
            raise RefusedError(404, "Repository not found", "RepoNotFound")
        return found

    @property
    def role(self) -> str | None:
        """What the token allows: write, read, or None where none was sent; a wrong one is refused."""
        scheme, _, token = self.headers.get("authorization", "").partition(" ")
        if self.hub.tokens is None:
            return "write"
        if scheme and (scheme != "Bearer" or token not in self.hub.tokens):
            raise RefusedError(401, "Invalid credentials in Authorization header")
        return self.hub.tokens[token] if scheme else None


@dataclass(frozen=True, slots=True)
class Answer:
    """A status, a body and the headers that matter; the length is added when it is sent."""

    status: int = 200
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)


def as_json(content: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Answer:
    """A JSON answer."""
    return Answer(status, json.dumps(content).encode(), {"Content-Type": "application/json", **(headers or {})})


def refusal(error: RefusedError) -> Answer:
    """An error in the Hub's form: a JSON `error`, X-Error-Message and perhaps X-Error-Code."""
    headers = {"X-Error-Message": error.message} | ({"X-Error-Code": error.code} if error.code else {})
    return as_json({"error": error.message, **error.extra}, error.status, headers)


def whoami(call: Call) -> Answer:
    """The one user, and what the token may do."""
    access = {"type": "access_token", "accessToken": {"displayName": "test", "role": call.role}}
    return as_json({"type": "user", "id": "0" * 24, "name": "user", "orgs": [{"name": "org"}], "auth": access})


def validate(call: Call) -> Answer:
    """400 with every mistake of a card's metadata, or 200 with a warning where there are none."""
    if not (text := cards.front_matter(call.json["content"])):
        return as_json({"errors": [], "warnings": [{"message": "empty or missing yaml metadata in repo card"}]})
    errors = [{"message": message} for message in cards.mistakes(cards.loaded(text))]
    return as_json({"errors": errors, "warnings": []}, 400 if errors else 200)


def create(call: Call) -> Answer:
    """A new repository; as on the Hub its first commit holds the .gitattributes."""
    content = call.json
    name = f"{content.get('organization') or 'user'}/{content['name']}"
    url, is_private = f"{call.hub.url}/{name}", content.get("visibility") == "private" or bool(content.get("private"))
    if name in call.hub.repositories:
        raise RefusedError(409, "You already created this model repo", url=url)
    call.hub.create(name, {".gitattributes": ATTRIBUTES}, is_private)
    return as_json({"url": url, "name": name, "id": "0" * 24})


def branch(call: Call) -> Answer:
    """A branch at a revision, or at the head of main."""
    repository, name = call.repository, call.arguments["revision"]
    if name in repository.branches:
        raise RefusedError(409, "Reference already exists")
    repository.branches[name] = repository.commit_at(call.json.get("startingPoint") or "main").oid
    return as_json({})


def tag(call: Call) -> Answer:
    """A tag on a revision."""
    repository, name = call.repository, call.json["tag"]
    if name in repository.tags:
        raise RefusedError(409, f"Tag reference already exists: {name}")
    repository.tags[name] = repository.commit_at(call.arguments["revision"]).oid
    return as_json({})


def info(call: Call) -> Answer:
    """What repo_info and snapshot_download read first."""
    repository = call.repository
    commit = repository.commit_at(call.arguments.get("revision", "main"))
    siblings = [{"rfilename": path} for path in sorted(commit.entries)]
    facts = {"id": repository.name, "sha": commit.oid, "private": repository.private, "siblings": siblings}
    return as_json({**facts, "gated": False, "disabled": False, "downloads": 0, "likes": 0, "tags": []})


def listed(commit: Commit, paths: Iterable[str]) -> Answer:
    """These files and folders of a commit, as far as it has them."""
    rows: list[dict[str, Any]] = []
    for path in paths:
        if (entry := commit.entries.get(path)) is not None:
            large = {"lfs": {"oid": entry.sha256, "size": entry.size, "pointerSize": 130}} if entry.large else {}
            rows.append({"type": "file", "path": path, "size": entry.size, "oid": entry.git_id, **large})
        elif any(name.startswith(f"{path}/") for name in commit.entries):
            rows.append({"type": "directory", "path": path, "size": 0, "oid": "0" * 40})
    return as_json(rows)


def tree(call: Call) -> Answer:
    """The files and folders in a folder, with `recursive` those further down too."""
    commit, folder = call.repository.commit_at(call.arguments["revision"]), call.arguments.get("path")
    inside, deep = f"{folder}/" if folder else "", call.query.get("recursive", "").lower() == "true"
    places = [PurePosixPath(name) for name in commit.entries if name.startswith(inside)]
    if folder and not places:
        raise RefusedError(404, "Entry not found", "EntryNotFound")
    paths = {str(each) for place in places for each in (place, *place.parents[:-1])}
    return listed(commit, sorted(p for p in paths if p.startswith(inside) and (deep or "/" not in p[len(inside) :])))


def paths_info(call: Call) -> Answer:
    """Some files and folders, asked for in a form or as JSON."""
    form = call.headers.get("content-type", "").startswith("application/x-www-form-urlencoded")
    asked = parse_qs(call.body.decode())["paths"] if form else call.json["paths"]
    return listed(call.repository.commit_at(call.arguments["revision"]), asked)


def refs(call: Call) -> Answer:
    """Branches and tags."""

    def rows(prefix: str, named: dict[str, str]) -> list[dict[str, str]]:
        return [{"name": name, "ref": f"{prefix}{name}", "targetCommit": oid} for name, oid in named.items()]

    repository = call.repository
    branches, tags = rows("refs/heads/", repository.branches), rows("refs/tags/", repository.tags)
    return as_json({"branches": branches, "tags": tags, "converts": []})


def resolve(call: Call) -> Answer:
    """A file's content; a large file is served here too, without a redirection to a CDN."""
    commit, path = call.repository.commit_at(call.arguments["revision"]), call.arguments["path"]
    if (entry := commit.entries.get(path)) is None:
        raise RefusedError(404, "Entry not found", "EntryNotFound")
    headers = {"ETag": f'"{entry.sha256 if entry.large else entry.git_id}"', "X-Repo-Commit": commit.oid}
    content = call.repository.stored[entry.sha256]
    if (asked := call.headers.get("range")) is None:
        return Answer(200, content, headers)
    first, _, last = asked.removeprefix("bytes=").partition("-")
    end = min(int(last or entry.size), entry.size - 1)
    headers["Content-Range"] = f"bytes {first}-{end}/{entry.size}"
    return Answer(206, content[int(first) : end + 1], headers)


def preupload(call: Call) -> Answer:
    """Whether each file is to be sent as a large one or left out, and what the revision holds under its name."""
    repository = call.repository
    commit = repository.commit_at(call.arguments["revision"])
    ignored = repository.files(commit.oid).get(".gitignore", b"").decode().split()
    rows: list[dict[str, Any]] = []
    for file in call.json["files"]:
        path, sample = file["path"], base64.b64decode(file["sample"], validate=True)
        mode = "lfs" if is_large(path, file["size"], sample) else "regular"
        kept_out = any(fnmatchcase(path, pattern) for pattern in ignored)
        row = {"path": path, "uploadMode": mode, "shouldIgnore": kept_out}
        if (entry := commit.entries.get(path)) is not None:
            row["oid"] = entry.sha256 if entry.large else entry.git_id
        rows.append(row)
    return as_json({"files": rows})


def batch(call: Call) -> Answer:
    """The addresses for the large objects that are not stored yet, and where to have them verified."""
    repository, hub = call.repository, call.hub
    objects = {item["oid"]: item["size"] for item in call.json["objects"]}
    missing = {oid: size for oid, size in objects.items() if oid not in repository.large}
    hub.demand(sum(missing.values()))
    rows: list[dict[str, Any]] = []
    for oid, size in objects.items():
        row = {"oid": oid, "size": size, "authenticated": True}
        if oid in missing:
            address = f"{hub.url}/lfs/{repository.name}/{oid}?signature={hub.grant(repository, oid, size)}"
            verified = f"{hub.url}/{repository.name}.git/info/lfs/objects/verify"
            row["actions"] = {"upload": {"href": address}, "verify": {"href": verified}}
        rows.append(row)
    return as_json({"transfer": "basic", "objects": rows}, headers={"Content-Type": MIME})


def put(call: Call) -> Answer:
    """A large object at its signed address, which must be what it is called."""
    repository, oid, size = call.hub.grants.get(call.query.get("signature", ""), (None, "", 0))
    if repository is None or oid != call.arguments["oid"]:
        raise RefusedError(403, "The signature of this address is not valid")
    if "authorization" in call.headers:
        raise RefusedError(400, "Only one auth mechanism allowed: this address is signed")
    if len(call.body) != size or hashlib.sha256(call.body).hexdigest() != oid:
        raise RefusedError(400, f"The content is not that of {oid}")
    repository.store(call.body, large=True)
    call.hub.uploaded.append((oid, size))
    return Answer(200, b"", {"ETag": f'"{hashlib.md5(call.body).hexdigest()}"'})


def verify(call: Call) -> Answer:
    """Whether an object is stored."""
    if call.json["oid"] not in call.repository.large:
        raise RefusedError(404, "The object was not uploaded")
    return as_json({})


def commit(call: Call) -> Answer:
    """A commit to a branch or, with create_pr, one that opens a pull request; all of it or nothing."""
    repository, revision = call.repository, call.arguments["revision"]
    base = repository.commit_at(revision)
    if revision not in repository.branches:
        raise RefusedError(400, f"{revision} is no branch, so nothing can be committed to it")
    header, *lines = map(json.loads, call.body.splitlines())
    title = header["value"]["summary"]
    if header["value"].get("parentCommit", base.oid) != base.oid:
        raise RefusedError(412, "A commit has happened since. Please refresh and try again.")
    entries = dict(base.entries)
    for line in lines:
        entry = _entry(call.hub, repository, line["key"], line["value"])
        if entry is not None:
            entries[line["value"]["path"]] = entry
        elif entries.pop(line["value"]["path"], None) is None:
            raise RefusedError(404, "A file with this name doesn't exist", "EntryNotFound")
    made = repository.commit(title, header["value"].get("description", ""), (base.oid,), entries)
    home = f"{call.hub.url}/{repository.name}"
    reply = {"success": True, "commitOid": made.oid, "commitUrl": f"{home}/commit/{made.oid}", "hookOutput": ""}
    if call.query.get("create_pr"):
        number = len(repository.pull_requests) + 1
        repository.pull_requests[number] = PullRequest(number, title, made.oid)
        reply["pullRequestUrl"] = f"{home}/discussions/{number}"
    else:
        repository.branches[revision] = made.oid
    return as_json(reply)


def _entry(hub: Hub, repository: Repository, key: str, value: Mapping[str, Any]) -> Entry | None:
    """The entry of a file that is sent in the commit or was stored before it; None for one that is deleted."""
    if key == "lfsFile":
        if value["oid"] not in repository.large:
            raise RefusedError(400, f"LFS pointer pointed to a file that does not exist: {value['path']}")
        return repository.store(repository.stored[value["oid"]], large=True)
    if key == "deletedFile":
        return None
    if key != "file":
        raise RefusedError(400, f'Unknown operation "{key}"')
    content = base64.b64decode(value["content"], validate=True)
    if is_large(value["path"], len(content), content[:SAMPLE_SIZE]):
        raise RefusedError(400, f"Your push was rejected because it contains binary files: {value['path']}")
    hub.demand(len(content))
    return repository.store(content, large=False)


API = r"/api/(?:models|datasets)/(?P<owner>[^/]+)/(?P<name>[^/]+)"
HOME = r"(?:/datasets)?/(?P<owner>[^/]+)/(?P<name>[^/]+)"
REVISION = r"(?P<revision>[^/]+)"
ROUTES: tuple[tuple[str, str, str, Callable[[Call], Answer]], ...] = (  # the role: open, known (any token), read, write
    ("GET", "/api/whoami-v2", "known", whoami),
    ("POST", "/api/validate-yaml", "open", validate),
    ("POST", "/api/repos/create", "write", create),
    ("PUT", "/lfs/[^/]+/[^/]+/(?P<oid>[0-9a-f]{64})", "open", put),
    ("GET", f"{API}(?:/revision/{REVISION})?", "read", info),
    ("GET", f"{API}/tree/{REVISION}(?:/(?P<path>.+))?", "read", tree),
    ("POST", f"{API}/paths-info/{REVISION}", "read", paths_info),
    ("GET", f"{API}/refs", "read", refs),
    ("GET", f"{HOME}/resolve/{REVISION}/(?P<path>.+)", "read", resolve),
    ("POST", f"{API}/preupload/{REVISION}", "write", preupload),
    ("POST", f"{API}/commit/{REVISION}", "write", commit),
    ("POST", rf"{HOME}\.git/info/lfs/objects/batch", "write", batch),
    ("POST", rf"{HOME}\.git/info/lfs/objects/verify", "write", verify),
    ("POST", f"{API}/branch/{REVISION}", "write", branch),
    ("POST", f"{API}/tag/{REVISION}", "write", tag),
)


def answer(hub: Hub, method: str, path: str, query: str, headers: Mapping[str, str], body: bytes) -> Answer:
    """Answer one request; HEAD is answered as GET is, and sent without its body."""
    try:
        for wanted, pattern, access, endpoint in ROUTES:
            match = re.fullmatch(pattern, path)
            if match is None or wanted != ("GET" if method == "HEAD" else method):
                continue
            arguments = {name: unquote(value) for name, value in match.groupdict().items() if value is not None}
            call = Call(hub, arguments, dict(parse_qsl(query)), headers, body)
            role = None if access == "open" else call.role
            if role is None and access in ("known", "write"):
                raise RefusedError(401, "Invalid username or password.")
            if access == "write" and role != "write":
                raise RefusedError(403, "Forbidden: you must use a write token to upload to a repository.")
            return endpoint(call)
        raise RefusedError(404, "Sorry, we can't find the page you are looking for.")
    except RefusedError as error:
        return refusal(error)
    except Exception as error:  # a fault of this server must not look like one of the client's network
        place = traceback.extract_tb(error.__traceback__)[-1]
        return refusal(RefusedError(599, f"Internal error at {place.name}: {error!r}"))


class Handler(BaseHTTPRequestHandler):
    """Reads a request to its end, lets a fault happen or answers it, and writes it down before answering."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    hub: Hub

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _handle(self) -> None:
        path, _, query = self.path.partition("?")
        fault = self.hub.fault_for(self.command, path)
        headers = {name.lower(): value for name, value in self.headers.items()}
        length, body = int(headers.get("content-length", "0")), b""
        with suppress(ConnectionError):
            body = self.rfile.read(length if fault is None or fault.after_bytes is None else fault.after_bytes)
        is_cut = (fault is None and len(body) < length) or (fault is not None and fault.reset and not fault.half)
        reply: Answer | None = None
        if fault is not None and not fault.reset and not fault.half:
            reply = Answer(fault.status or 500, fault.body, fault.headers)
        elif not is_cut:  # half a body must not be taken for a whole one
            with self.hub.lock:
                self.hub.meanwhile(path)
                reply = answer(self.hub, self.command, path, query, headers, body)
        sent = 0 if reply is None or self.command == "HEAD" else len(reply.body)
        sent = sent // 2 if fault is not None and fault.half else sent
        status = None if reply is None else reply.status
        with self.hub.lock:
            self.hub.requests.append(Request(self.command, path, query, headers, len(body), sent, status))
        if reply is not None:
            self._send(reply, sent)
            if fault is None or not fault.half:
                return
        self.close_connection = True
        if fault is not None and fault.reset:  # closed here, as the server would say goodbye properly first
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            os.close(self.connection.detach())

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = _handle  # noqa: N815

    def _send(self, reply: Answer, sent: int) -> None:
        self.send_response(reply.status)
        for name, value in reply.headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(reply.body)))
        self.end_headers()
        self.wfile.write(reply.body[:sent])


class Server(ThreadingHTTPServer):
    """A thread for each connection, which ends with the server; what a client breaks off is no news."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, hub_handler: type[Handler]) -> None:
        super().__init__(("127.0.0.1", 0), hub_handler)
        self.connections: set[socket.socket] = set()

    def get_request(self) -> tuple[socket.socket, object]:
        connection, address = super().get_request()
        self.connections.add(connection)
        return connection, address

    def close_request(self, request: object) -> None:
        if isinstance(request, socket.socket):
            self.connections.discard(request)
            request.close()

    def hang_up(self) -> None:
        """End the connections that clients keep open: a later server may be given the same port."""
        for connection in tuple(self.connections):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: object, client_address: object) -> None:
        pass


@contextmanager
def serve(quota: int | None = None, tokens: Mapping[str, str] | None = None) -> Iterator[Hub]:
    """An empty Hub on 127.0.0.1 until the block ends.

    `quota` limits the bytes stored in all. `tokens` maps each token to "read" or "write"; without it nobody is asked
    for one.
    """
    hub = Hub("", quota, tokens)
    server = Server(type("HubHandler", (Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        server.hang_up()
        thread.join()


def point(monkeypatch: pytest.MonkeyPatch, url: str, cache: Path) -> None:
    """Make a server the Hub of this process, and a folder its cache."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
