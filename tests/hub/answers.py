"""What an endpoint is asked and what it answers."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Call:
    """A request read to its end: `arguments` are the parts of the path, unquoted; header names are lower case."""

    method: str
    arguments: Mapping[str, str]
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> dict[str, Any]:
        """The body as a JSON object."""
        try:
            content = json.loads(self.body)
        except ValueError as error:
            raise RefusedError(400, f"Invalid JSON: {error}") from error
        if not isinstance(content, dict):
            raise RefusedError(400, "The body must be a JSON object")
        return content

    def flag(self, name: str) -> bool:
        """Whether a switch of the query is on."""
        return self.query.get(name, "").lower() in ("1", "true")


@dataclass(frozen=True, slots=True)
class Answer:
    """A status, a body and the headers that matter; the length is added when it is sent."""

    status: int = 200
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)


class RefusedError(Exception):
    """An answer that is an error, in the Hub's form: a JSON `error`, X-Error-Message and perhaps X-Error-Code."""

    def __init__(self, status: int, message: str, code: str | None = None, **extra: Any) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.extra = status, message, code, extra

    def answer(self) -> Answer:
        """The refusal as it is sent."""
        message = self.message.encode("ascii", "replace").decode().replace("\n", " ")
        headers = {"X-Error-Message": message} | ({"X-Error-Code": self.code} if self.code else {})
        return as_json({"error": self.message, **self.extra}, self.status, headers)


def as_json(content: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Answer:
    """A JSON answer."""
    return Answer(
        status, json.dumps(content, default=str).encode(), {"Content-Type": "application/json", **(headers or {})}
    )


def required(content: object, name: str, kind: type) -> Any:
    """A field of a JSON object that must be there and of a type (a bool is no int)."""
    value = content.get(name) if isinstance(content, Mapping) else None
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise RefusedError(400, f'"{name}" must be a {kind.__name__}')
    return value


def only(content: Mapping[str, Any], known: frozenset[str]) -> None:
    """Refuse a JSON object with a field that nothing reads."""
    unknown = sorted(set(content) - known)
    if unknown:
        raise RefusedError(400, f'"{unknown[0]}" is not allowed')
