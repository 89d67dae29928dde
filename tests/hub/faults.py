"""Faults that a test asks of the Hub on loopback: an answer that is not the right one, or a connection cut off."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Fault:
    """What the next `times` requests that match meet instead of, or before, the right answer.

    `path` is a regular expression searched in the path without its query, with %2F and its like still quoted.
    With `status` the request is answered that, with `headers` and `body`; with `reset` the connection is cut by a
    TCP reset once `after_bytes` of the body were read (all of it when None). `after_bytes` with a `status` answers
    early, then closes the connection. A client that was still sending learns of a reset from the operating system as
    an error of its connection or as an answer that never came: both are httpx2.TransportError.
    """

    method: str
    path: str
    status: int | None = None
    times: int = 1
    after_bytes: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    reset: bool = False

    def __post_init__(self) -> None:
        if (self.status is None) != self.reset:
            raise ValueError("A fault either answers a status or resets the connection: give one of the two.")
        if self.times < 1:
            raise ValueError(f"A fault happens at least once, not {self.times} times.")

    def matches(self, method: str, path: str) -> bool:
        """Whether a request is one that this fault is for."""
        return method == self.method and re.search(self.path, path) is not None
