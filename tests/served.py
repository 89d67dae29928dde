"""An OpenAI-compatible server of a small stock model on this machine's loopback; test support."""

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
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
        usage = {"prompt_tokens": len(ids), "completion_tokens": len(new)}
        return {"object": "text_completion", "choices": [choice], "usage": usage}

    def chat(self, payload: Mapping[str, Any]) -> dict[str, Any]:
        text = self.tokenizer.apply_chat_template(
            payload["messages"], tools=payload.get("tools"), tokenize=False, add_generation_prompt=True
        )
        new, ended = self.written(self.tokenizer(text, add_special_tokens=False)["input_ids"], payload)
        message = {"role": "assistant", "content": self.tokenizer.decode(new)}
        return {"choices": [{"index": 0, "message": message, "finish_reason": ended}]}

    def answer(self, path: str, payload: dict[str, Any]) -> tuple[int, Any]:
        if payload.get("model") != self.name:
            return 404, {"error": {"message": f"the model {payload.get('model')} does not exist"}}
        if self.busy:
            self.busy -= 1
            return 503, {"error": {"message": "busy"}}
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


@contextmanager
def serving(folder: Path, **how: Any) -> Iterator[Served]:
    """A server of the model in a folder."""
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
