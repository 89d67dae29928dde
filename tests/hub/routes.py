"""Which endpoint answers a request, and who may ask it."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from urllib.parse import parse_qsl, unquote

from tests.hub import cards, committing, large, managing, reading
from tests.hub.answers import Answer, Call, RefusedError
from tests.hub.state import Hub, Repository

OfHub = Callable[[Hub, Call], Answer]
OfRepository = Callable[[Hub, Repository, Call], Answer]
API = r"/api/(?P<kind>models|datasets)/(?P<owner>[^/]+)/(?P<name_>[^/]+)"
HOME = r"/(?:(?P<kind>datasets)/)?(?P<owner>[^/]+)/(?P<name_>[^/]+)"
STORE = r"/lfs/(?:datasets/)?[^/]+/[^/]+/(?P<oid>[0-9a-f]{64})"


@dataclass(frozen=True, slots=True)
class Route:
    """A method and a pattern of the quoted path; `access` is open, known (any token), read or write."""

    method: str
    pattern: str
    access: str
    of_hub: OfHub | None = None
    of_repository: OfRepository | None = None


ROUTES = (
    Route("GET", "/api/whoami-v2", "known", managing.whoami),
    Route("POST", "/api/validate-yaml", "open", cards.validate),
    Route("POST", "/api/repos/create", "write", managing.create),
    Route("PUT", STORE, "open", large.put),
    Route("PUT", rf"{STORE}/parts/(?P<number>\d+)", "open", large.put_part),
    Route("POST", f"{STORE}/complete", "open", large.complete),
    Route("GET", rf"{API}(?:/revision/(?P<revision>[^/]+))?", "read", None, reading.info),
    Route("GET", rf"{API}/tree/(?P<revision>[^/]+)(?:/(?P<path>.+))?", "read", None, reading.tree),
    Route("POST", rf"{API}/paths-info/(?P<revision>[^/]+)", "read", None, reading.paths_info),
    Route("GET", rf"{API}/commits/(?P<revision>[^/]+)", "read", None, reading.commits),
    Route("GET", rf"{API}/refs", "read", None, reading.refs),
    Route("GET", rf"{API}/auth-check", "read", None, reading.nothing),
    Route("GET", rf"{API}/auth-check/write", "write", None, reading.nothing),
    Route("GET", rf"{HOME}/resolve/(?P<revision>[^/]+)/(?P<path>.+)", "read", None, reading.resolve),
    Route("POST", rf"{API}/preupload/(?P<revision>[^/]+)", "write", None, committing.preupload),
    Route("POST", rf"{API}/commit/(?P<revision>[^/]+)", "write", None, committing.commit),
    Route("POST", rf"{HOME}\.git/info/lfs/objects/batch", "write", None, large.batch),
    Route("POST", rf"{HOME}\.git/info/lfs/objects/verify", "write", None, large.verify),
    Route("POST", rf"{API}/branch/(?P<name>[^/]+)", "write", None, managing.branch),
    Route("DELETE", rf"{API}/branch/(?P<name>[^/]+)", "write", None, managing.delete_branch),
    Route("POST", rf"{API}/tag/(?P<name>[^/]+)", "write", None, managing.tag),
    Route("DELETE", rf"{API}/tag/(?P<name>[^/]+)", "write", None, managing.delete_tag),
    Route("GET", rf"{API}/discussions", "read", None, managing.list_discussions),
    Route("POST", rf"{API}/discussions", "write", None, managing.open_discussion),
    Route("GET", rf"{API}/discussions/(?P<number>\d+)", "read", None, managing.discussion),
)


def role(hub: Hub, headers: Mapping[str, str]) -> str | None:
    """What the token of a request allows: write, read, or None where none was sent; a wrong one is refused."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    if hub.tokens is None:
        return "write"
    if not scheme:
        return None
    if scheme != "Bearer" or token not in hub.tokens:
        raise RefusedError(401, "Invalid credentials in Authorization header")
    return hub.tokens[token]


def _demand(access: str, held: str | None) -> None:
    """Refuse who may not ask a route."""
    if held is None and access in ("known", "write"):
        raise RefusedError(401, "Invalid username or password.")
    if access == "write" and held != "write":
        raise RefusedError(403, "Forbidden: you must use a write token to upload to a repository.")


def _repository(hub: Hub, arguments: Mapping[str, str], held: str | None) -> Repository:
    """The repository that a path names; a private one does not exist for who sent no token."""
    kind, name = arguments.get("kind", "models"), f"{arguments['owner']}/{arguments['name_']}"
    found = hub.repositories.get(name if kind == "models" else f"{kind}/{name}")
    if found is None or (found.private and held is None):
        raise RefusedError(404, "Repository not found", "RepoNotFound")
    return found


def answer(hub: Hub, method: str, path: str, query: str, headers: Mapping[str, str], body: bytes) -> Answer:
    """Answer one request; HEAD is answered as GET is, and sent without its body."""
    try:
        for route in ROUTES:
            match = re.fullmatch(route.pattern, path)
            if match is None or route.method != ("GET" if method == "HEAD" else method):
                continue
            arguments = {name: unquote(value) for name, value in match.groupdict().items() if value is not None}
            call = Call(method, arguments, dict(parse_qsl(query)), headers, body)
            if route.access == "open" and route.of_hub is not None:
                return route.of_hub(hub, call)
            held = role(hub, headers)
            _demand(route.access, held)
            if route.of_repository is not None:
                return route.of_repository(hub, _repository(hub, arguments, held), call)
            if route.of_hub is not None:
                return route.of_hub(hub, call)
        raise RefusedError(404, "Sorry, we can't find the page you are looking for.")
    except RefusedError as refusal:
        return refusal.answer()
