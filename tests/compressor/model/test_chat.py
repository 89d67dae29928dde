"""Chat templates in a process of their own: the text that transformers gives, and limits on time and memory."""

import sys
from pathlib import Path
from typing import Any

import pytest

from compressor.errors import CompressionError
from compressor.generation.text import encode_prompt
from compressor.model import chat
from compressor.model.chat import ChatTemplate, TemplateError
from tests import small
from tests.texts import run, write

STYLES = {
    "plain": small.CHAT,
    "ChatML": "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content']"
    " + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    "Llama 2": "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}"
    "{% set system = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}{% set system = false %}"
    "{% endif %}{% for message in loop_messages %}{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate: ' ~ message.role) }}{% endif %}"
    "{% if message.role == 'user' %}{{ bos_token + '[INST] ' + (system or '') + message.content.strip() + ' [/INST]' }}"
    "{% else %}{{ ' ' + message.content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}",
    "Llama 3": "{{- bos_token }}{%- if not tools is defined %}{%- set tools = none %}{%- endif %}"
    "{%- if not date_string is defined %}{%- set date_string = strftime_now('%d %b %Y') %}{%- endif %}"
    "{{- 'Today Date: ' + date_string + '\n\n' }}{%- if tools is not none %}{{- tools | tojson(indent=4) }}{%- endif %}"
    "{%- for message in messages %}{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}"
    "{{- message['content'] | trim + '<|eot_id|>' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}",
    "loops and state": "{% set ns = namespace(n=0) %}{% for m in messages %}{% if m.role == 'system' %}{% continue %}"
    "{% endif %}{% set ns.n = ns.n + 1 %}  {{ ns.n }}: {% generation %}{{ m | tojson }}{% endgeneration %}\n"
    "{% endfor %}{{ pad_token }}{{ unk_token }}",
}
TALK = [
    {"role": "system", "content": " Be brief.\n"},
    {"role": "user", "content": "¿Qué? 🙂 \ud800 \u2028 <s>[INST]\x00 你好\n", "name": None},
    {"role": "assistant", "content": "Sí.", "tool_calls": None, "reasoning": "none", "more": [1, 0.5, {"a": []}]},
]


@pytest.mark.parametrize("style", STYLES)
def test_the_text_is_the_one_of_transformers(style: str) -> None:
    tokenizer = small.tokenizer(STYLES[style])

    def expected(talk: Any, ask: bool) -> str:
        try:
            return str(tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=ask))
        except Exception as error:
            return f"fault: {error}"

    def found(talk: Any, ask: bool) -> str:
        try:
            return template.render(talk, ask)
        except TemplateError as error:
            return f"fault: {error}"

    talks = [(talk, ask) for talk in (TALK, TALK[1:], TALK[2:], TALK[1:] * 3) for ask in (False, True)]
    with ChatTemplate(tokenizer) as template:
        texts = [found(talk, ask) for talk, ask in talks]
    assert texts == [expected(talk, ask) for talk, ask in talks]
    assert sum(text.startswith("fault: ") for text in texts) == (2 if style == "Llama 2" else 0)


def test_a_prompt_is_encoded_as_transformers_does_it() -> None:
    for name in ("ChatML", "Llama 2"):
        tokenizer = small.tokenizer(STYLES[name])
        expected = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], add_generation_prompt=True)
        assert list(encode_prompt(tokenizer, "hi", chat=True)) == expected["input_ids"]


def test_one_process_renders_all_conversations_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = list[Any]()

    def started_once() -> Any:
        started.append(start())
        return started[-1]

    start = chat._started
    monkeypatch.setattr(chat, "_started", started_once)
    run(write(tmp_path, '{"messages": [{"role": "user", "content": "some text"}]}\n' * 20, "a.jsonl"))
    assert len(started) == 1 and started[0].poll() is not None
    run(write(tmp_path, '{"text": "some text"}\n' * 20, "b.jsonl"))
    assert len(started) == 1


def test_the_process_takes_nothing_from_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "jinja2.py").write_text("raise SystemExit(7)")
    (tmp_path / "json.py").write_text("raise SystemExit(7)")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")
    with ChatTemplate(small.tokenizer(small.CHAT)) as template:
        assert template.render([{"role": "user", "content": "hi"}]) == "<user>hi\n"


GROWING = "{% set ns = namespace(x='abc') %}{% for i in range(40) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}"
TRAPS = {  # templates that would take hours, or more memory than there is
    "loops": ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "takes more than 1 s"),
    "a string that doubles": (GROWING, "needs more than 1 GiB of memory"),
    "a wide field": ("{{ '%10000000000d' % 1 }}", "needs more than 1 GiB of memory"),
    "a constant": ("{{ 'x' * 10000000000 }}", "needs more than 1 GiB of memory"),
    "a long text": ("{{ 'x' * 200000000 }}", "makes 200,000,000 letters"),
}
LIMITED = sys.platform == "linux"  # elsewhere only time is


@pytest.mark.parametrize("trap", TRAPS if LIMITED else ["loops", "a long text"])
def test_a_template_that_takes_too_much_is_refused(trap: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "SECONDS", 1 if trap == "loops" else 100)
    program, reason = TRAPS[trap]
    path = write(tmp_path, '\n{"messages": [{"role": "user", "content": "x"}]}\n', "a.jsonl")
    with pytest.raises(CompressionError, match=rf"line 2: the chat template cannot take these .*it {reason}.*'text'"):
        run(path, small.tokenizer(program))


def test_many_slow_conversations_are_one_slow_conversation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "SECONDS", 1)
    slow = "{% for a in range(100) %}{% for b in range(messages[0].content) %}{% endfor %}{% endfor %}"
    with ChatTemplate(small.tokenizer(slow)) as template:
        for _ in range(200):
            template.render([{"role": "user", "content": 1}])
        template.render([{"role": "user", "content": 20_000}])
        with pytest.raises(TemplateError, match="it takes more than 1 s"):
            list(map(template.render, [[{"role": "user", "content": 20_000}]] * 200))
