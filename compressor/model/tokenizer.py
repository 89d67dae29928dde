"""A checkpoint's tokenizer and chat template as stock transformers loads them; an invented one is
refused."""

import json
import re
import reprlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field, StrictStr, TypeAdapter, ValidationError

from compressor.errors import CompressionError, reason_of
from compressor.frozen import frozen
from compressor.model.remote_code import load_stock
from compressor.prompt_date import dated_template
from compressor.records import Json, read_object

THINKING_END = "</think>"
# in templates
THINKING_ENDS = re.compile(
    r"</[\w:]*think\w*>|\[/think\]|◁/think▷|<\|channel\|>final", re.IGNORECASE
)
VOCABULARIES = [
    *("tokenizer.json", "tokenizer.*.json", "tekken.json", "vocab*"),
    *("*.model", "*.model.v*", "*.tiktoken", "*.spm", "*.bpe", "*.codes"),
]
MARGIN = 4096  # tokens after the requested ones, which may differ if the text is cut off
LONGEST = 96  # most letters of a token, except in blanks, marks or unknown text


def load_tokenizer(folder: Path) -> Any:
    """Return the checkpoint's tokenizer; raise `CompressionError` if it has none, or one without a
    token of text."""
    try:
        tokenizer = load_stock("AutoTokenizer", folder)
        tokenizer.name_or_path = str(folder)
        # a processor's own files, where tokenizers don't look, may have one
        for name in ("chat_template.json", "processor_config.json"):
            if not tokenizer.chat_template and (folder / name).is_file():
                template = read_object(folder / name).get("chat_template")
                tokenizer.chat_template = template if isinstance(template, str) else None
        files = [*VOCABULARIES, *(getattr(tokenizer, "vocab_files_names", None) or {}).values()]
        if files == VOCABULARIES:
            files.append("tokenizer_config.json")  # names a class that needs no vocabulary
        if not any(path.is_file() for name in files for path in folder.glob(name)):
            kind = type(tokenizer).__name__
            raise ValueError(f"no file there defines the {kind} that transformers makes up")
        # the base class of slow tokenizers has no vocabulary
        with suppress(NotImplementedError):
            tokens = set(tokenizer.get_vocab().values())
            if tokens <= set(getattr(tokenizer, "all_special_ids", ())):
                raise ValueError("its vocabulary holds nothing but special tokens")
    except Exception as error:  # tokenizer classes raise anything
        raise CompressionError(
            f"{folder} has no usable tokenizer ({reason_of(error)}); copy those of the original "
            "model there"
        ) from error
    return tokenizer


def first_part(tokenizer: Any, text: str, most: int) -> tuple[str, list[int]]:
    """Return the beginning of a text, and its first `most` tokens without special ones; read no
    more of a long text.

    They are the tokens of the whole text unless a token depends on more than the `MARGIN` tokens
    after it, or has more than `LONGEST` letters."""
    part = text[: LONGEST * (most + MARGIN)]
    return part, tokenizer(part, add_special_tokens=False)["input_ids"][:most]


def says_something(tokenizer: Any, ids: Sequence[int]) -> bool:
    """Return True if any of a text's tokens is not the one for unknown text."""
    unknown = getattr(tokenizer, "unk_token_id", None)
    return any(token != unknown for token in ids)


def no_token(text: str) -> CompressionError:
    """Return the error for a text without a known token."""
    return CompressionError(
        f"the tokenizer has no token for {text}, or only the one for what is unknown; restore the "
        "tokenizer's files from the original model, or give text that it was made for"
    )


def check_vocabulary(largest: int, vocabulary: int, maker: str = "tokenizer") -> None:
    """Refuse a tokenizer or processor whose largest token is not in the model's vocabulary."""
    if largest >= vocabulary:
        raise CompressionError(
            f"the {maker} makes token {largest}, the model knows {vocabulary}; they do not belong "
            "together"
        )


def has_chat_template(tokenizer: Any) -> bool:
    """Return True if the tokenizer has a chat template."""
    return bool(getattr(tokenizer, "chat_template", None))


def templates_of(tokenizer: Any) -> dict[str, str]:
    """Return the tokenizer's chat templates by name; a single one is called default."""
    templates = getattr(tokenizer, "chat_template", None) or {}
    return dict(templates) if isinstance(templates, dict) else {"default": templates}


def thinking_end(tokenizer: Any) -> str | None:
    """Return the text that ends a model's thinking in its chat template, else `</think>` if that is
    one token.

    None if the model has neither.
    """
    for text in templates_of(tokenizer).values():
        match = THINKING_ENDS.search(text)
        if match:
            return match[0]
    return THINKING_END if THINKING_END in tokenizer.get_vocab() else None


# Words that no template has.
PROBE = "Probe7"
WORD = "Word9"
USER = {"role": "user", "content": "Hello"}
CALL_ID = "call12345"  # Mistral's templates want nine letters
CONTENT_REPR = re.compile(rf"""['"]text['"]: ?['"]{WORD}""")
ARGUMENT_REPR = re.compile(rf"'key': '{PROBE}'")
TOOL = {"name": PROBE, "description": "-", "parameters": {"type": "object", "properties": {}}}


@frozen
class ChatForm:
    """The forms of messages that a chat template renders, found by rendering probes."""

    strings: frozenset[str]  # roles whose content may be text
    parts: frozenset[str]  # roles whose content may be a list of parts
    json_arguments: bool  # a call's arguments have to be JSON text, not an object
    # possible contents of a message that only calls tools; empty if unknown
    silence: tuple[str | None, ...]
    wrapped_tools: bool  # a tool has to be {"type": "function", "function": {...}}

    def message(self, message: Json) -> dict[str, Any]:
        """Return a message in a form that the template renders; raise ValueError if there is
        none."""
        adapted = with_json_arguments(message) if self.json_arguments else dict(message)
        role = message.get("role")
        content = message.get("content")
        if isinstance(content, str):
            if role in self.parts and role not in self.strings:
                adapted["content"] = [{"type": "text", "text": content}]
        elif isinstance(content, list):
            adapted["content"] = [as_part(part) for part in content]
            if role not in self.parts:
                adapted["content"] = joined_text(adapted["content"])
        elif content is not None:
            raise ValueError(f"the content of a message is a {type(content).__name__}")
        if message.get("tool_calls") and not content and content not in (self.silence or [content]):
            adapted["content"] = self.silence[0]
        return adapted

    def tools(self, tools: Any) -> Any:
        """Return the tools of a chat in a form that the template renders."""
        if not self.wrapped_tools or not isinstance(tools, list):
            return tools
        return [
            {"type": "function", "function": tool} if "name" in tool else tool for tool in tools
        ]


class _Part(BaseModel):
    type: StrictStr = ""
    text: StrictStr | None = None


class _Message(BaseModel):
    role: StrictStr = Field(min_length=1)
    tool_calls: list[dict[str, Any]] | None = None


class _Saying(_Message):
    content: StrictStr | list[StrictStr | _Part]


class _Calling(_Message):
    content: None
    tool_calls: list[dict[str, Any]]


MESSAGES = TypeAdapter(list[_Saying | _Calling])


def check_chat(messages: Sequence[Any], tools: Any) -> None:
    """Raise ValueError for a message without role or content, and for half a character, which
    tokenizers refuse."""
    try:
        json.dumps([messages, tools], ensure_ascii=False, default=id).encode()
        MESSAGES.validate_python(messages)
    except UnicodeEncodeError as error:
        raise ValueError("it has half a character, or a byte that is no UTF-8") from error
    except ValidationError as error:
        shown = reprlib.repr(messages[int(error.errors()[0]["loc"][0])])
        raise ValueError(
            f"{shown} is no message with a role, and with text or parts as its content"
        ) from error


def as_part(part: Any) -> Any:
    """Return text as a part of type `text`, and other parts unchanged."""
    if isinstance(part, str):
        return {"type": "text", "text": part}
    is_text = isinstance(part, Mapping) and "text" in part
    if is_text and part.get("type") in (None, "input_text", "output_text"):
        return {"type": "text", "text": part["text"]}
    return part


def joined_text(parts: Sequence[Any]) -> str:
    """Return the texts of a message's parts, joined as by servers; raise ValueError for another
    part."""
    texts = []
    for part in parts:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text" or not isinstance(part.get("text"), str):
            raise ValueError(f"it takes text alone, and the content has a part of type {kind!r}")
        texts.append(part["text"])
    return "\n".join(texts)


def with_json_arguments(message: Json) -> dict[str, Any]:
    """Return a message whose tool calls have arguments in JSON text, which servers and some
    templates require."""
    if not message.get("tool_calls"):
        return dict(message)
    calls = []
    for call in message["tool_calls"]:
        function = call.get("function")
        if isinstance(function, Mapping) and isinstance(function.get("arguments"), Mapping):
            arguments = json.dumps(function["arguments"], ensure_ascii=False)
            call = {**call, "function": {**function, "arguments": arguments}}
        calls.append(call)
    return {**message, "tool_calls": calls}


@lru_cache(maxsize=8)
def chat_form(tokenizer: Any, template: str) -> ChatForm:
    """Find the forms of messages that the tokenizer's chat template renders."""

    def rendered(*messages: Any, **options: Any) -> str:
        try:
            return str(tokenizer.apply_chat_template(list(messages), tokenize=False, **options))
        except Exception:  # templates raise anything for a form that they don't take
            return ""

    def calling(as_json: bool, content: str | None) -> dict[str, Any]:
        arguments = {"key": PROBE}
        function = {"name": "look", "arguments": json.dumps(arguments) if as_json else arguments}
        call = {"id": CALL_ID, "type": "function", "function": function}
        return {"role": "assistant", "content": content, "tool_calls": [call]}

    shown = []
    for as_json, content in product((False, True), (None, "")):
        text = rendered(USER, calling(as_json, content))
        if PROBE in text and "None" not in text and not ARGUMENT_REPR.search(text):
            shown.append((as_json, content))
    json_arguments = bool(shown) and shown[0][0]
    silence = tuple(content for as_json, content in shown if as_json == json_arguments)
    call = calling(json_arguments, silence[0] if silence else "")
    answered = {"role": "tool", "tool_call_id": CALL_ID, "name": "look"}
    strings = set()
    parts = set()
    for role, before, message, after in (
        ("system", (), {"role": "system"}, (USER,)),
        ("user", (), {"role": "user"}, ()),
        ("assistant", (USER,), {"role": "assistant"}, ()),
        ("tool", (USER, call), answered, ()),
    ):
        if WORD in rendered(*before, {**message, "content": WORD}, *after):
            strings.add(role)
        text = rendered(*before, {**message, "content": [{"type": "text", "text": WORD}]}, *after)
        if WORD in text and not CONTENT_REPR.search(text):
            parts.add(role)
    takes_bare = PROBE in rendered(USER, tools=[TOOL])
    takes_wrapped = PROBE in rendered(USER, tools=[{"type": "function", "function": TOOL}])
    return ChatForm(
        frozenset(strings),
        frozenset(parts),
        json_arguments,
        silence,
        takes_wrapped and not takes_bare,
    )


def render_chat(tokenizer: Any, messages: Sequence[Any], tools: Any = None, **options: Any) -> Any:
    """Return the text of a conversation, rendered by the chat template of a tokenizer or processor,
    or what `options` ask for in its place; it may raise any exception."""
    form = chat_form(tokenizer, str(tokenizer.chat_template))
    adapted = [form.message(message) for message in messages]
    templates = templates_of(tokenizer)
    name = "tool_use" if tools and "tool_use" in templates else "default"
    options = {"tokenize": False, **options, **dated_template(templates, name)}
    return tokenizer.apply_chat_template(adapted, tools=form.tools(tools), **options)
