"""The text or chat in a row, in the columns that published data sets have."""

import ast
import json
import reprlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import product
from typing import Any

from compressor.errors import CompressionError, ItemError, LeftOut, reason_of
from compressor.formatting import joined
from compressor.frozen import frozen
from compressor.model.tokenizer import as_part, check_chat, has_chat_template, joined_text

CHATS = ("messages", "conversations", "conversation")  # some data sets hold them as text
CHOSEN = "chosen"  # the better of two answers, or a chat that ends with it
# columns of a user's message
ASKING = ("prompt", "instruction", "query", "question", "problem", "input", "inputs")
ANSWERING = (
    *("completion", "response", "output", "answer", "answers", "solution", "targets"),
    CHOSEN,
)
PAIRS = tuple(product(ASKING, ANSWERING))
CHAT_COLUMNS = (*((name,) for name in CHATS), *PAIRS, (CHOSEN,))
COLUMNS = (("text",), *CHAT_COLUMNS)
CHAT_FIRST = (*CHAT_COLUMNS, ("text",))  # for models with a chat template
# columns of a row whose text the model itself has written (`traces`)
TRACE = frozenset({"id", "seed", "domain"})
SYSTEM = ("system", "system_prompt")  # columns beside a chat
DATA = ("input", "context")  # columns beside an instruction
HISTORY = "history"  # the column of earlier turns
LANGUAGE = "language"  # the column of the language that an answer should be in
BESIDE = (*SYSTEM, *DATA, HISTORY)
TOOLS = ("tools", "functions")  # columns of the tools that may be called
OURS = frozenset({"id", "domain", "ended"})  # columns of the rows that `traces` writes
MEDIA = {  # kind of medium by column, or by type of a part
    "image": "image",
    "images": "image",
    "image_url": "image",
    "video": "video",
    "videos": "video",
    "audio": "audio",
    "audios": "audio",
}
CALLING = ("function_call", "tool_call", "tool_calls")  # ShareGPT's turns that call tools
ROLES = {  # by ShareGPT's and older names
    "human": "user",
    **dict.fromkeys(("gpt", "chatgpt", "model", "bot", *CALLING), "assistant"),
    **dict.fromkeys(("observation", "function_response", "tool_response", "function"), "tool"),
}
Message = dict[str, Any]
Fields = Mapping[str, Any]  # a row, or another object


@frozen
class Conversation:
    """The conversation in a row."""

    columns: tuple[str, ...]  # the columns read
    messages: list[Message]
    tools: Any = None
    text: str | None = None  # the only text of the row, if there is one; also the user's message


def read_row(
    row: Any, column: str | None, where: str, choices: Sequence[tuple[str, ...]] = COLUMNS
) -> Conversation:
    """Read the first of these combinations of columns that a row has, or the named column (or
    `one+other`) alone.

    A system prompt, earlier turns, and the data of an instruction are read, too. Raises `ItemError`
    for a row without text or with a malformed chat."""
    if isinstance(row, ItemError):
        raise row
    if isinstance(row, str):
        row = {"text": row}
    if not isinstance(row, Mapping):
        raise ItemError(
            f"{where}: a row should be an object such as {{'text': ...}}, it is {reprlib.repr(row)}"
        )
    try:
        conversation = _conversation(row, column, where, choices)
        check_chat(conversation.messages, conversation.tools)
    except (TypeError, ValueError, RecursionError) as error:
        raise ItemError(f"{where}: {reason_of(error)}; mend or remove it") from error
    return conversation


def _conversation(
    row: Fields, column: str | None, where: str, choices: Sequence[tuple[str, ...]]
) -> Conversation:
    """Return the conversation in a row, without checking its messages."""
    if column is not None:
        choices = (tuple(column.split("+")),)
    present = {name for name, value in row.items() if value is not None}
    filled = {name for name in present if not _is_blank(name, row[name])}
    names: tuple[str, ...] = ()
    for columns in (filled, present):
        names = names or next(filter(columns.issuperset, choices), ())
    if not names:
        sought = [choice[0] for choice in choices if len(choice) == 1]
        together = [choice for choice in choices if len(choice) > 1]
        if together:
            by_place = zip(*together, strict=True)
            sides = [joined(list(dict.fromkeys(side)), "or") for side in by_place]
            sought.append(" with ".join(sides))
        shown = ", ".join(str(name) for name in row if name in present)
        raise ItemError(
            f"{where} has no column {joined(sought, 'or')}; it has {shown or 'nothing'} "
            "(SOURCE#column names one of them)"
        )
    turns = [row[name] if name not in (*CHATS, CHOSEN) else _list_in(row[name]) for name in names]
    if (
        names[-1] == CHOSEN
        and _is_chat(turns[-1])
        and _message(turns[-1][0])["role"] != "assistant"
    ):
        names = (CHOSEN,)  # it holds the question, too
        turns = turns[-1:]
    text = turns[0] if len(turns) == 1 and isinstance(turns[0], str) else None
    is_plain = column is not None or names[0] in ("text", CHOSEN, *CHATS)
    if text is not None and (is_plain or not text.strip()):
        return Conversation(names, [{"role": "user", "content": text}], text=text)
    beside = []
    if isinstance(turns[0], str):
        beside = [name for name in DATA if name not in names and _is_text(row.get(name))]
        turns[0] = "\n".join([turns[0], *(row[name] for name in beside)])
    messages = []
    for name, turn, role in zip(names, turns, ("user", "assistant"), strict=False):
        messages += _messages(row, name, turn, role, where)
    if column is None:
        earlier = []
        if messages[0].get("role") != "system":
            for name in [name for name in SYSTEM if _is_text(row.get(name))][:1]:
                earlier.append({"role": "system", "content": row[name]})
                beside.append(name)
        history = _list_in(row.get(HISTORY))
        if isinstance(history, list) and history and isinstance(history[0], list):
            beside.append(HISTORY)
            for pair in history:
                if not isinstance(pair, list) or len(pair) != 2:
                    raise ItemError(
                        f"{where}: {reprlib.repr(pair)} in {HISTORY} is no question with its answer"
                    )
                roles = zip(("user", "assistant"), pair, strict=True)
                earlier += [{"role": role, "content": content} for role, content in roles]
        elif history and not isinstance(history, str):
            beside.append(HISTORY)
            earlier += _messages(row, HISTORY, history, "user", where)
        messages = earlier + messages
    tools = next((row[name] for name in TOOLS if row.get(name)), None)
    if isinstance(tools, str) and tools.strip():
        tools = parse_json(tools, list | dict)
        if tools is None:
            raise ItemError(f"{where}: its tools are no JSON list; mend or remove them")
    tools = [tools] if isinstance(tools, Mapping) else tools
    if isinstance(tools, list):
        tools = [parse_json(tool, dict) or tool for tool in tools]
    tools = _without_none(tools) or None
    return Conversation((*names, *beside), messages, tools, None if beside else text)


def note_columns(
    row: Any, conversation: Conversation, left_out: LeftOut, known: Sequence[str] = ()
) -> None:
    """Note which of a row's columns of text were read and which were not, to be reported once."""
    left_out.columns |= {*conversation.columns}
    read = {*conversation.columns, *known, *OURS, *TOOLS, *MEDIA}
    for name, value in row.items() if isinstance(row, Mapping) else ():
        is_text = isinstance(value, str) or (value and name in BESIDE)
        if is_text and name not in read and not _is_blank(name, value):
            left_out.unread.add(str(name))


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _is_blank(name: str, value: Any) -> bool:
    """Return True for an empty list, and for text without a letter, which tables have in place of
    missing text."""
    value = _list_in(value) if name in CHATS else value
    if isinstance(value, str):
        return not value.strip()
    return isinstance(value, list) and not value


def _is_chat(value: Any) -> bool:
    return (
        isinstance(value, list) and bool(value) and all(isinstance(turn, Mapping) for turn in value)
    )


def _list_in(value: Any) -> Any:
    """Return the list in JSON text, or in text as Python prints it; other values as they are."""
    parsed = parse_json(value, list)
    if parsed is None and isinstance(value, str) and value.lstrip().startswith("["):
        with suppress(SyntaxError, ValueError, MemoryError, RecursionError):
            parsed = ast.literal_eval(value.strip())
    return parsed if isinstance(parsed, list) else value


def parse_json(text: Any, kind: Any) -> Any:
    """Return the value in JSON text if it is of this kind, and None otherwise."""
    try:
        value = json.loads(text)
    except (TypeError, ValueError, RecursionError):
        return None
    return value if isinstance(value, kind) else None


def _messages(row: Fields, name: str, turns: Any, role: str, where: str) -> list[Message]:
    """Return the messages in a column; a text is one message of this role."""
    if _is_text(turns):
        may_call = role == "assistant" and any(row.get(column) for column in TOOLS)
        calls = _calls(turns) if may_call else None
        message: Message = {"role": role, "content": turns}
        return [{**message, "content": "", "tool_calls": calls} if calls else message]
    if isinstance(turns, str):
        raise ItemError(f"{where} has an empty {name}; give it some text or remove it")
    if not _is_chat(turns):
        wanted = "be text" if name == "text" else "hold messages with role and content"
        raise ItemError(f"{where}: {name} is {reprlib.repr(turns)}, it should {wanted}")
    return [_message(turn) for turn in turns]


def _message(turn: Fields) -> Message:
    """Return a message with role and content, which ShareGPT calls `from` and `value`."""
    turn = dict(_without_none(turn))
    sender = turn.pop("from", None)
    name = turn.get("role", sender)
    role = ROLES.get(name.lower(), name) if isinstance(name, str) else name
    if "value" in turn and "content" not in turn:
        value = turn["value"]
        calls = _calls(value) if name in CALLING else None
        if calls:
            return {"role": role, "content": "", "tool_calls": calls}
        if role == "tool" and isinstance(value, Mapping):
            value = json.dumps(value, ensure_ascii=False)
        return {"role": role, "content": value}
    message = {"content": None, **turn, "role": role}
    # the second is OpenAI's from before there were tools
    calls = _calls(message.get("tool_calls") or message.pop("function_call", None))
    if calls:
        message["tool_calls"] = calls
    return message


def _calls(text: Any) -> list[Message] | None:
    """Return the tool calls in JSON text: one, or a list of names with arguments; None for other
    text."""
    parsed = text if isinstance(text, Mapping | list) else parse_json(text, list | dict)
    parsed = parsed if isinstance(parsed, list) else [parsed]
    calls = []
    for call in parsed:
        if not isinstance(call, Mapping) or not {"function", "name"} & call.keys():
            return None
        if "function" not in call:
            call = {"type": "function", "function": call}
        function = call["function"]
        if isinstance(function, Mapping):
            arguments = parse_json(function.get("arguments"), dict)
            function = {**function, **({} if arguments is None else {"arguments": arguments})}
        calls.append({**call, "function": function})
    return calls


def _without_none(value: Any) -> Any:
    """Return the value without the Nones that a table has in place of missing fields."""
    if isinstance(value, Mapping):
        return {name: _without_none(inner) for name, inner in value.items() if inner is not None}
    return [_without_none(inner) for inner in value] if isinstance(value, list) else value


def media_beside(row: Any) -> dict[str, Any]:
    """Return the pictures, video and sound in the columns of a row, by kind."""
    media = {}
    for name, kind in MEDIA.items():
        value = row.get(name) if isinstance(row, Mapping) else None
        is_empty = isinstance(value, list | str) and not value
        if value is not None and not is_empty:
            media[kind] = value
    return media


def require_template(tokenizer: Any, what: str) -> None:
    """Refuse a chat if the tokenizer has no template; `what` begins the sentence."""
    if not has_chat_template(tokenizer):
        raise CompressionError(
            f"{what}, but the model's tokenizer has no chat template; name a column of text, or "
            "put the template of the instruct version beside the tokenizer"
        )


def plain_chat(messages: Sequence[Message]) -> str:
    """Return a chat as roles and contents, for models without a chat template."""
    text = ""
    for message in messages:
        content = message.get("content") or ""
        if isinstance(content, list):
            content = joined_text([as_part(part) for part in content])
        calls = message.get("tool_calls")
        called = json.dumps(calls, ensure_ascii=False) if calls else ""
        text += f"{message['role']}: {content}{called}\n"
    return text


def untaken(where: str, error: Exception, taker: str = "chat template") -> ItemError:
    """Return the error for a chat that a template, or another `taker`, cannot take."""
    return ItemError(f"{where}: the {taker} cannot take its messages ({reason_of(error)})")
