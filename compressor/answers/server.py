"""A model behind an OpenAI-compatible server (vLLM, SGLang, llama-server): what it is, writes and
scores.

The one place where a server's answers are checked. A request follows no redirect. A key is taken
from the environment variable OPENAI_API_KEY alone, sent to the server that was named, and kept
nowhere."""

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import field, replace
from functools import cache
from itertools import islice
from operator import eq
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AliasPath,
    BaseModel,
    ConfigDict,
    Field,
    FiniteFloat,
    PositiveInt,
    ValidationError,
    WrapValidator,
)
from pydantic_core import from_json

from compressor.answers.answering import (
    POSITIONS,
    Answer,
    Ended,
    Likelihood,
    Model,
    ModelFacts,
    Request,
    Scoring,
    TaskWriting,
    Writing,
    read_facts,
    seed_of,
)
from compressor.answers.options import SECONDS, GenerationOptions, ServerOptions
from compressor.answers.prompts import Prompt, is_chat, tokens_of
from compressor.answers.tasks import EvaluationTask
from compressor.checkpoint.source import ModelSource
from compressor.errors import KEY_VARIABLE, CompressionError, reason_of
from compressor.files import file_digest
from compressor.formatting import known_names
from compressor.frozen import frozen
from compressor.model.tokenizer import (
    THINKING_END,
    load_tokenizer,
    thinking_end,
    with_json_arguments,
)
from compressor.progress import SILENT, Progress
from compressor.records import Json

MOST_BYTES = 2**25  # of an answer
TRIES, PAUSE = 4, 0.5  # of a request that may pass later; seconds, doubled each time
BUSY = (408, 425, 429, 502, 503, 504)
LOCAL = ("localhost", "127.0.0.1", "::1")  # for which no proxy is asked
REMEDY = "is it an OpenAI-compatible server?"
AT_ONCE = 8  # requests, where nobody says how many
MOST_PORT = 2**16 - 1
# reasons to finish that are the model's own
ENDED = ("stop", "tool_calls", "function_call")
MOST_STOPS = 4  # that a chat may name
ENDPOINTS = ("/chat/completions", "/completions", "/models")
# which some servers raise, and so hide loops
PLAIN = {"repeat_penalty": 1.0, "repetition_penalty": 1.0}
PROBE = "The quick brown fox: 3 + 4 = 7.\nA lazy dog sleeps"
PROBED = 8  # tokens that are asked for
ID = re.compile(r"token_id:([0-9]{1,9})")  # of a token, as vLLM writes it
TOKENIZER = ("tokenizer*.json", "*.model", "special_tokens_map.json", "vocab*", "merges.txt")

# in what form a prompt gets log-probabilities; None: in none
Scored = Literal["tokens", "text", None]
Q = TypeVar("Q")


class RefusedError(CompressionError):
    """A server refused a request."""


class EndlessError(CompressionError):
    """An answer did not end in time, or within the largest size."""


def _or_none(value: Any, validate: Any) -> Any:
    try:
        return validate(value)
    except ValidationError:
        return None


T = TypeVar("T")
Lenient = Annotated[T | None, WrapValidator(_or_none)]  # None in place of another type


class Checked(BaseModel):
    """An object of an answer; unknown fields are ignored."""

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


class TokenLog(Checked):
    token: str
    logprob: FiniteFloat
    id: Lenient[int] = None
    top_logprobs: "tuple[TokenLog, ...]" = ()


class ContentLogs(Checked):
    """Log-probabilities as chats have them, and all answers of llama-server."""

    content: list[TokenLog]


class Choice(Checked):
    finish_reason: str | None = None
    logprobs: Lenient[ContentLogs | Logprobs] = None

    def logs(self, step: int = 0) -> dict[str | int, float]:
        """Return the log-probabilities of a written token and its rivals, by the ids or the texts
        of tokens."""
        named = dict[str | int, float]()
        if isinstance(self.logprobs, ContentLogs):
            for content in self.logprobs.content[step : step + 1]:
                for entry in content.top_logprobs:
                    named[entry.token if entry.id is None else entry.id] = entry.logprob
        elif self.logprobs is not None:
            for tops in self.logprobs.top_logprobs[step : step + 1]:
                for name, log in (tops or {}).items():
                    token = ID.fullmatch(name)
                    named[int(token[1]) if token else name] = log
        return named


class TextChoice(Choice):
    text: str


class Reply(Checked):
    # tokens of the prompt, if the server counts them
    counted: Lenient[int] = Field(None, validation_alias=AliasPath("usage", "prompt_tokens"))


class Completion(Reply):
    choices: tuple[TextChoice]


class MessagePart(Checked):
    type: Literal["text"]
    text: str


class ToolCall(Checked):
    name: str = Field(validation_alias=AliasPath("function", "name"))
    arguments: str | dict[str, Any] | None = Field(
        None, validation_alias=AliasPath("function", "arguments")
    )


class Message(Checked):
    content: str | tuple[MessagePart, ...] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] | None = None

    @property
    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content or ())


class ChatChoice(Choice):
    message: Message


class Chat(Reply):
    choices: tuple[ChatChoice]


class Refusal(Checked):
    """The body of an error, of which servers have three forms."""

    nested: Lenient[str] = Field(None, validation_alias=AliasPath("error", "message"))
    error: Lenient[str] = None
    message: Lenient[str] = None

    @property
    def reason(self) -> str | None:
        return self.nested or self.error or self.message


Kind = TypeVar("Kind", bound=Checked)


@cache
def _certificates() -> Any:
    """Return the certificates of all connections, which take long to read."""
    import httpx2

    return httpx2.create_ssl_context()


@frozen
class Server:
    """One model of a server; with no model, the server itself."""

    address: str  # of its API, without a slash at the end
    timeout: float  # seconds to wait for an answer
    model: str = ""
    # plain JSON: what it says of itself and of the model
    facts: Json = field(default_factory=dict)
    max_length: int | None = None  # tokens of a prompt with its answer
    scored: Scored = None
    # settings of each answer, where it takes them
    plain: Mapping[str, float] = field(default_factory=dict)

    @property
    def label(self) -> str:
        return (
            f"{self.model.rpartition('/')[2] if self.model.startswith('/') else self.model} "
            f"({self.address})"
        )

    def ask(self, path: str, kind: type[Kind], payload: Json | None = None) -> Kind:
        """Return the answer to a GET, or to a POST of a payload; raises `CompressionError` for all
        else."""
        url = f"{self.address}{path}"
        response, content = self._send(url, payload)
        status = response.status_code
        if response.is_error:
            reason = response.reason_phrase or "no reason"
            with suppress(ValidationError):
                reason = Refusal.model_validate_json(content).reason or reason
            remedy = "see its log"
            if status in (401, 403):
                remedy = f"put its key into the environment variable {KEY_VARIABLE}"
            elif status == 404:
                remedy = "is it an OpenAI-compatible server, and has it this model?"
            reason = reason_of(Exception(reason))
            raise RefusedError(f"{url} answers {status} ({reason}); {remedy}")
        if not response.is_success:
            location = response.headers.get("location") or "nowhere"
            raise CompressionError(
                f"{url} redirects to {location}, which is not followed; name the address of the "
                "server itself"
            )
        try:
            return kind.model_validate_json(content)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            field = ".".join(map(str, first["loc"])) or "its answer"
            raise CompressionError(f"{url}: {field} is wrong ({first['msg']}); {REMEDY}") from error

    def complete(self, question: Json) -> "Completion | Chat":
        """Return what is written after a prompt, or as the next message of a chat."""
        question = {"model": self.model, **question}
        if "messages" in question:
            return self.ask("/chat/completions", Chat, question)
        return self.ask("/completions", Completion, question)

    def _send(self, url: str, payload: Json | None) -> tuple[Any, bytes]:
        """Send a request, again after an error that may pass; all tries share the timeout.

        Returns the response and its body, which is read as it is sent, up to the largest.
        """
        import anyio
        import httpx2

        # A compressed body could grow without bound.
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if key := os.environ.get(KEY_VARIABLE, "").strip():
            headers["Authorization"] = f"Bearer {key}"
        request = {"method": "GET", "url": url, "headers": headers}
        if payload is not None:
            request |= {"method": "POST", "content": json.dumps(payload)}

        async def read(client: Any) -> tuple[Any, bytes]:
            body = bytearray()
            async with client.stream(**request) as response:
                async for part in response.aiter_raw():
                    body += part
                    if len(body) > MOST_BYTES:
                        raise EndlessError(
                            f"{url} answers with over {MOST_BYTES:,} bytes; {REMEDY}"
                        )
            return response, bytes(body)

        async def send() -> tuple[Any, bytes]:
            proxies = httpx2.URL(url).host not in LOCAL
            settings = {"timeout": None, "trust_env": proxies, "verify": _certificates()}
            # A timeout of the client counts anew with each byte, so a slow answer would outlast it.
            with anyio.fail_after(self.timeout):
                async with httpx2.AsyncClient(**settings) as client:
                    for attempt in range(TRIES):
                        is_last = attempt == TRIES - 1
                        try:
                            response, body = await read(client)
                            if is_last or response.status_code not in BUSY:
                                break
                        # A connection may be reset.
                        except (httpx2.ReadError, httpx2.WriteError, httpx2.RemoteProtocolError):
                            if is_last:
                                raise
                        await anyio.sleep(PAUSE * 2**attempt)
            return response, body

        try:
            return anyio.run(send)
        except TimeoutError as error:
            raise EndlessError(
                f"{self.address} did not answer within {self.timeout:g} seconds; what it has "
                "answered is kept: see what keeps it, or raise --timeout, and repeat the command"
            ) from error
        except httpx2.ConnectError as error:
            raise CompressionError(
                f"{self.address} cannot be reached ({reason_of(error)}); start the server, or "
                "correct its address"
            ) from error
        except (
            httpx2.TransportError,
            httpx2.InvalidURL,
            OSError,
            ImportError,
            ValueError,
        ) as error:
            raise CompressionError(
                f"{url} gave no whole answer ({reason_of(error)}); see its log, or correct the "
                "address, or the proxy that the environment names"
            ) from error

    def all(
        self,
        questions: Iterable[Q],
        ask: Callable[[Q], T],
        at_once: int | None = None,
        progress: Progress = SILENT,
    ) -> Iterator[T]:
        """Yield the answers in any order, each as soon as it is there; so many are asked at once.

        Where one fails, no further one is asked; those under way are waited for and yielded first.
        """
        at_once = at_once or AT_ONCE
        waiting = iter(questions)
        error: BaseException | None = None
        with ThreadPoolExecutor(at_once) as pool:
            running = {pool.submit(ask, question) for question in islice(waiting, at_once)}
            while running:
                done, running = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    error = error or future.exception()
                    if future.exception() is None:
                        progress.advance("")
                        yield future.result()
                if error is None:
                    running |= {
                        pool.submit(ask, question) for question in islice(waiting, len(done))
                    }
        if error is not None:
            raise error

    def check_chat(self, task: str) -> None:
        """Refuse a task that is asked as a chat, if the server takes none."""
        try:
            self.complete({"messages": [{"role": "user", "content": PROBE}], "max_tokens": 1})
        except RefusedError as error:
            reason = str(error).partition(";")[0]
            raise CompressionError(
                f"task {task!r} is asked as a chat, and {self.label} takes none ({reason}); serve "
                "the model with its chat template, or pass --no-apply-chat-template"
            ) from error

    def checked(self, folder: Any, label: str) -> "Server":
        """Return the server with the form in which it scores prompts; refuse another vocabulary
        than the folder's.

        The first tokens that it writes are among its facts: weights that were changed behind a name
        are noticed."""
        tokenizer = load_tokenizer(folder)
        ids = [int(token) for token in tokenizer(PROBE, add_special_tokens=False)["input_ids"]]
        settings = {"max_tokens": PROBED, "temperature": 0, "seed": 0}
        other = CompressionError(
            f"{self.label} has another vocabulary than {label}: it reads the same text as other "
            "tokens; name the "
            "folder with the tokenizer of the served model, or serve the other model"
        )
        pieces = [tokenizer.decode([token]) for token in ids]
        forms: tuple[tuple[Scored, Any], ...] = (("tokens", ids), ("text", PROBE))
        for form, prompt in forms:
            with suppress(RefusedError):  # of token ids, of echo, or of log-probabilities
                question = {**settings, **PLAIN, "prompt": prompt, "logprobs": 1, "echo": True}
                logs = self.complete(question).choices[0].logprobs
                if PromptScores.of(logs, len(ids)) is None:
                    continue  # log-probabilities of what it writes alone, or of none
                scores = PromptScores.of(logs, len(ids), pieces)
                if scores is None:
                    raise other
                # Some servers give the probability that each token has after itself: then what was
                # written is most probable by the token before, more than by itself.
                best = [max(top, key=top.__getitem__) if top else None for top in scores.after]
                by_token_before = sum(map(eq, scores.written, best))
                if by_token_before > sum(map(eq, scores.written, best[1:])):
                    break
                facts = {**self.facts, "answer": "".join(scores.written)}
                return replace(self, scored=form, facts=facts, plain=PLAIN)
        for plain in (PLAIN, {}):
            with suppress(RefusedError):
                reply = self.ask(
                    "/completions",
                    Completion,
                    {"model": self.model, **settings, **plain, "prompt": PROBE},
                )
                break
        else:  # it knows chats alone
            return self
        if reply.counted not in (None, len(ids), len(ids) + 1):  # with a token that opens texts
            raise other
        return replace(self, facts={**self.facts, "answer": reply.choices[0].text}, plain=plain)


@frozen
class PromptScores:
    """Log-probabilities of the n tokens of a prompt, and the tokens that the server has generated
    after it."""

    values: Sequence[float | None]  # [n] log-probabilities; of the first token there may be none
    tops: Sequence[Mapping[str, float] | None]  # [n] of the most probable tokens by their texts
    written: Sequence[str]
    # of the prompt's last token and the written ones, what `tops` has
    after: Sequence[Mapping[str, float] | None]

    @classmethod
    def of(
        cls, logs: Logprobs | ContentLogs | None, count: int, pieces: Sequence[str] | None = None
    ) -> "PromptScores | None":
        """Read the scores of a prompt of so many tokens; None if it has none.

        Where their texts are given as `pieces`, the tokens have to be these, after one that opens
        texts if need be: as far as both show them, by the letters alone, since blanks and parts of
        characters are shown in several ways."""

        def letters(text: str) -> str:
            return "".join(text.replace("▁", " ").replace("\ufffd", " ").split())

        if not isinstance(logs, Logprobs):
            return None
        tokens = logs.tokens
        values = logs.token_logprobs
        tops = logs.top_logprobs
        if not len(tokens) == len(values) == len(tops):
            return None
        for begin in (0,) if pieces is None else (0, 1):
            end = begin + count
            of_prompt = slice(begin, end)
            if end > len(tokens):
                continue
            shown = map(letters, tokens[of_prompt])
            for token, piece in zip(shown, map(letters, pieces or ()), strict=False):
                if token and piece and token != piece and not token.startswith("token_id:"):
                    break
            else:
                return cls(values[of_prompt], tops[of_prompt], tokens[end:], tops[end - 1 :])
        return None

    def likelihood(self, begin: int) -> tuple[float, bool] | None:
        """Return the log-likelihood of all tokens from `begin` on, and True if each is the argmax.

        None where one has no log-probability.
        """
        total = 0.0
        greedy = True
        for value, top in zip(self.values[begin:], self.tops[begin:], strict=True):
            if value is None or not top:
                return None
            total += value
            greedy = greedy and value >= max(top.values())
        return total, greedy


@frozen
class ServerModel(Model):
    """A served model; `source` holds its tokenizer."""

    server: Server  # checked
    source: ModelSource
    rows: int | None = None  # requests at once

    opens_texts = False  # a server that does so, does it by itself

    @property
    def label(self) -> str:
        return self.server.label

    @property
    def facts(self) -> Json:
        return served_facts(self.server, self.source.folder)

    @property
    def max_length(self) -> int:
        positions = read_facts(self.source.folder).positions or POSITIONS
        # tokens before the last one of a request, to which a server always adds another
        return min(positions, self.server.max_length or positions) - 2

    def opened(self) -> tuple[Any, ModelFacts]:
        facts = read_facts(self.source.folder)
        limits = [limit for limit in (facts.positions, self.server.max_length) if limit]
        facts = replace(facts, positions=min(limits, default=None))
        return load_tokenizer(self.source.folder), facts

    def complete(
        self, requests: Sequence[Request], options: Writing, progress: Progress
    ) -> Iterator[tuple[int, Answer]]:
        tokenizer = load_tokenizer(self.source.folder)
        task = options if isinstance(options, TaskWriting) else None
        how = (
            f"Evaluating {self.label} on {task.task}"
            if task
            else f"Writing answers by {self.label}"
        )
        progress.start(how, len(requests))

        def ask(number: int) -> tuple[int, Answer]:
            prompt, seed = requests[number]
            if isinstance(options, TaskWriting):
                question = self._task_question(prompt, options, number, tokenizer)
            else:
                question = _question(requests[number], options, tokenizer)
            (choice,) = self.server.complete({**question, **self.server.plain}).choices
            reason = choice.finish_reason
            ended: Ended = "end" if reason in ENDED or (task and reason != "length") else "length"
            if isinstance(choice, TextChoice):
                text = choice.text
            elif isinstance(options, TaskWriting):
                text = choice.message.text
            else:
                text = message_text(choice.message, prompt, tokenizer, options.chat)
            return number, Answer(prompt.id, seed, (), text, ended)

        return self.server.all(range(len(requests)), ask, self.rows, progress)

    def score(
        self, requests: Sequence[Scoring], task: str, progress: Progress, rolling: bool = False
    ) -> Iterator[tuple[int, Likelihood]]:
        tokenizer = load_tokenizer(self.source.folder)
        longest = self.max_length
        progress.start(f"Evaluating {self.label} on {task}", len(requests))

        def ask(number: int) -> tuple[int, Likelihood]:
            before, after = requests[number]
            tokens = [*before, *after][-longest - 1 :]
            pieces = None
            prompt: Any = tokens
            if self.server.scored != "tokens":
                prompt = tokenizer.decode(tokens)
                pieces = [tokenizer.decode([token]) for token in tokens]
            question = {"prompt": prompt, "temperature": 0, "seed": 0, "max_tokens": 1}
            reply = self.server.complete({**question, "logprobs": 1, "echo": True})
            scores = PromptScores.of(reply.choices[0].logprobs, len(tokens), pieces)
            begin = max(1, len(tokens) - len(after))
            likelihood = None if scores is None else scores.likelihood(begin)
            if likelihood is None:
                raise CompressionError(
                    f"task {task!r} takes log-probabilities of the {len(tokens)} tokens of a "
                    f"prompt, and {self.label} gives others: it hides the token that opens a text, "
                    "cuts long prompts, or has another tokenizer; name another task, or serve the "
                    "model by vLLM"
                )
            return number, likelihood

        return self.server.all(range(len(requests)), ask, self.rows, progress)

    def _task_question(
        self, prompt: Prompt, options: TaskWriting, number: int, tokenizer: Any
    ) -> dict[str, Any]:
        """Return the question of a task's item by lm-eval's settings, cut on the left; a chat's
        text is made by the server."""
        from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs

        settings: dict[str, Any] = {**normalize_gen_kwargs(dict(options.settings[number]))}
        del settings["do_sample"]
        stop = handle_stop_sequences(settings.pop("until", None), tokenizer.eos_token)
        limit = settings.pop("max_gen_toks")
        question = {"temperature": 0, "max_tokens": limit, "stop": stop, "seed": options.seed}
        question |= settings
        if not prompt.messages:
            question["prompt"] = prompt.text
            if self.server.scored == "tokens":
                tokens = tokenizer(prompt.text, add_special_tokens=False)["input_ids"]
                question["prompt"] = tokens[-max(1, self.max_length + 1 - limit) :]
            return question
        question |= {"messages": prompt.messages, "stop": stop[:MOST_STOPS]}
        if options.enable_thinking is not None:
            question["chat_template_kwargs"] = {"enable_thinking": options.enable_thinking}
        if prompt.messages[-1]["role"] == "assistant":  # it goes on where that ends
            question |= {"add_generation_prompt": False, "continue_final_message": True}
        return question


def _question(request: Request, options: GenerationOptions, tokenizer: Any) -> dict[str, Any]:
    """Return the question of a prompt."""
    prompt, _ = request
    question: dict[str, Any] = {
        "max_tokens": options.max_new_tokens,
        "temperature": options.temperature,
        "seed": seed_of(request) % 2**31,  # what servers take
    }
    if options.top_p is not None:
        question["top_p"] = options.top_p
    if not is_chat(prompt, tokenizer, options.chat):
        return {**question, "prompt": prompt.text}
    question["messages"] = [with_json_arguments(message) for message in prompt.chat]
    if prompt.tools:
        question["tools"] = prompt.tools
    return question


def message_text(message: Message, prompt: Prompt, tokenizer: Any, chat: bool) -> str:
    """Return a model's whole text from a message in which a server has separated thinking and tool
    calls."""
    text = message.text
    thinking = message.reasoning_content or message.reasoning
    if thinking is not None:
        end = thinking_end(tokenizer) or THINKING_END
        begin = end.replace("/", "", 1)
        is_open = tokenizer.decode(tokens_of(prompt, tokenizer, chat)).rstrip().endswith(begin)
        opening = "" if is_open else f"{begin}\n"
        text = f"{opening}{thinking.strip()}\n{end}\n\n{text.lstrip()}"
    for call in message.tool_calls or ():
        arguments = call.arguments
        with suppress(ValueError):  # else it is shown as it was written
            arguments = from_json(arguments) if isinstance(arguments, str) else arguments
        shown = json.dumps({"name": call.name, "arguments": arguments}, ensure_ascii=False)
        text = f"{text}\n<tool_call>\n{shown}\n</tool_call>".lstrip("\n")
    return text


def open_server(
    url: str,
    model: str | None = None,
    timeout: float = SECONDS,
    options: tuple[str, str] = ("--server", "--served-model"),
) -> Server:
    """Ask a server for its models; raises `CompressionError` if it cannot be used or has no such
    model."""
    import httpx2

    try:
        parts = httpx2.URL(url.strip())
    except httpx2.InvalidURL:
        parts = httpx2.URL()
    if parts.userinfo or parts.query:
        raise CompressionError(
            f"{options[0]} holds a user's name or a key; write the address without, and put a key "
            f"into {KEY_VARIABLE}"
        )
    if parts.scheme not in ("http", "https") or not parts.host or (parts.port or 0) > MOST_PORT:
        raise CompressionError(
            f"{options[0]} {url!r} is no address of a server; write one such as "
            "http://localhost:8000"
        )
    path = parts.path.rstrip("/")
    for end in ENDPOINTS:
        path = path.removesuffix(end)
    address = str(parts.copy_with(path=path or "/v1", fragment=None))
    server = Server(address, timeout)
    by_name = {entry.id: entry for entry in server.ask("/models", Models).data}
    if model is None:
        if len(by_name) != 1:
            names = ", ".join(by_name) or "none"
            raise CompressionError(f"{address} has the models {names}; name one with {options[1]}")
        (model,) = by_name
    if model not in by_name:
        raise CompressionError(f"{address} has no model {model!r}; {known_names(model, by_name)}")
    listed = by_name[model]
    facts = {
        "server": address,
        "model": model,
        **listed.model_dump(exclude={"id"}, exclude_none=True),
    }
    root = Server(str(parts.join("/")).rstrip("/"), timeout)
    try:
        facts["version"] = root.ask("/version", Version).version
    except EndlessError:
        raise
    except CompressionError:
        # Few servers report a version.
        pass
    length = listed.max_model_len or (listed.meta.n_ctx if listed.meta else None)
    return replace(server, model=model, facts=facts, max_length=length)


def servers_of(options: ServerOptions) -> tuple[Server | None, Server | None]:
    """Open the servers of the base and of the smaller model, as far as they are named."""
    base = smaller = None
    if options.base_server is not None:
        flags = ("--base-server", "--base-served-model")
        base = open_server(options.base_server, options.base_served_model, options.timeout, flags)
    if options.server is not None:
        smaller = open_server(options.server, options.served_model, options.timeout)
    return base, smaller


def served_facts(server: Server, folder: Path) -> dict[str, Any]:
    """Return the known facts that decide a server's answers, and digests of the tokenizer's
    files."""
    files = sorted({path for pattern in TOKENIZER for path in folder.glob(pattern)})
    return {**server.facts, "tokenizer": {path.name: file_digest(path) for path in files}}


def refuse_tasks(server: Server, tasks: Sequence[EvaluationTask]) -> None:
    """Refuse a task that needs log-probabilities that the server does not give."""
    for task in tasks:
        if server.scored is None and task.kinds != {"generate_until"}:
            raise CompressionError(
                f"task {task.name!r} takes log-probabilities of its prompts, and {server.label} "
                "gives none, or wrong ones; name tasks that write their answers (generate_until), "
                "or serve the model by vLLM or SGLang"
            )
