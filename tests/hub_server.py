"""A small Hub on loopback that serves one model or data set from a folder: enough to read headers and to download."""

import hashlib
import json
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote

COMMIT = "c" * 40
WEIGHTS = (".safetensors", ".onnx")


@dataclass
class Hub:
    """A running server: its address, and every request it answered as (method, path, bytes sent)."""

    url: str
    commits: dict[str, Path]  # what each one holds
    branches: dict[str, str] = field(default_factory=lambda: {"main": COMMIT})
    requests: list[tuple[str, str, int]] = field(default_factory=list)
    cuts: dict[str, str] = field(default_factory=dict)  # files sent by half the next time, then "closed" or "reset"
    broken: set[str] = field(default_factory=set)  # files, or "api", that are answered with status 500

    def fetched(self) -> list[str]:
        """The files whose bytes were sent, in order; several times if they were asked for again."""
        return [
            path.partition("/resolve/")[2].partition("/")[2]
            for _, path, sent in self.requests
            if "/resolve/" in path and sent
        ]


def _tag(path: Path) -> str:
    """The name of a file's bytes: as on the Hub, one hash for small files and another one for weights."""
    content = path.read_bytes()
    return (hashlib.sha256 if path.suffix in WEIGHTS else hashlib.sha1)(content).hexdigest()


def _handler(repository: str, hub: Hub, kind: str) -> type[BaseHTTPRequestHandler]:
    api = f"/api/{kind}s/{repository}"
    files = f"/{repository}" if kind == "model" else f"/{kind}s/{repository}"

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def log_message(self, format: str, *args: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self._answer(body=False)

        def do_GET(self) -> None:
            self._answer(body=True)

        def do_POST(self) -> None:
            content = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
            folder = hub.commits.get(unquote(self.path).removeprefix(f"{api}/paths-info/"))
            if folder is not None:
                form = parse_qs(content) if "=" in content else json.loads(content)
                asked = form["paths"]
                found = [self._entry(folder, folder / path) for path in asked if (folder / path).exists()]
                self._send(200, self._json(found), True)
            else:
                self._send(404, b"{}", True)

        def _answer(self, body: bool) -> None:
            path = unquote(self.path.split("?")[0])
            revision, _, inside = path.removeprefix(f"{api}/tree/").removeprefix(f"{files}/resolve/").partition("/")
            commit = hub.branches.get(revision, revision)
            if path.startswith(api) and "api" in hub.broken:
                self._send(500, b"{}", body)
            elif path == api or path.startswith(f"{api}/revision/"):
                asked = path.removeprefix(api).removeprefix("/revision/") or "main"
                commit = hub.branches.get(asked, asked)
                missing = commit not in hub.commits
                self._send(
                    404 if missing else 200,
                    self._json({"id": repository, "sha": commit, "siblings": []}),
                    body,
                    {"X-Error-Code": "RevisionNotFound"} if missing else {},
                )
            elif path.startswith(f"{api}/tree/") and commit in hub.commits:
                folder = hub.commits[commit]
                place = folder / inside
                deep = "recursive=true" in self.path.lower()
                found = sorted(place.rglob("*") if deep else place.iterdir()) if place.is_dir() else []
                entries = [self._entry(folder, entry) for entry in found]
                self._send(200 if place.is_dir() else 404, self._json(entries), body)
            elif path.startswith(f"{files}/resolve/") and commit in hub.commits:
                self._file(hub.commits[commit] / inside, commit, body)
            else:
                self._send(404, b"{}", body, {"X-Error-Code": "RepoNotFound"})

        @staticmethod
        def _entry(folder: Path, path: Path) -> dict[str, object]:
            name = str(path.relative_to(folder))
            if path.is_dir():
                return {"type": "directory", "path": name, "oid": "0" * 40, "size": 0}
            size, tag = path.stat().st_size, _tag(path)
            entry: dict[str, object] = {"type": "file", "path": name, "size": size, "oid": tag[:40]}
            return entry | ({"lfs": {"oid": tag, "size": size, "pointerSize": 130}} if path.suffix in WEIGHTS else {})

        def _file(self, file: Path, commit: str, body: bool) -> None:
            if not file.is_file():
                self._send(404, b"", body, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
                return
            if body and file.name in hub.broken:
                self._send(500, b"", body)
                return
            content = file.read_bytes()
            headers = {"ETag": f'"{_tag(file)}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
            if body and file.name in hub.cuts:
                self._cut(content, headers, hub.cuts.pop(file.name))
                return
            asked = self.headers.get("Range")
            if asked is None:
                self._send(200, content, body, headers)
                return
            first, _, last = asked.removeprefix("bytes=").partition("-")
            end = min(int(last or len(content)), len(content) - 1)
            headers["Content-Range"] = f"bytes {first}-{end}/{len(content)}"
            self._send(206, content[int(first) : end + 1], body, headers)

        def _cut(self, content: bytes, headers: dict[str, str], how: str) -> None:
            """Promise the whole file, send half of it, and go away."""
            self.send_response(200)
            for name, value in {**headers, "Content-Length": str(len(content))}.items():
                self.send_header(name, value)
            self.end_headers()
            hub.requests.append((self.command, self.path, len(content) // 2))
            self.wfile.write(content[: len(content) // 2])
            if how == "reset":
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self.connection.close()
            self.close_connection = True

        @staticmethod
        def _json(content: object) -> bytes:
            return json.dumps(content).encode()

        def _send(self, status: int, content: bytes, body: bool, headers: dict[str, str] | None = None) -> None:
            hub.requests.append((self.command, self.path, len(content) if body else 0))  # before the client goes on
            self.send_response(status)
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if body:
                self.wfile.write(content)

    return Handler


@contextmanager
def serve(repository: str, folder: Path, kind: str = "model") -> Iterator[Hub]:
    """Serve a folder as the model (or data set) `repository` until the block ends."""
    hub = Hub("", {COMMIT: folder})
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(repository, hub, kind))
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
