"""Answers that an OpenAI-compatible server writes: chats through its own chat template, texts by plain completion."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json

from compressor.checkpoint.source import ModelSource
from compressor.evaluation.answers import Answer, Asked, StockWriter, Writer
from compressor.evaluation.generate import ModelFacts, read_facts
from compressor.evaluation.options import GenerationOptions
from compressor.evaluation.prompts import Prompt, tokens_of
from compressor.evaluation.server import AT_ONCE, Server, served_facts
from compressor.evaluation.server_client import Chat, ChatChoice, Completion, Message, TextChoice
from compressor.model.tokenizer import (
    THINKING_END,
    has_chat_template,
    load_tokenizer,
    thinking_end,
    with_json_arguments,
)
from compressor.progress import Progress

ENDED = ("stop", "tool_calls", "function_call")  # reasons to finish that are the model's own


@dataclass(frozen=True, slots=True)
class ServerWriter:
    """A served model that writes; `source` holds its tokenizer, by which answers are judged and kept."""

    server: Server  # checked
    source: ModelSource
    at_once: int = AT_ONCE

    @property
    def label(self) -> str:
        return self.server.label

    @property
    def facts(self) -> Mapping[str, Any]:
        return served_facts(self.server, self.source.folder)

    def opened(self) -> tuple[Any, ModelFacts]:
        found, tokenizer = read_facts(self.source.folder), load_tokenizer(self.source.folder)
        lengths = [length for length in (found.positions, self.server.max_length) if length is not None]
        return tokenizer, ModelFacts(found.stops, found.vocabulary, min(lengths, default=None))

    def write(self, asked: Sequence[Asked], options: GenerationOptions, progress: Progress) -> Iterator[Answer]:
        tokenizer = load_tokenizer(self.source.folder)
        progress.start(f"Writing answers by {self.label}", len(asked))

        def ask(each: Asked) -> Answer:
            prompt, seed = each
            settings = self._settings(each, options)
            choice: ChatChoice | TextChoice
            if is_chat(prompt, tokenizer, options.chat):
                asked_messages = prompt.messages or ({"role": "user", "content": prompt.text},)
                question = {"messages": [with_json_arguments(message) for message in asked_messages], **settings}
                question |= {"tools": prompt.tools} if prompt.tools else {}
                choice = self.server.ask("/chat/completions", Chat, question).choices[0]
                text = message_text(choice.message, prompt, tokenizer, options.chat)
            else:
                choice = self.server.ask("/completions", Completion, {"prompt": prompt.text, **settings}).choices[0]
                text = choice.text
            return Answer(prompt.id, seed, (), text, "end" if choice.finish_reason in ENDED else "length")

        for _, answer in self.server.all(asked, ask, self.at_once):
            progress.advance("")
            yield answer

    def _settings(self, asked: Asked, options: GenerationOptions) -> dict[str, Any]:
        """How an answer is written; each prompt has a seed of its own."""
        number = hashlib.sha256(f"{asked[0].id} {asked[1]}".encode()).digest()
        more = {name: value for name in ("top_p", "top_k") if (value := getattr(options, name)) is not None}
        more |= self.server.plain
        sampling = {"temperature": options.temperature, "seed": int.from_bytes(number[:4]) >> 1, **more}
        return {"model": self.server.model, "max_tokens": options.max_new_tokens, **sampling}


def writer_of(source: ModelSource, server: Server | None, rows: int | None, device: str, dtype: str) -> Writer:
    """Who writes the answers of a model: stock transformers, so many together, or its server."""
    if server is not None:
        return ServerWriter(server, source, rows or AT_ONCE)
    return StockWriter(source, device, dtype, rows)


def is_chat(prompt: Prompt, tokenizer: Any, chat: bool) -> bool:
    """Whether a prompt is put into the chat template; see `tokens_of`."""
    return prompt.text is None or chat or (bool(prompt.messages) and has_chat_template(tokenizer))


def message_text(message: Message, prompt: Prompt, tokenizer: Any, chat: bool) -> str:
    """What the model wrote, of a message from which a server has taken apart thinking and calls of tools."""
    text = message.text
    thinking = message.reasoning_content or message.reasoning
    if thinking is not None:
        end = thinking_end(tokenizer) or THINKING_END
        begin = end.replace("/", "", 1)
        open_already = tokenizer.decode(tokens_of(prompt, tokenizer, chat)).rstrip().endswith(begin)
        text = f"{'' if open_already else f'{begin}{chr(10)}'}{thinking.strip()}\n{end}\n\n{text.lstrip()}"
    for call in message.tool_calls or ():
        arguments = call.function.arguments
        with suppress(ValueError):  # else it is shown as it was written
            arguments = from_json(arguments) if isinstance(arguments, str) else arguments
        shown = json.dumps({"name": call.function.name, "arguments": arguments}, ensure_ascii=False)
        text = f"{text}\n<tool_call>\n{shown}\n</tool_call>".lstrip("\n")
    return text
