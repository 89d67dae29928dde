"""The HTTP side of the Hub on loopback."""

import os
import socket
import struct
import threading
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tests.hub.answers import Answer, RefusedError
from tests.hub.faults import Fault
from tests.hub.routes import answer
from tests.hub.state import Hub, Request

RESET = struct.pack("ii", 1, 0)  # linger for no time: closing sends RST in place of FIN


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
        body = self._body(headers, None if fault is None else fault.after_bytes)
        if fault is None and len(body) < int(headers.get("content-length", "0")):
            self.close_connection = True  # the client is gone: half a body must not be taken for a whole one
            self._record(path, query, headers, len(body), None)
        elif fault is not None and fault.reset:
            self._record(path, query, headers, len(body), None)
            self._reset()
        elif fault is not None:
            self._fault(fault, path, query, headers, len(body))
        else:
            reply = self._answer(path, query, headers, body)
            self._record(path, query, headers, len(body), reply)
            self._send(reply)

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = _handle  # noqa: N815

    def _answer(self, path: str, query: str, headers: Mapping[str, str], body: bytes) -> Answer:
        if "transfer-encoding" in headers:
            self.close_connection = True
            return RefusedError(501, "A header you provided implies functionality that is not implemented").answer()
        try:
            with self.hub.lock:
                return answer(self.hub, self.command, path, query, headers, body)
        except Exception as error:  # a fault of this server must not look like one of the client's network
            place = traceback.extract_tb(error.__traceback__)[-1]
            return RefusedError(599, f"Internal error at {place.name}: {error!r}").answer()

    def _body(self, headers: Mapping[str, str], most: int | None) -> bytes:
        length = int(headers.get("content-length", "0"))
        try:
            return self.rfile.read(length if most is None else min(most, length))
        except ConnectionError:
            return b""

    def _fault(self, fault: Fault, path: str, query: str, headers: Mapping[str, str], received: int) -> None:
        """Answer the status asked for; with bytes still to come, answer early and then close."""
        reply = Answer(fault.status or 500, fault.body, fault.headers)
        rest = int(headers.get("content-length", "0")) - received
        self._record(path, query, headers, received, reply)
        if rest > 0:
            self.close_connection = True
        self._send(reply)
        if rest > 0:
            self.connection.shutdown(socket.SHUT_WR)
            self.rfile.read(rest)  # closing with bytes unread would reset the connection before the answer is seen

    def _reset(self) -> None:
        """Cut the connection; the descriptor is closed here, as the server would say goodbye properly first."""
        self.close_connection = True
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        os.close(self.connection.detach())

    def _record(self, path: str, query: str, headers: Mapping[str, str], size: int, reply: Answer | None) -> None:
        sent = 0 if reply is None or self.command == "HEAD" else len(reply.body)
        status = None if reply is None else reply.status
        with self.hub.lock:
            self.hub.requests.append(Request(self.command, path, query, headers, size, sent, status))

    def _send(self, reply: Answer) -> None:
        self.send_response(reply.status)
        for name, value in reply.headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(reply.body)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(reply.body)


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
def serve(
    quota: int | None = None,
    tokens: Mapping[str, str] | None = None,
    part_size: int | None = None,
) -> Iterator[Hub]:
    """An empty Hub on 127.0.0.1 until the block ends.

    `quota` limits the bytes stored in all. `tokens` maps each token to "read" or "write"; without it nobody is asked
    for one. An object of more than `part_size` bytes is sent in parts (none is when it is None).
    """
    wrong = sorted(set((tokens or {}).values()) - {"read", "write"})
    if wrong:
        raise ValueError(f"A token's role is read or write, not {wrong[0]}.")
    hub = Hub("", quota, tokens, part_size)
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
