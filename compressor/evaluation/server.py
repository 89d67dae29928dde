"""A model behind an OpenAI-compatible server (vLLM, SGLang, llama-server): what it is, and what it answers over HTTP.

A key is taken from the environment variable OPENAI_API_KEY alone, sent to the server that was named, and kept nowhere.
"""

import http.client
import json
import logging
import os
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from operator import eq
from pathlib import Path
from typing import Any, Literal, TypeVar
from urllib.parse import urlsplit, urlunsplit

from compressor.checkpoint.source import ModelSource
from compressor.errors import KEY_VARIABLE, CompressionError, first_line, reason_of
from compressor.evaluation.evaluate import WRITTEN, Answerer
from compressor.evaluation.options import SECONDS, ServerOptions
from compressor.evaluation.tasks import EvaluationOptions, EvaluationTask
from compressor.files import file_digest
from compressor.formatting import known_names
from compressor.model.tokenizer import load_tokenizer
from compressor.run_record import request_key

logger = logging.getLogger(__name__)

AT_ONCE = 8  # requests, where nobody says how many
TRIES, PAUSE = 4, 0.5  # of a request that the server refuses for a while; seconds, doubled each time
ENDPOINTS = ("/chat/completions", "/completions", "/models")
BUSY = (408, 425, 429, 502, 503, 504)
PLAIN = {"repeat_penalty": 1.0, "repetition_penalty": 1.0}  # which some servers raise, and so hide loops
PROBE = "The quick brown fox: 3 + 4 = 7.\nA lazy dog sleeps"
PROBED = 8  # tokens that are asked for
TOKENIZER = ("tokenizer*.json", "*.model", "special_tokens_map.json", "vocab*", "merges.txt")
LOCAL = ("localhost", "127.0.0.1", "::1")

Scored = Literal["tokens", "text", None]  # in what form a prompt gets log-probabilities; None: in none
T = TypeVar("T")
Q = TypeVar("Q")


class RefusedError(CompressionError):
    """A server that is there does not take a request."""


@dataclass(frozen=True, slots=True)
class Server:
    """One model of a server that is there."""

    address: str  # of its API, without a slash at the end
    model: str
    timeout: float
    facts: Mapping[str, Any]  # plain JSON: what it says of itself and of the model
    max_length: int | None = None  # tokens of a prompt with its answer
    scored: Scored = None
    plain: Mapping[str, float] = field(default_factory=dict)  # settings of each answer, where it takes them
    opener: Any = field(default_factory=urllib.request.build_opener, compare=False, repr=False)

    @property
    def label(self) -> str:
        return f"{self.model.rpartition('/')[2] if self.model.startswith('/') else self.model} ({self.address})"

    def get(self, path: str) -> Any:
        return self._ask(path, None)

    def post(self, path: str, payload: Mapping[str, Any]) -> dict[str, Any]:
        """The JSON object that the server answers; a sentence where it doesn't, after some tries if it is busy."""
        answer = self._ask(path, payload)
        if not isinstance(answer, dict):
            raise CompressionError(f"{self.address}{path} answers no JSON object; is it an OpenAI-compatible server?")
        return answer

    def _ask(self, path: str, payload: Mapping[str, Any] | None) -> Any:
        data = None if payload is None else json.dumps(payload).encode()
        request = urllib.request.Request(f"{self.address}{path}", data, {"Content-Type": "application/json"})
        if key := os.environ.get(KEY_VARIABLE, "").strip():
            request.add_unredirected_header("Authorization", f"Bearer {key}")
        for left in reversed(range(TRIES)):
            try:
                with self.opener.open(request, timeout=self.timeout) as response:
                    return json.load(response)
            except urllib.error.HTTPError as error:
                if error.code not in BUSY or not left:
                    raise self._refusal(path, error) from error
            except (OSError, http.client.HTTPException) as error:  # a URLError is an OSError
                reason = getattr(error, "reason", error)
                if isinstance(reason, TimeoutError):
                    raise CompressionError(
                        f"{self.address} did not answer within {self.timeout:g} seconds; what it has answered is kept: "
                        "see what keeps it, or raise --timeout, and repeat the command"
                    ) from error
                if not left:
                    said = first_line(reason) if isinstance(reason, Exception) else str(reason)
                    raise CompressionError(
                        f"{self.address} cannot be reached ({said}); start the server, or correct its address"
                    ) from error
            except ValueError as error:
                raise CompressionError(
                    f"{self.address}{path} answers no JSON; is it an OpenAI-compatible server?"
                ) from error
            time.sleep(PAUSE * 2 ** (TRIES - 1 - left))
        raise AssertionError

    def _refusal(self, path: str, error: urllib.error.HTTPError) -> CompressionError:
        said = ""
        try:
            content = json.load(error)
            inner = content.get("error", content)
            said = str(inner.get("message") if isinstance(inner, dict) else inner)
        except (OSError, ValueError, AttributeError):  # no JSON object
            said = str(error.reason)
        remedy = "see its log"
        if error.code in (401, 403):
            remedy = f"put its key into the environment variable {KEY_VARIABLE}"
        elif error.code == 404:
            remedy = "is it an OpenAI-compatible server, and has it this model?"
        return RefusedError(f"{self.address}{path} answers {error.code} ({reason_of(Exception(said))}); {remedy}")

    def all(self, asked: Sequence[Q], ask: Callable[[Q], T], at_once: int = AT_ONCE) -> Iterator[tuple[Q, T]]:
        """What each question leads to, as soon as it is there, several at once.

        Where one fails, no further one is asked; those under way are waited for and yielded first.
        """
        stop, fault = threading.Event(), None

        def one(question: Q) -> tuple[Q, T] | None:
            if stop.is_set():
                return None
            try:
                return question, ask(question)
            except BaseException:
                stop.set()
                raise

        pool = ThreadPoolExecutor(at_once)
        try:
            for future in as_completed([pool.submit(one, question) for question in asked]):
                try:
                    if (found := future.result()) is not None:
                        yield found
                except CompressionError as error:
                    fault = fault or error
            if fault is not None:
                raise fault
        finally:
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)

    def checked(self, folder: Any, label: str) -> "Server":
        """The same, knowing how it scores prompts; refuses one of another vocabulary than the folder's tokenizer.

        The first tokens that it writes are among its facts: weights that were changed behind a name are noticed.
        """
        tokenizer = load_tokenizer(folder)
        ids = [int(token) for token in tokenizer(PROBE, add_special_tokens=False)["input_ids"]]
        asked = {"model": self.model, "max_tokens": PROBED, "temperature": 0, "seed": 0}
        other = CompressionError(
            f"{self.label} has another vocabulary than {label}: it reads the same text as other tokens; name the "
            "folder with the tokenizer of the served model, or serve the other model"
        )
        pieces = [tokenizer.decode([token]) for token in ids]
        forms: tuple[tuple[Scored, Any], ...] = (("tokens", ids), ("text", PROBE))
        for form, prompt in forms:
            with suppress(RefusedError):  # of token ids, of echo, or of log-probabilities
                response = self.post("/completions", {**asked, **PLAIN, "prompt": prompt, "logprobs": 1, "echo": True})
                if PromptScores.of(self, response, len(ids)) is None:
                    continue  # log-probabilities of what it writes alone, or of none
                if (found := PromptScores.of(self, response, len(ids), pieces)) is None:
                    raise other
                if found.shifted():
                    break
                facts = {**self.facts, "answer": "".join(map(str, found.written))}
                return replace(self, scored=form, facts=facts, plain=PLAIN)
        for plain in (PLAIN, {}):
            with suppress(RefusedError):
                response = self.post("/completions", {**asked, **plain, "prompt": PROBE})
                break
        else:  # it knows chats alone
            return self
        counted = (response.get("usage") or {}).get("prompt_tokens")
        if isinstance(counted, int) and counted not in (len(ids), len(ids) + 1):  # with a token that opens texts
            raise other
        return replace(self, facts={**self.facts, "answer": choice_of(self, response).get("text")}, plain=plain)


@dataclass(frozen=True, slots=True)
class PromptScores:
    """What a server says of the n tokens of a prompt, and what it has written after it."""

    tokens: Sequence[Any]  # [n] their texts
    values: Sequence[Any]  # [n] log-probabilities; of the first token there may be none
    tops: Sequence[Any]  # [n] of the most probable tokens by their texts
    written: Sequence[Any]
    after: Sequence[Any]  # of the prompt's last token and the written ones, what `tops` has

    @classmethod
    def of(
        cls, server: Server, response: Mapping[str, Any], count: int, pieces: Sequence[str] | None = None
    ) -> "PromptScores | None":
        """Of a prompt of so many tokens; None if it has none.

        Where their texts are given as `pieces`, the tokens have to be these, after one that opens texts if need be.
        """
        logs = choice_of(server, response).get("logprobs")
        named = logs if isinstance(logs, dict) else {}
        tokens, values, tops = (named.get(name) for name in ("tokens", "token_logprobs", "top_logprobs"))
        if not isinstance(tokens, list) or not isinstance(values, list) or not isinstance(tops, list):
            return None
        for begin in (0, 1) if pieces is not None else (0,):
            own = slice(begin, begin + count)
            if begin + count <= len(values) == len(tokens) == len(tops) and alike(tokens[own], pieces):
                after = tops[begin + count - 1 :]
                return cls(tokens[own], values[own], tops[own], tokens[begin + count :], after)
        return None

    def shifted(self) -> bool:
        """Whether what was written is most probable by the token before, more than by itself.

        Some servers give the probability that each token has after itself.
        """
        tops = [
            max(top, key=lambda text: float(top[text])) if isinstance(top, dict) and top else None for top in self.after
        ]
        before, own = (sum(map(eq, self.written, part)) for part in (tops, tops[1:]))
        return bool(before > own)

    def likelihood(self, begin: int) -> tuple[float, bool]:
        """The log-likelihood of all tokens from `begin` on, and whether each is the most probable one."""
        values = list(map(float, self.values[begin:]))
        greedy = (value >= max(map(float, top.values())) for value, top in zip(values, self.tops[begin:], strict=True))
        return sum(values), all(greedy)


def choice_of(server: Server, response: Mapping[str, Any]) -> dict[str, Any]:
    """The one answer in a response."""
    choices = response.get("choices")
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        raise CompressionError(f"{server.address} answers without a choice; is it an OpenAI-compatible server?")
    return choices[0]


def alike(shown: Sequence[Any], pieces: Sequence[str] | None) -> bool:
    """Whether a server's tokens may be these, by their texts, as far as both show them: blanks and parts of characters
    are shown in several ways."""

    def letters(text: str) -> str:
        return "".join(text.replace("▁", " ").replace("\ufffd", " ").split())

    pairs = ((letters(str(one)), letters(other)) for one, other in zip(shown, pieces or (), strict=False))
    return all(one == other or not one or not other or one.startswith("token_id:") for one, other in pairs)


def open_server(
    url: str,
    model: str | None = None,
    timeout: float = SECONDS,
    options: tuple[str, str] = ("--server", "--served-model"),
) -> Server:
    """Ask a server for its models; a sentence where it is none, cannot be reached, or has no such model."""
    try:
        parts = urlsplit(url.strip())
        host = parts.hostname
    except ValueError:
        parts, host = urlsplit(""), None
    if parts.username is not None or parts.query:
        raise CompressionError(
            f"{options[0]} holds a user's name or a key; write the address without, and put a key into {KEY_VARIABLE}"
        )
    if parts.scheme not in ("http", "https") or not host:
        raise CompressionError(
            f"{options[0]} {url!r} is no address of a server; write one such as http://localhost:8000"
        )
    path = parts.path.rstrip("/")
    for end in ENDPOINTS:
        path = path.removesuffix(end)
    address = urlunsplit((parts.scheme, parts.netloc, path or "/v1", "", ""))
    proxies = urllib.request.ProxyHandler({}) if host in LOCAL else urllib.request.ProxyHandler()
    server = Server(address, model or "", timeout, {}, opener=urllib.request.build_opener(proxies))
    listed = server.get("/models")
    entries = listed.get("data") if isinstance(listed, dict) else None
    if not isinstance(entries, list) or not all(isinstance(each, dict) and "id" in each for each in entries):
        raise CompressionError(f"{address}/models lists no models; is it an OpenAI-compatible server?")
    by_name = {str(each["id"]): each for each in entries}
    if model is None:
        if len(by_name) != 1:
            names = ", ".join(by_name) or "none"
            raise CompressionError(f"{address} has the models {names}; name one with {options[1]}")
        (model,) = by_name
    if model not in by_name:
        raise CompressionError(f"{address} has no model {model!r}; {known_names(model, by_name)}")
    said = by_name[model]
    meta = said.get("meta")
    lengths = [said.get("max_model_len"), meta.get("n_ctx") if isinstance(meta, dict) else None]
    facts: dict[str, Any] = {"server": address, "model": model}
    facts |= {name: said[name] for name in ("root", "owned_by", "max_model_len", "meta") if said.get(name) is not None}
    try:
        bare = replace(server, address=urlunsplit((parts.scheme, parts.netloc, "", "", "")))
        facts["version"] = bare.get("/version").get("version")
    except (CompressionError, AttributeError):  # which few servers say
        logger.debug("%s says no version", address)
    length = next((each for each in lengths if isinstance(each, int) and each > 0), None)
    return replace(server, model=model, facts=facts, max_length=length)


def servers_of(options: ServerOptions) -> tuple[Server | None, Server | None]:
    """The servers of the base and of the smaller model, as far as they are named; each is asked what it has."""
    named = (
        (options.base_server, options.base_served_model, ("--base-server", "--base-served-model")),
        (options.server, options.served_model, ("--server", "--served-model")),
    )
    base, smaller = (url and open_server(url, model, options.timeout, both) for url, model, both in named)
    return base or None, smaller or None


def served_facts(server: Server, folder: Path) -> dict[str, Any]:
    """All that is known of what decides a server's answers, with the tokenizer by which it is asked."""
    files = sorted({path for pattern in TOKENIZER for path in folder.glob(pattern)})
    return {**server.facts, "tokenizer": {path.name: file_digest(path) for path in files}}


def served_answerer(server: Server, source: ModelSource, tasks: Sequence[EvaluationTask], cache: Path) -> Answerer:
    """Who answers for a model whose server was checked; `source` holds its tokenizer.

    Raises `CompressionError` for a task that needs log-probabilities that the server does not give.
    """
    for name, part in (entry for task in tasks for entry in task.parts.items()):
        if server.scored is None and getattr(part, "OUTPUT_TYPE", None) != WRITTEN:
            raise CompressionError(
                f"task {name!r} takes log-probabilities of its prompts, and {server.label} gives none, or wrong "
                "ones; name tasks that write their answers (generate_until), or serve the model by vLLM or SGLang"
            )
    served = served_facts(server, source.folder)
    kept = cache / f"served-{request_key(served)[:32]}.jsonl"

    @contextmanager
    def load(source: ModelSource, options: EvaluationOptions) -> Iterator[Any]:
        from compressor.evaluation.served_model import ServedModel

        yield ServedModel(server, source.folder, options, kept)
        kept.unlink(missing_ok=True)  # all tasks have their results

    return Answerer({}, load, served, server.label, server)
