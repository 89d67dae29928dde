"""Chats of published data sets, in the forms that chat templates take."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from compressor.data.documents import documents
from compressor.data.sources import WeightedSource
from compressor.errors import CompressionError, LeftOut
from tests.support import small
from tests.support.texts import write

TOOLS = "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"


def template(content: str, call: str) -> str:
    """A chat template with these forms of a message's content and of a call's arguments."""
    calls = "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }} " + call + "</call>{% endfor %}"
    return TOOLS + "{% for m in messages %}{{ '<' + m.role + '>' }}" + content + calls + "{{ '\\n' }}{% endfor %}"


STRINGS = "{% if m.content %}{{ m.content + '' }}{% endif %}"
PARTS = "{% for p in m.content or [] %}{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}"
BOTH = "{% if m.content is string %}{{ m.content }}{% else %}" + PARTS + "{% endif %}"
AS_JSON = "{{ c.function.arguments | tojson }}"
ITERATED = "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }};{% endfor %}"
TEMPLATES = {
    "iterated arguments": template("{{ m.content or '' }}", ITERATED),
    "arguments as JSON": template(BOTH, AS_JSON),
    "strings alone": template(STRINGS, "{{ '' + c.function.arguments }}"),
    "printed arguments": template(STRINGS, "{{ c.function.arguments }}"),
    "parts alone": template(PARTS, AS_JSON),
}
ARGUMENTS = {"city": "Rome", "days": 2}
SHOWN = {name: json.dumps(ARGUMENTS) for name in TEMPLATES} | {"iterated arguments": "city=Rome;days=2;"}
FUNCTION = {"name": "look", "description": "d", "parameters": {"type": "object", "properties": {}}}


def rendered(row: Any, name: str, folder: Path) -> str:
    tokenizer = small.tokenizer(TEMPLATES[name])
    path = write(folder, json.dumps(row), "rows.jsonl")
    (document,) = documents(WeightedSource(str(path), 1.0), 0, tokenizer)
    assert document.is_chat
    return document.text


def chat(arguments: Any, **more: Any) -> dict[str, Any]:
    call = {"id": "c0", "type": "function", "function": {"name": "look", "arguments": arguments}}
    asked = {"role": "user", "content": "Rain?"}
    calling = {"role": "assistant", "content": None, "tool_calls": [call]}
    answered = {"role": "tool", "tool_call_id": "c0", "content": "no"}
    return {"messages": [asked, calling, answered, {"role": "assistant", "content": "Dry."}], **more}


@pytest.mark.parametrize("name", TEMPLATES)
def test_arguments_as_json_text_are_rendered_as_objects_are(name: str, tmp_path: Path) -> None:
    expected = f"<user>Rain?\n<assistant><call>look {SHOWN[name]}</call>\n<tool>no\n<assistant>Dry.\n"
    assert rendered(chat(ARGUMENTS), name, tmp_path) == expected
    assert rendered(chat(json.dumps(ARGUMENTS)), name, tmp_path) == expected
    flat = chat(None)
    flat["messages"][1]["tool_calls"] = [{"function": {"name": "look", "arguments": json.dumps(ARGUMENTS)}}]
    assert rendered({"messages": json.dumps(flat["messages"])}, name, tmp_path) == expected


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("form", [lambda call: call, lambda call: [call, call]])
def test_calls_and_results_in_sharegpts_form(form: Any, name: str, tmp_path: Path) -> None:
    calls = form({"name": "look", "arguments": ARGUMENTS})
    turns = {"human": "Rain?", "function_call": json.dumps(calls), "observation": "no", "gpt": "Dry."}
    row = {
        "conversations": [{"from": role, "value": value} for role, value in turns.items()],
        "tools": json.dumps([FUNCTION]),
    }
    shown = f"<call>look {SHOWN[name]}</call>" * (len(calls) if isinstance(calls, list) else 1)
    expected = f"{json.dumps(FUNCTION)}<user>Rain?\n<assistant>{shown}\n<tool>no\n<assistant>Dry.\n"
    assert rendered(row, name, tmp_path) == expected


@pytest.mark.parametrize("name", TEMPLATES)
def test_content_as_parts_is_never_shown_as_a_list_nor_lost(name: str, tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "input_text", "text": "two"}, "three"]
    joined = "onetwothree" if name in ("arguments as JSON", "parts alone") else "one\ntwo\nthree"
    row = {"messages": [{"role": role, "content": parts} for role in ("system", "user", "assistant")]}
    row["messages"].append({"role": "user", "content": "four"})
    expected = f"<system>{joined}\n<user>{joined}\n<assistant>{joined}\n<user>four\n"
    assert rendered(row, name, tmp_path) == expected


@pytest.mark.parametrize("arguments", ["", "{}", "not json", "[1]", None])
def test_odd_arguments_are_rendered_as_they_are_or_left_out(arguments: Any, tmp_path: Path) -> None:
    rows = f"{json.dumps(chat(arguments))}\n{json.dumps(chat(ARGUMENTS))}"
    path = write(tmp_path, rows, "rows.jsonl")
    for text in TEMPLATES.values():
        left_out = LeftOut("rows")
        found = list(documents(WeightedSource(str(path), 1.0), 0, small.tokenizer(text), left_out=left_out))
        assert len(found) + left_out.faults == 2 and left_out.used == len(found) >= 1


def test_queries_with_calls_for_answers_are_chats(tmp_path: Path) -> None:
    """As xlam-function-calling has them."""
    calls = json.dumps([{"name": "look", "arguments": ARGUMENTS}])
    row = {"query": "Rain?", "answers": calls, "tools": json.dumps([FUNCTION])}
    shown = f"{json.dumps(FUNCTION)}<user>Rain?\n<assistant><call>look {json.dumps(ARGUMENTS)}</call>\n"
    assert rendered(row, "strings alone", tmp_path) == shown


USER = {"role": "user", "content": "Rain?"}
ANSWER = {"role": "assistant", "content": "Dry."}
CALL = {"type": "function", "function": {"name": "look", "arguments": ARGUMENTS}}
RESULT = {"role": "tool", "content": '{"rain": false}'}
TOOL_TURNS = [USER, {"role": "assistant", "content": "", "tool_calls": [CALL]}, RESULT, ANSWER]
AS_TEXT = {"name": "look", "arguments": json.dumps(ARGUMENTS)}
FORMS: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {  # rows, and their messages by hand
    "openai's older calls": (
        {
            "messages": [
                USER,
                {"role": "assistant", "content": None, "function_call": AS_TEXT},
                {"role": "function", "name": "look", "content": RESULT["content"]},
                ANSWER,
            ],
            "functions": [FUNCTION],
        },
        [*TOOL_TURNS[:2], {**RESULT, "name": "look"}, ANSWER],
    ),
    "sharegpt with objects": (
        {
            "conversations": [
                {"from": "human", "value": "Rain?", "role": None},
                {"from": "function_call", "value": [AS_TEXT]},
                {"from": "observation", "value": {"rain": False}},
                {"from": "gpt", "value": "Dry.", "weight": None},
            ],
            "tools": [json.dumps(FUNCTION)],
        },
        TOOL_TURNS,
    ),
    "roles of sharegpt beside content": (
        {"conversation": [{"role": "human", "content": "Rain?"}, {"role": "gpt", "content": "Dry."}], "tools": ""},
        [USER, ANSWER],
    ),
    "roles beside values": (
        {"conversations": [{"role": "user", "value": "Rain?"}, {"role": "assistant", "value": "Dry."}]},
        [USER, ANSWER],
    ),
    "calls as text": (
        {
            "messages": [USER, {"role": "assistant", "tool_calls": json.dumps([CALL])}, RESULT, ANSWER],
            "tools": [FUNCTION],
        },
        TOOL_TURNS,
    ),
    "calls without a function": (
        {"messages": [USER, {"role": "assistant", "tool_calls": [AS_TEXT]}, RESULT, ANSWER], "tools": [FUNCTION]},
        TOOL_TURNS,
    ),
    "capital roles": (
        {"conversations": [{"from": "Human", "value": "Rain?"}, {"from": "GPT", "value": "Dry."}]},
        [USER, ANSWER],
    ),
    "as python prints": ({"messages": str(TOOL_TURNS), "tools": json.dumps(FUNCTION)}, TOOL_TURNS),
    "preferred chat": ({"prompt": "Rain?", "chosen": [USER, ANSWER], "rejected": [USER]}, [USER, ANSWER]),
    "preferred turn": ({"prompt": [USER], "chosen": [ANSWER], "rejected": [ANSWER]}, [USER, ANSWER]),
    "preferred chat alone": ({"chosen": json.dumps([USER, ANSWER]), "rejected": "[]"}, [USER, ANSWER]),
    "queries": ({"query": "Rain?", "response": "Dry.", "text": None}, [USER, ANSWER]),
    "problems": ({"problem": "Rain?", "solution": "Dry."}, [USER, ANSWER]),
    "flan": ({"inputs": "Rain?", "targets": "Dry."}, [USER, ANSWER]),
    "input alone": ({"instruction": "", "input": "Rain?", "output": "Dry."}, [USER, ANSWER]),
}


@pytest.mark.parametrize("name", ["iterated arguments", "arguments as JSON"])
@pytest.mark.parametrize("form", FORMS)
def test_rows_of_public_forms_are_rendered_as_transformers_renders_them_by_hand(
    form: str, name: str, tmp_path: Path
) -> None:
    row, messages = FORMS[form]
    tools = [FUNCTION] if row.get("tools") or "functions" in row else None
    stock = small.tokenizer(TEMPLATES[name]).apply_chat_template(messages, tools=tools, tokenize=False)
    assert rendered(row, name, tmp_path) == stock


def test_a_tool_is_wrapped_where_the_template_looks_inside(tmp_path: Path) -> None:
    looking = "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}" + small.CHAT
    row = {"messages": [{"role": "user", "content": "hi"}], "tools": [FUNCTION]}
    path = write(tmp_path, json.dumps(row), "rows.jsonl")
    (document,) = documents(WeightedSource(str(path), 1.0), 0, small.tokenizer(looking))
    assert document.text == "[look]<user>hi\n"


BESIDE = [
    ({"instruction": "Sort.", "input": "3 1", "output": "1 3"}, "<user>Sort.\n3 1\n<assistant>1 3\n", ""),
    ({"instruction": "Sort.", "input": "", "output": "1"}, "<user>Sort.\n<assistant>1\n", ""),
    ({"instruction": "When?", "context": "1910", "response": "Then."}, "<user>When?\n1910\n<assistant>Then.\n", ""),
    ({"system": "Be.", "prompt": "Why?", "response": "So."}, "<system>Be.\n<user>Why?\n<assistant>So.\n", ""),
    (
        {"system": "S", "conversations": [{"from": "user", "value": "hi"}, {"from": "assistant", "value": "yo"}]},
        "<system>S\n<user>hi\n<assistant>yo\n",
        "",
    ),
    ({"system": "S", "messages": [{"role": "system", "content": "T"}]}, "<system>T\n", "system"),
    (
        {"instruction": "And?", "input": "", "output": "Yes.", "system": "S", "history": [["q", "a"]]},
        "<system>S\n<user>q\n<assistant>a\n<user>And?\n<assistant>Yes.\n",
        "",
    ),
    ({"question": "2+2?", "answer": "4", "level": "easy"}, "<user>2+2?\n<assistant>4\n", "level"),
    ({"instruction": "q", "input": ["a"], "output": "b"}, "<user>q\n<assistant>b\n", "input"),
    ({"question": "q", "context": {"a": "b"}, "answer": "b"}, "<user>q\n<assistant>b\n", "context"),
    ({"text": "t", "messages": "[]"}, "t", ""),
    ({"system_prompt": "S", "question": "q", "response": "a"}, "<system>S\n<user>q\n<assistant>a\n", ""),
    ({"input": "in", "output": "out"}, "<user>in\n<assistant>out\n", ""),
    ({"text": "t", "summary": "s", "number": 3, "none": None, "empty": " "}, "t", "summary"),
    ({"text": "t", "prompt": "p", "completion": "c", "id": "7"}, "<user>p\n<assistant>c\n", "text"),
    ({"text": "t", "messages": [{"role": "user", "content": "hi"}]}, "<user>hi\n", "text"),
    ({"prompt": "p", "chosen": "c", "rejected": "r"}, "<user>p\n<assistant>c\n", "rejected"),
    (
        {"instruction": "q", "output": "a", "history": '[["b", "c"]]'},
        "<user>b\n<assistant>c\n<user>q\n<assistant>a\n",
        "",
    ),
]


@pytest.mark.parametrize(("row", "text", "unread"), BESIDE)
def test_what_stands_beside_a_chat_is_read_or_named(
    row: dict[str, Any], text: str, unread: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path, f"{json.dumps(row)}\n" * 3, "rows.jsonl")
    left_out = LeftOut("rows of data")
    found = documents(WeightedSource(str(path), 1.0), 0, small.tokenizer(small.CHAT), left_out=left_out)
    assert [document.text for document in found] == [text] * 3
    with caplog.at_level(logging.WARNING):
        left_out.report()
    why = "a chat goes first where the model has a template; " if unread == "text" else ""
    named = [f"rows of data have columns of text that are not read: {unread} ({why}SOURCE#column reads one)"]
    assert [record.message for record in caplog.records] == (named if unread else [])


@pytest.mark.parametrize("history", [[["q"]], [["q", "a"], "qa"], [["q", "a"], None]])
def test_history_that_is_no_pairs_is_quoted(history: Any, tmp_path: Path) -> None:
    row = {"instruction": "q", "output": "a", "history": history}
    path = write(tmp_path, json.dumps(row), "rows.jsonl")
    with pytest.raises(CompressionError, match=r"line 1: .* in history is no question with its answer"):
        list(documents(WeightedSource(str(path), 1.0), 0, small.tokenizer(small.CHAT)))
