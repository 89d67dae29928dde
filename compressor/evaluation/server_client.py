"""Requests to an OpenAI-compatible server, and the one place where its answers are checked.

A request follows no redirect. A key is taken from the environment variable OPENAI_API_KEY alone, sent to the server
that was named, and kept nowhere.
"""

import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, FiniteFloat, PositiveInt, ValidationError, WrapValidator

from compressor.errors import KEY_VARIABLE, CompressionError, reason_of

TRIES, PAUSE = 4, 0.5  # of a request that may pass later; seconds, doubled each time
BUSY = (408, 425, 429, 502, 503, 504)
LOCAL = ("localhost", "127.0.0.1", "::1")  # for which no proxy is asked
REMEDY = "is it an OpenAI-compatible server?"


class RefusedError(CompressionError):
    """A server that is there does not take a request."""


def _or_none(value: Any, validate: Any) -> Any:
    try:
        return validate(value)
    except ValidationError:
        return None


T = TypeVar("T")
Lenient = Annotated[T | None, WrapValidator(_or_none)]  # None in place of another type


class Checked(BaseModel):
    """An object of an answer; fields that nobody reads are left aside."""

    model_config = ConfigDict(frozen=True)


class Meta(Checked):
    model_config = ConfigDict(extra="allow")
    n_ctx: Lenient[PositiveInt] = None


class ListedModel(Checked):
    id: str
    root: Lenient[str] = None
    owned_by: Lenient[str] = None
    max_model_len: Lenient[PositiveInt] = None
    meta: Lenient[Meta] = None


class Models(Checked):
    data: tuple[ListedModel, ...]


class Version(Checked):
    version: str


class Logprobs(Checked):
    """Log-probabilities of n tokens; the first may have none."""

    tokens: list[str]
    token_logprobs: list[FiniteFloat | None]
    top_logprobs: list[dict[str, FiniteFloat] | None]


class TextChoice(Checked):
    text: str
    finish_reason: str | None = None
    logprobs: Lenient[Logprobs] = None


class Usage(Checked):
    prompt_tokens: Lenient[int] = None


class Completion(Checked):
    choices: tuple[TextChoice]
    usage: Lenient[Usage] = None


class MessagePart(Checked):
    type: Literal["text"]
    text: str


class Function(Checked):
    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(Checked):
    function: Function


class Message(Checked):
    content: str | tuple[MessagePart, ...] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] | None = None

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content or ())


class ChatChoice(Checked):
    message: Message
    finish_reason: str | None = None


class Chat(Checked):
    choices: tuple[ChatChoice]


class Fault(Checked):
    message: str


class Refusal(Checked):
    """The body of an error: servers write {"error": {"message": TEXT}}, {"error": TEXT} or {"message": TEXT}."""

    error: Lenient[Fault | str] = None
    message: Lenient[str] = None


Answer = TypeVar("Answer", bound=Checked)


@dataclass(frozen=True, slots=True)
class Client:
    """Sends requests to one address."""

    address: str  # of its API, without a slash at the end
    timeout: float  # seconds to wait for an answer

    def ask(self, path: str, kind: type[Answer], payload: Mapping[str, Any] | None = None) -> Answer:
        """Return the answer to a GET, or to a POST of a payload; raises `CompressionError` for all else."""
        url = f"{self.address}{path}"
        response = self._send(url, payload)
        if response.is_error:
            raise _refusal(url, response)
        if not response.is_success:
            location = response.headers.get("location") or "nowhere"
            raise CompressionError(
                f"{url} redirects to {location}, which is not followed; name the address of the server itself"
            )
        try:
            return kind.model_validate_json(response.content)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            field = ".".join(map(str, first["loc"])) or "its answer"
            raise CompressionError(f"{url}: {field} is wrong ({first['msg']}); {REMEDY}") from error

    def _send(self, url: str, payload: Mapping[str, Any] | None) -> Any:
        """Send a request until it is answered by something else than an error that may pass."""
        import httpx2

        headers = {"Content-Type": "application/json"}
        if key := os.environ.get(KEY_VARIABLE, "").strip():
            headers["Authorization"] = f"Bearer {key}"
        method, content = ("GET", None) if payload is None else ("POST", json.dumps(payload))
        proxies = httpx2.URL(url).host not in LOCAL
        try:
            with httpx2.Client(timeout=self.timeout, trust_env=proxies, verify=_certificates()) as client:
                for attempt in range(TRIES - 1):
                    with suppress(
                        httpx2.ReadError, httpx2.WriteError, httpx2.RemoteProtocolError
                    ):  # a connection reset
                        response = client.request(method, url, headers=headers, content=content)
                        if response.status_code not in BUSY:
                            return response
                    time.sleep(PAUSE * 2**attempt)
                return client.request(method, url, headers=headers, content=content)
        except httpx2.TimeoutException as error:
            raise CompressionError(
                f"{self.address} did not answer within {self.timeout:g} seconds; what it has answered is kept: "
                "see what keeps it, or raise --timeout, and repeat the command"
            ) from error
        except httpx2.ConnectError as error:
            raise CompressionError(
                f"{self.address} cannot be reached ({reason_of(error)}); start the server, or correct its address"
            ) from error
        except (httpx2.TransportError, httpx2.InvalidURL, OSError, ImportError, ValueError) as error:
            raise CompressionError(
                f"{url} gave no whole answer ({reason_of(error)}); see its log, or correct the address, or the proxy "
                "that the environment names"
            ) from error


def _refusal(url: str, response: Any) -> CompressionError:
    status = response.status_code
    reason = response.reason_phrase or "no reason"
    with suppress(ValidationError):  # no JSON object
        refusal = Refusal.model_validate_json(response.content)
        error = refusal.error.message if isinstance(refusal.error, Fault) else refusal.error
        reason = refusal.message or error or reason
    remedy = "see its log"
    if status in (401, 403):
        remedy = f"put its key into the environment variable {KEY_VARIABLE}"
    elif status == 404:
        remedy = "is it an OpenAI-compatible server, and has it this model?"
    return RefusedError(f"{url} answers {status} ({reason_of(Exception(reason))}); {remedy}")


@cache
def _certificates() -> Any:
    """The certificates of all connections, which take long to read."""
    import httpx2

    return httpx2.create_ssl_context()
