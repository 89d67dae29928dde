"""The texts of the model that ends its answers: each answer is worked out again from its question."""

import ast
import json
import re

import pytest

from scripts.answers_texts import DOMAINS, WORDS, Chat, chats
from scripts.demo_skills import is_held_out
from scripts.train_answers_model import END, PAD, ROLES, build_tokenizer, encoded, prompt_ids

DRAWN = chats("test", 200)


def of(domain: str) -> list[Chat]:
    """The chats of a domain."""
    return [each for each in DRAWN if each.domain == domain]


def test_questions_are_different_and_not_held_out() -> None:
    assert len({each.question for each in DRAWN}) == len(DRAWN)
    assert not any(is_held_out(each.question) for each in DRAWN)
    assert all(is_held_out(each.question) for each in chats("test", 20, held_out=True))
    assert [each.domain for each in DRAWN[:5]] == list(DOMAINS)
    assert chats("test", 200) == DRAWN


def test_code_has_a_line_for_each_step() -> None:
    for each in of("code"):
        tree = ast.parse(each.answer.removeprefix("```python\n").removesuffix("\n```"))
        function = tree.body[0]
        assert isinstance(function, ast.FunctionDef)
        assert function.name in each.question
        assert len(function.body) == each.question.count(";") + 1 + (not each.question.startswith("Write"))


def test_a_story_asks_each_friend_once() -> None:
    for each in of("prose"):
        named = re.findall(r"[A-Z][a-z]+", re.split(r"asks |are ", each.question)[-1])
        places = [each.answer.rindex(name) for name in named]
        assert places == sorted(places)


def test_tool_calls_are_json() -> None:
    for each in of("tools"):
        calls = re.findall(r"<tool_call>\n(.*)\n</tool_call>", each.answer)
        assert len(calls) == each.question.count(", then ") + 1
        for call in calls:
            assert all(str(value) in each.question for value in json.loads(call)["arguments"].values())


def test_sums_are_right() -> None:
    for each in of("thinking"):
        numbers = list(map(int, re.findall(r"\d+", each.question)))
        assert each.answer.endswith(f"The total of {len(numbers)} numbers is {sum(numbers)}.")
        assert all(eval(line.replace("=", "==")) for line in each.answer.splitlines() if "+" in line)


def test_lists_are_in_order() -> None:
    for each in of("lists"):
        entries = re.findall(r"^\d+\. (.*)$", each.answer, re.MULTILINE)
        if each.question.startswith("Count"):
            first, last, step = map(int, re.findall(r"\d+", each.question))
            assert entries == [str(number) for number in range(first, last + 1, step)]
        else:
            given = [word for word in re.findall(r"[a-z]+", each.question.split(":")[1]) if word in WORDS]
            wanted = {"last": given[::-1], "sorted": sorted(given)}
            assert entries == next((order for word, order in wanted.items() if word in each.question), given)


@pytest.mark.full
def test_a_chat_is_its_question_and_its_answer_with_an_end() -> None:
    tokenizer = build_tokenizer(0)
    for each in DRAWN[:20]:
        ids, weights = encoded(tokenizer, each)
        begin = len(prompt_ids(tokenizer, each))
        assert tokenizer.decode(ids) == tokenizer.apply_chat_template(each.messages(), tokenize=False)
        assert tokenizer.decode(ids[begin:]) == each.answer + END
        assert weights == [0.1] * begin + [1.0] * (len(ids) - begin)
        assert 20 <= len(ids) - begin <= 160
        assert tokenizer.decode(ids[begin:], skip_special_tokens=True) == each.answer
    assert tokenizer.convert_ids_to_tokens(range(4)) == [END, PAD, *ROLES]


@pytest.mark.full
def test_the_template_writes_tool_calls_and_thoughts_as_the_answers_do() -> None:
    tokenizer = build_tokenizer(0)
    each = of("tools")[0]
    calls = [json.loads(call) for call in re.findall(r"<tool_call>\n(.*)\n</tool_call>", each.answer)]
    rendered = tokenizer.apply_chat_template(
        [{"role": "assistant", "tool_calls": [{"type": "function", "function": call} for call in calls]}],
        tokenize=False,
    )
    assert rendered == f"{ROLES[1]}\n{each.answer}{END}"
    thought, answer = of("thinking")[0].answer.removeprefix("<think>\n").split("\n</think>\n\n")
    turn = {"role": "assistant", "reasoning_content": thought, "content": answer}
    rendered = tokenizer.apply_chat_template([turn], tokenize=False)
    assert rendered == f"{ROLES[1]}\n{of('thinking')[0].answer}{END}"
