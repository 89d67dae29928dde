"""Chat templates: texts written out by hand, and failures as one sentence."""

from pathlib import Path

import pytest

from compressor.answers.prompts import Prompt, tokens_of
from compressor.errors import CompressionError
from compressor.model.tokenizer import has_chat_template, render_chat
from tests.support import small
from tests.support.texts import run, write

CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content']"
    " + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
STRICT = (
    "{% for message in messages %}{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate:\n' ~ message.role) }}{% endif %}"
    "{{ bos_token + message.content.strip() + eos_token }}{% endfor %}"
)
TALK = [{"role": "user", "content": " ¿Qué? 🙂 <s>\n"}, {"role": "assistant", "content": "Sí."}]


@pytest.mark.parametrize(
    ("template", "ask", "expected"),
    [
        (CHATML, False, "<|im_start|>user\n ¿Qué? 🙂 <s>\n<|im_end|>\n<|im_start|>assistant\nSí.<|im_end|>\n"),
        (STRICT, False, "<s>¿Qué? 🙂 <s></s><s>Sí.</s>"),
        (small.CHAT, False, "<user> ¿Qué? 🙂 <s>\n\n<assistant>Sí.\n"),
        ("{{ messages | length }}{% if add_generation_prompt %}!{% endif %}", True, "2!"),
    ],
)
def test_the_text_by_hand(template: str, ask: bool, expected: str) -> None:
    assert render_chat(small.tokenizer(template), TALK, add_generation_prompt=ask) == expected


def test_a_prompt_is_encoded_as_transformers_does_it() -> None:
    for template in (CHATML, STRICT):
        tokenizer = small.tokenizer(template)
        expected = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], add_generation_prompt=True)
        assert list(tokens_of(Prompt.of("hi"), tokenizer, chat=True)) == expected["input_ids"]
    assert has_chat_template(small.tokenizer(CHATML)) and not has_chat_template(small.tokenizer())


def test_a_template_that_fails_is_refused_in_one_sentence(tmp_path: Path) -> None:
    path = write(tmp_path, '\n{"messages": [{"role": "assistant", "content": "x"}]}\n', "a.jsonl")
    message = r"line 2: the chat template cannot take its messages \(Roles must alternate: assistant\)"
    with pytest.raises(CompressionError, match=message):
        run(path, small.tokenizer(STRICT))
    failing = small.tokenizer("{{ raise_exception('no') }}")
    with pytest.raises(CompressionError, match=r"the chat template cannot take its messages \(no\)"):
        tokens_of(Prompt.of("hi"), failing, chat=True)


def test_a_template_runs_in_a_sandbox() -> None:
    with pytest.raises(Exception, match="unsafe"):
        render_chat(small.tokenizer("{{ ''.__class__.__mro__[1].__subclasses__() }}"), TALK)
