"""Answers that an OpenAI-compatible server writes: chats through its own chat template, texts by plain completion."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from pydantic_core import from_json

from compressor.checkpoint.source import ModelSource
from compressor.evaluation.answers import Answer, GenerationRequest, StockGenerator, TextGenerator
from compressor.evaluation.generate import ModelFacts, read_facts
from compressor.evaluation.options import GenerationOptions
from compressor.evaluation.prompts import Prompt, is_chat, tokens_of
from compressor.evaluation.server import AT_ONCE, Server, served_facts
from compressor.evaluation.server_client import Chat, ChatChoice, Completion, Message, TextChoice
from compressor.model.tokenizer import (
    THINKING_END,
    load_tokenizer,
    thinking_end,
    with_json_arguments,
)
from compressor.progress import Progress

ENDED = ("stop", "tool_calls", "function_call")  # reasons to finish that are the model's own


@dataclass(frozen=True, slots=True)
class ServedGenerator:
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
        facts = read_facts(self.source.folder)
        tokenizer = load_tokenizer(self.source.folder)
        lengths = [length for length in (facts.positions, self.server.max_length) if length is not None]
        return tokenizer, replace(facts, positions=min(lengths, default=None))

    def write(
        self, asked: Sequence[GenerationRequest], options: GenerationOptions, progress: Progress
    ) -> Iterator[Answer]:
        tokenizer = load_tokenizer(self.source.folder)
        progress.start(f"Writing answers by {self.label}", len(asked))

        def ask(request: GenerationRequest) -> Answer:
            prompt, seed = request
            settings = self._settings(request, options)
            choice: ChatChoice | TextChoice
            if is_chat(prompt, tokenizer, options.chat):
                question = {"messages": [with_json_arguments(message) for message in prompt.chat], **settings}
                if prompt.tools:
                    question["tools"] = prompt.tools
                choice = self.server.ask("/chat/completions", Chat, question).choices[0]
                text = message_text(choice.message, prompt, tokenizer, options.chat)
            else:
                choice = self.server.ask("/completions", Completion, {"prompt": prompt.text, **settings}).choices[0]
                text = choice.text
            return Answer(prompt.id, seed, (), text, "end" if choice.finish_reason in ENDED else "length")

        for answer in self.server.all(asked, ask, self.at_once):
            progress.advance("")
            yield answer

    def _settings(self, asked: GenerationRequest, options: GenerationOptions) -> dict[str, Any]:
        """How an answer is written; each prompt has a seed of its own."""
        digest = hashlib.sha256(f"{asked[0].id} {asked[1]}".encode()).digest()
        settings = {
            "model": self.server.model,
            "max_tokens": options.max_new_tokens,
            "temperature": options.temperature,
            "seed": int.from_bytes(digest[:4]) >> 1,
            **self.server.plain,
        }
        if options.top_p is not None:
            settings["top_p"] = options.top_p
        return settings


def writer_of(source: ModelSource, server: Server | None, rows: int | None, device: str, dtype: str) -> TextGenerator:
    """The writer of a model's answers: stock transformers, so many together, or its server."""
    if server is not None:
        return ServedGenerator(server, source, rows or AT_ONCE)
    return StockGenerator(source, device, dtype, rows)


def message_text(message: Message, prompt: Prompt, tokenizer: Any, chat: bool) -> str:
    """The text that the model wrote, of a message from which a server has taken apart thinking and calls of tools."""
    text = message.text
    thinking = message.reasoning_content or message.reasoning
    if thinking is not None:
        end = thinking_end(tokenizer) or THINKING_END
        begin = end.replace("/", "", 1)
        is_open = tokenizer.decode(tokens_of(prompt, tokenizer, chat)).rstrip().endswith(begin)
        opening = "" if is_open else f"{begin}\n"
        text = f"{opening}{thinking.strip()}\n{end}\n\n{text.lstrip()}"
    for call in message.tool_calls or ():
        arguments = call.function.arguments
        with suppress(ValueError):  # else it is shown as it was written
            arguments = from_json(arguments) if isinstance(arguments, str) else arguments
        shown = json.dumps({"name": call.function.name, "arguments": arguments}, ensure_ascii=False)
        text = f"{text}\n<tool_call>\n{shown}\n</tool_call>".lstrip("\n")
    return text
