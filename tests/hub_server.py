"""A small Hub on loopback that serves one model or data set from a folder: enough to read headers and to download."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote

COMMIT = "c" * 40


@dataclass
class Hub:
    """A running server: its address, and every request it answered as (method, path, bytes sent)."""

    url: str
    requests: list[tuple[str, str, int]] = field(default_factory=list)


def _handler(repository: str, folder: Path, hub: Hub, kind: str) -> type[BaseHTTPRequestHandler]:
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
            if unquote(self.path) == f"{api}/paths-info/{COMMIT}":
                form = parse_qs(content) if "=" in content else json.loads(content)
                asked = form["paths"]
                found = [self._entry(folder / path) for path in asked if (folder / path).exists()]
                self._send(200, self._json(found), True)
            else:
                self._send(404, b"{}", True)

        def _answer(self, body: bool) -> None:
            path = unquote(self.path.split("?")[0])
            tree = f"{api}/tree/{COMMIT}"
            if path in (api, f"{api}/revision/{COMMIT}", f"{api}/revision/main"):
                self._send(200, self._json({"id": repository, "sha": COMMIT, "siblings": []}), body)
            elif path == tree or path.startswith(f"{tree}/"):
                inside = folder / path.removeprefix(tree).lstrip("/")
                deep = "recursive=true" in self.path.lower()
                found = sorted(inside.rglob("*") if deep else inside.iterdir()) if inside.is_dir() else []
                self._send(200 if inside.is_dir() else 404, self._json([self._entry(entry) for entry in found]), body)
            elif path.startswith(f"{files}/resolve/"):
                self._file(folder / path.removeprefix(f"{files}/resolve/").partition("/")[2], body)
            elif path.startswith(f"{api}/revision/"):
                self._send(404, b"{}", body, {"X-Error-Code": "RevisionNotFound"})
            else:
                self._send(404, b"{}", body, {"X-Error-Code": "RepoNotFound"})

        @staticmethod
        def _entry(path: Path) -> dict[str, object]:
            name = str(path.relative_to(folder))
            if path.is_dir():
                return {"type": "directory", "path": name, "oid": "0" * 40, "size": 0}
            return {"type": "file", "path": name, "size": path.stat().st_size, "oid": "0" * 40}

        def _file(self, file: Path, body: bool) -> None:
            if not file.is_file():
                self._send(404, b"", body, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
                return
            content = file.read_bytes()
            tag = f'"{hashlib.sha1(content).hexdigest()}"'
            headers = {"ETag": tag, "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
            asked = self.headers.get("Range")
            if asked is None:
                self._send(200, content, body, headers)
                return
            first, _, last = asked.removeprefix("bytes=").partition("-")
            end = min(int(last or len(content)), len(content) - 1)
            headers["Content-Range"] = f"bytes {first}-{end}/{len(content)}"
            self._send(206, content[int(first) : end + 1], body, headers)

        @staticmethod
        def _json(content: object) -> bytes:
            return json.dumps(content).encode()

        def _send(self, status: int, content: bytes, body: bool, headers: dict[str, str] | None = None) -> None:
            self.send_response(status)
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if body:
                self.wfile.write(content)
            hub.requests.append((self.command, self.path, len(content) if body else 0))

    return Handler


@contextmanager
def serve(repository: str, folder: Path, kind: str = "model") -> Iterator[Hub]:
    """Serve a folder as the model (or data set) `repository` until the block ends."""
    hub = Hub("")
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(repository, folder, hub, kind))
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
