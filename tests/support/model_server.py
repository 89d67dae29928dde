"""An OpenAI-compatible server of a small stock model on this machine's loopback; test support."""

import gzip
import itertools
import json
import socket
import struct
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
import transformers


@dataclass
class Served:
    """The server, how it behaves, and what it was asked."""

    model: Any
    tokenizer: Any
    name: str = "served"
    forms: tuple[type, ...] = (list, str)  # of prompts that get log-probabilities: token ids, text
    most: int = 20  # log-probabilities of an answer that it gives
    forgets: bool = False  # the prompt, once it decodes
    mute: range = range(0)  # numbers of the answers that have no log-probabilities, whatever is asked
    scored: int = 0  # answers with log-probabilities that were asked for
    like_llama: bool = False  # log-probabilities have the form and the ids of llama-server's
    answers: int = 10**9  # of this many requests; then it is silent until it is told to go on
    key: str | None = None
    busy: int = 0  # times that it refuses before it answers
    asked: list[dict[str, Any]] = field(default_factory=list)  # payloads that it has answered
    begun: int = 0
    go_on: threading.Event = field(default_factory=threading.Event)
    lock: Any = field(default_factory=threading.Lock)
    address: str = ""

    @torch.no_grad()
    def written(self, ids: list[int], payload: Mapping[str, Any]) -> tuple[list[int], str]:
        """Greedy tokens and why they end."""
        ids, found = list(ids), list[int]()
        stops = {self.model.generation_config.eos_token_id, self.tokenizer.eos_token_id}
        while len(found) < payload.get("max_tokens", 16):
            token = int(self.model(torch.tensor([ids + found])).logits[0, -1].argmax())
            if token in stops:
                return found, "stop"
            found.append(token)
            text = self.tokenizer.decode(found)
            if cut := [stop for stop in payload.get("stop") or () if stop and stop in text]:
                kept = self.tokenizer(text[: min(text.index(stop) for stop in cut)], add_special_tokens=False)
                return kept["input_ids"], "stop"
        return found, "length"

    @torch.no_grad()
    def completion(self, payload: Mapping[str, Any]) -> dict[str, Any]:
        prompt = payload["prompt"]
        ids = prompt if isinstance(prompt, list) else self.tokenizer(prompt, add_special_tokens=False)["input_ids"]
        new, ended = self.written(ids, payload)
        choice: dict[str, Any] = {
            "index": 0,
            "text": self.tokenizer.decode(new),
            "finish_reason": ended,
            "logprobs": None,
        }
        if payload.get("logprobs") and payload.get("echo"):
            every = ids + new
            logs = self.model(torch.tensor([every])).logits[0].float().log_softmax(-1)
            best = logs.argmax(-1)
            names = [self.tokenizer.decode([token]) for token in every]
            values = [None, *(float(logs[place, token]) for place, token in enumerate(every[1:]))]
            tops: list[Any] = [None]
            for place, token in enumerate(every[1:]):
                top = int(best[place])
                tops.append({f"{self.tokenizer.decode([top])}": float(logs[place, top])})
                tops[-1].setdefault(f"{self.tokenizer.decode([token])}", float(logs[place, token]))
            choice["logprobs"] = {"tokens": names, "token_logprobs": values, "top_logprobs": tops}
        elif payload.get("logprobs") and self.most:
            steps = [self.top(ids, payload["logprobs"])]
            for length in range(1, len(new)):
                steps.append(self.top([*(() if self.forgets else ids), *new[:length]], payload["logprobs"]))
            if self.like_llama:  # as chats have them
                content = []
                for tops in steps:
                    logs = [{"token": name, "id": token, "logprob": value} for name, token, value in tops]
                    content.append({"token": "", "logprob": 0.0, "top_logprobs": logs})
                choice["logprobs"] = {"content": content}
            else:
                logs = [{name: value for name, _, value in tops} for tops in steps]
                names, values = [""] * len(steps), [0.0] * len(steps)
                choice["logprobs"] = {"tokens": names, "token_logprobs": values, "top_logprobs": logs}
        if payload.get("logprobs"):
            self.scored += 1
            if self.scored in self.mute:
                choice["logprobs"] = None
        usage = {"prompt_tokens": len(ids), "completion_tokens": len(new)}
        return {"object": "text_completion", "choices": [choice], "usage": usage}

    @torch.no_grad()
    def top(self, ids: list[int], count: int) -> list[tuple[str, int, float]]:
        """Texts, ids and log-probabilities of the most probable next tokens."""
        best = self.model(torch.tensor([ids])).logits[0, -1].float().log_softmax(-1).topk(count)
        pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        return [(self.tokenizer.decode([token]), token, value) for token, value in pairs]

    def chat(self, payload: Mapping[str, Any]) -> dict[str, Any]:
        text = self.tokenizer.apply_chat_template(
            payload["messages"],
            tools=payload.get("tools"),
            tokenize=False,
            add_generation_prompt=True,
            **payload.get("chat_template_kwargs", {}),
        )
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        new, ended = self.written(ids, payload)
        message = {"role": "assistant", "content": self.tokenizer.decode(new)}
        choice: dict[str, Any] = {"index": 0, "message": message, "finish_reason": ended}
        if payload.get("top_logprobs"):
            tops = self.top(ids, payload["top_logprobs"])
            logs = [{"token": name, "logprob": value} for name, _, value in tops]
            choice["logprobs"] = {"content": [{"token": "", "logprob": 0.0, "top_logprobs": logs}]}
        return {"choices": [choice], "usage": {"prompt_tokens": len(ids)}}

    def answer(self, path: str, payload: dict[str, Any]) -> tuple[int, Any]:
        if payload.get("model") != self.name:
            return 404, {"error": {"message": f"the model {payload.get('model')} does not exist"}}
        if self.busy:
            self.busy -= 1
            return 503, {"error": {"message": "busy"}}
        if not payload.get("echo") and int(payload.get("logprobs") or 0) > self.most > 0:
            return 400, {"error": {"message": f"at most {self.most} log-probabilities"}}
        if payload.get("echo") and not isinstance(payload["prompt"], self.forms):
            return 400, {"error": {"message": "no echo of this"}}
        with self.lock:
            self.begun += 1
            silent = self.begun > self.answers
        if silent:
            self.go_on.wait(20)
            return 503, {}  # nobody waits any more
        with self.lock:
            made = self.chat(payload) if path.endswith("chat/completions") else self.completion(payload)
            self.asked.append(payload)
        return 200, made


def rounded_by_token(value: torch.Tensor) -> torch.Tensor:
    """[..., I] in e4m3 with a scale for each token, as vLLM rounds what fp8 weights are multiplied by."""
    scale = value.float().abs().amax(-1, keepdim=True) / 448
    return ((value.float() / scale).to(torch.float8_e4m3fn).float() * scale).to(value.dtype)


def compute_as_vllm(model: Any, linear: Collection[str], experts: Collection[Any]) -> None:
    """Have linear modules of these names, and gated experts, round their inputs, as vLLM does for fp8 weights."""
    for name in linear:
        module = model.get_submodule(name)
        module.register_forward_pre_hook(lambda _, inputs: (rounded_by_token(inputs[0]),))
    for module in experts:

        def forward(hidden: Any, index: Any, weights: Any, module: Any = module) -> Any:
            total = torch.zeros_like(hidden)
            inputs = rounded_by_token(hidden)
            for token, slot in itertools.product(range(len(hidden)), range(index.shape[1])):
                expert = int(index[token, slot])
                gate, up = (module.gate_up_proj[expert] @ inputs[token]).chunk(2)
                inner = rounded_by_token(torch.nn.functional.silu(gate) * up)
                total[token] += weights[token, slot] * (module.down_proj[expert] @ inner)
            return total

        module.forward = forward


@contextmanager
def serving(folder: Path, model: Any = None, **how: Any) -> Iterator[Served]:
    """A server of the model in a folder, or of another model with its tokenizer."""
    if model is None:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    served = Served(model, transformers.AutoTokenizer.from_pretrained(folder), **how)

    class Handler(BaseHTTPRequestHandler):
        def reply(self, status: int, content: Any) -> None:
            body = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def allowed(self) -> bool:
            return served.key is None or self.headers.get("Authorization") == f"Bearer {served.key}"

        def do_GET(self) -> None:
            if not self.allowed():
                return self.reply(401, {"error": {"message": f"no key {self.headers.get('Authorization')}"}})
            if self.path == "/v1/models":
                return self.reply(200, {"data": [{"id": served.name, "object": "model", "owned_by": "tests"}]})
            if self.path == "/version":
                return self.reply(200, {"version": "1.2"})
            return self.reply(404, {"detail": "Not Found"})

        def do_POST(self) -> None:
            payload = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if not self.allowed():
                return self.reply(401, {"error": {"message": f"no key {self.headers.get('Authorization')}"}})
            try:
                return self.reply(*served.answer(self.path, payload))
            except OSError:  # nobody waits any more
                return None

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    served.address = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield served
    finally:
        served.go_on.set()
        server.shutdown()
        server.server_close()


@dataclass(frozen=True)
class Behaviour:
    """How a stub answers one request: the bytes that it sends, and how."""

    name: str
    path: str  # of the request that it happens to
    sent: bytes = b""
    how: str = "whole"  # or: silent, reset, slow, endless
    rest: bytes = b""  # of a slow answer, sent again and again with pauses; of an endless one without
    taken: bool = False  # as an answer, in one way or another

    def __str__(self) -> str:
        return f"{self.path} {self.name}"


MODELS, VERSION, TEXT, CHAT = "/v1/models", "/version", "/v1/completions", "/v1/chat/completions"
GOOD: Mapping[str, Any] = {
    MODELS: {"data": [{"id": "stub", "owned_by": "tests", "max_model_len": 4096}]},
    VERSION: {"version": "1"},
    TEXT: {"choices": [{"index": 0, "text": "so it is.", "finish_reason": "stop"}]},
    CHAT: {"choices": [{"index": 0, "message": {"content": "So it is."}, "finish_reason": "stop"}]},
}
ELSEWHERE = "taken from elsewhere"
OUTLASTING, PAUSE = 3_000, 0.02  # parts of an answer, and seconds between two: a minute


def response(content: Any, status: int = 200, headers: str = "") -> bytes:
    """The bytes of an HTTP response; text and bytes are sent as they are."""
    body = content.encode() if isinstance(content, str) else content
    body = body if isinstance(body, bytes) else json.dumps(body).encode()
    return f"HTTP/1.1 {status} So\r\n{headers}Content-Length: {len(body)}\r\n\r\n".encode() + body


def chat(**message: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}


def text(**choice: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": "so it is.", "finish_reason": "stop", **choice}]}


def behaviours(elsewhere: str) -> list[Behaviour]:
    """Some hundred ways to answer wrongly; redirects lead to `elsewhere`."""
    found, paths = list[Behaviour](), (MODELS, TEXT, CHAT)
    for number, path in enumerate(paths):
        faults = list[Behaviour]()
        head, _, body = response(GOOD[path]).partition(b"\r\n\r\n")
        bodies = {
            "nothing": b"", "HTML": b"<html>502</html>", "a number": b"3", "null": b"null", "a list": b"[]",
            "no fields": b"{}", "JSON cut off": body[:-9], "UTF-16": body.decode().encode("utf-16"),
            "bytes of no text": b"\xff\xfe\x00" * 9, "deep nesting": b"[" * 100_000,
            "deep fields": b'{"choices":' * 5_000 + b"1" + b"}" * 5_000, "a huge number": b"9" * 9_999,
            "gzip": gzip.compress(body),
        }  # fmt: skip
        faults += [Behaviour(name, path, response(content)) for name, content in bodies.items()]
        faults += [
            Behaviour("no length", path, b"HTTP/1.1 200 OK\r\n\r\n" + body, taken=True),
            Behaviour("too long a length", path, head[:-1] + b"9999\r\n\r\n" + body),
            Behaviour("no chunk", path, b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"),
            Behaviour("no status", path, b"so it goes\r\n\r\n"),
            Behaviour("an odd status", path, b"HTTP/1.1 9999999 OK\r\n\r\n"),
            Behaviour("closed", path),
            Behaviour("reset", path, how="reset"),
            Behaviour("no content", path, b"HTTP/1.1 204 No\r\n\r\n"),
            Behaviour("large headers", path, b"HTTP/1.1 200 OK\r\nX: " + b"x" * 10**6 + b"\r\n\r\n"),
            Behaviour("silent", path, how="silent"),
        ]  # fmt: skip
        for status in (301, 302, 303, 307, 308):
            faults.append(Behaviour(f"{status}", path, response("", status, f"Location: {elsewhere}{path}\r\n")))
        for location in ("file:///etc/passwd", "", "//", "http://a:abc", "/v1/models"):
            faults.append(Behaviour(f"307 to {location}", path, response("", 307, f"Location: {location}\r\n")))
        errors = {
            "text": {"error": "no"}, "none": {"error": None}, "list": ["no"], "odd": {"error": {"message": {"a": 1}}},
            "detail": {"detail": [{"loc": 1}]}, "half": '{"error": {"message": "\\ud800"}}', "deep": "[" * 100_000,
            "HTML": "<html>", "nothing": "",
        }  # fmt: skip
        for status, (name, content) in zip((400, 401, 403, 404, 422, 429, 500, 503, 599), errors.items(), strict=True):
            faults.append(Behaviour(f"{status} {name}", path, response(content, status)))
        faults.append(Behaviour("400 cut short", path, b'HTTP/1.1 400 No\r\nContent-Length: 99\r\n\r\n{"err'))
        found += faults[number :: len(paths)]  # each fault is one of one path
    listed = ([], [{}], [{"id": 3}], [{"id": ["stub"]}], {"id": "stub"}, "stub", [None], [{"id": "a"}, {"id": "b"}])
    found += [Behaviour(f"models {data!r}", MODELS, response({"data": data})) for data in listed]
    odd = {"max_model_len": "x", "meta": [1], "root": {}, "owned_by": 3}
    for name, value in (*odd.items(), ("meta", {"n_ctx": -1}), ("max_model_len", -5)):
        content = {"data": [{"id": "stub", name: value}]}
        found.append(Behaviour(f"{name} {value!r}", MODELS, response(content), taken=True))
    for content in ("", "[]", {"version": {}}, {"version": None}, "[" * 100_000):
        found.append(Behaviour(f"version {str(content)[:20]}", VERSION, response(content), taken=True))
    found.append(Behaviour("version elsewhere", VERSION, response("", 302, f"Location: {elsewhere}\r\n"), taken=True))
    parts = [{"type": "text", "text": "So it "}, {"type": "text", "text": "is."}]
    half = '{"choices": [{"text": "a \\ud800", "message": {"content": "a \\udfff"}, "finish_reason": "stop"}]}'
    call = {"name": "add", "arguments": '{"x": "\\ud800"}'}
    messages: Sequence[tuple[str, Any, bool]] = (
        ("parts", {"content": parts}, True),
        ("half a call", {"tool_calls": [{"function": call}]}, True),
        ("deep call", {"tool_calls": [{"function": {"name": "a", "arguments": "[" * 100_000}}]}, True),
        ("thinking", {"content": "So.", "reasoning": "hm"}, True),
        ("pictures", {"content": [{"type": "image_url", "image_url": {"url": elsewhere}}]}, False),
        ("parts of text", {"content": ["So"]}, False),
        ("an object", {"content": {"text": "So"}}, False),
        ("a number", {"content": 3}, False),
        *((f"calls {calls!r}", {"content": "So", "tool_calls": calls}, False)
          for calls in ("x", 3, [3], [{}], [{"function": None}], [{"function": {"name": {}}}])),
        ("odd thinking", {"content": "So", "reasoning_content": {"a": 1}}, False),
    )  # fmt: skip
    found += [Behaviour(name, CHAT, response(chat(**message)), taken=taken) for name, message, taken in messages]
    for number, path in enumerate((TEXT, CHAT)):
        (choice,) = GOOD[path]["choices"]
        choices: Sequence[Any] = ([], [choice, choice], [None], ["a"], {"0": choice}, None, [{}], [{"text": 3}])
        choices = [*choices, [{"message": "a"}], [{**choice, "finish_reason": ["stop"]}]]
        for each in choices[number::2]:
            found.append(Behaviour(f"choices {str(each)[:60]}", path, response({"choices": each})))
        found.append(Behaviour("half a character", path, response(half)))
    return found


def unending(path: str) -> list[Behaviour]:
    """Eleven ways never to end an answer."""
    head = b"HTTP/1.1 200 OK\r\n"
    long = head + b"Content-Length: 999999999999\r\n\r\n"
    chunked = head + b"Transfer-Encoding: chunked\r\n\r\n"
    large = b" " * 2**20
    return [
        Behaviour("silent", path, how="silent"),
        Behaviour("silent after the head", path, long, "slow"),
        Behaviour("a status in bits", path, b"HTTP/1.1 200 ", "slow", rest=b"O"),
        Behaviour("a header in bits", path, head + b"X: ", "slow", rest=b"x"),
        Behaviour("header after header", path, head, "slow", rest=b"X: y\r\n"),
        Behaviour("go on, go on", path, b"", "slow", rest=b"HTTP/1.1 100 Continue\r\n\r\n"),
        Behaviour("a body in bits", path, long, "slow", rest=b" "),
        Behaviour("a body without length, in bits", path, head + b"\r\n", "slow", rest=b" "),
        Behaviour("chunks in bits", path, chunked, "slow", rest=b"1\r\n \r\n"),
        Behaviour("an endless body", path, long, "endless", rest=large),
        Behaviour("endless chunks", path, chunked, "endless", rest=b"100000\r\n" + large + b"\r\n"),
    ]


@dataclass
class Stub:
    """A server without a model, which answers well but for one behaviour."""

    behaviour: Behaviour | None = None
    trigger: str = ""  # in the request's body
    asked: list[str] = field(default_factory=list)  # bodies of requests for answers that were answered well
    strays: int = 0  # requests that were led elsewhere
    address: str = ""
    elsewhere: str = ""
    stop: threading.Event = field(default_factory=threading.Event)


@contextmanager
def stubbed() -> Iterator[Stub]:
    """A stub on this machine's loopback, and another server that redirects lead to."""
    stub = Stub()

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
            behaviour = stub.behaviour
            self.close_connection = True
            if behaviour is None or behaviour.path != self.path or stub.trigger not in body:
                if self.command == "POST" and '"echo"' not in body and "quick brown fox" not in body:
                    stub.asked.append(body)
                self.wfile.write(response(GOOD[self.path], 400 if '"echo"' in body else 200))
                return
            with suppress(OSError):
                self.misbehave(behaviour)

        do_GET = do_POST = answer  # noqa: N815

        def misbehave(self, behaviour: Behaviour) -> None:
            if behaviour.how == "whole":
                self.wfile.write(behaviour.sent)
            elif behaviour.how in ("slow", "endless"):
                self.wfile.write(behaviour.sent)
                for _ in range(OUTLASTING):
                    self.wfile.write(behaviour.rest)
                    stub.stop.wait(PAUSE if behaviour.how == "slow" else 0)
                    if stub.stop.is_set():
                        return
            elif behaviour.how == "reset":
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self.connection.close()
            else:
                self.connection.recv(1)  # until nobody listens any more

        def log_message(self, *_: Any) -> None:
            pass

    class Elsewhere(BaseHTTPRequestHandler):
        def answer(self) -> None:
            stub.strays += 1
            self.wfile.write(response(text(text=ELSEWHERE, message={"content": ELSEWHERE})))

        do_GET = do_POST = answer  # noqa: N815

    with ExitStack() as opened:
        for name, handler in (("address", Handler), ("elsewhere", Elsewhere)):
            server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
            setattr(stub, name, f"http://127.0.0.1:{server.server_port}")
            threading.Thread(target=server.serve_forever, daemon=True).start()
            opened.callback(server.server_close)
            opened.callback(server.shutdown)
        opened.callback(stub.stop.set)
        yield stub
