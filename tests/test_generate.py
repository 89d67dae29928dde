"""`moe-compress generate` as a user runs it: an ONNX export's answers, streaming, JSON, refusals."""

import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.compressor.answers.test_onnx import export, graph, reference
from tests.support import small
from tests.support.command_line import Run, refused

PROMPT = "some text"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A graph whose tokens can be computed by hand."""
    return export(tmp_path_factory.mktemp("generate") / "graph", graph(cached=True))


def expected(count: int) -> str:
    tokenizer = small.tokenizer()
    tokens = reference(tokenizer(PROMPT)["input_ids"])[:count]
    return str(tokenizer.decode(tokens, skip_special_tokens=True))


def test_text_is_that_of_the_graph(run: Run, folder: Path) -> None:
    result = run("generate", folder, PROMPT, "--max-new-tokens", 4)
    assert (result.status, result.out, result.err) == (0, expected(4) + "\n", "")


def test_json_tells_what_it_took(run: Run, folder: Path) -> None:
    result = run("generate", folder, PROMPT, "--max-new-tokens", 4, "--json")
    found = json.loads(result.out)
    assert result.status == 0 and result.err == ""
    assert found.pop("seconds_to_first_token") > 0 and found.pop("tokens_per_second") > 0
    sizes = {"prompt_tokens": len(PROMPT), "tokens": 4, "stopped": "length"}
    assert found == {"prompt": PROMPT, "text": expected(4), **sizes}
    lone = json.loads(run("generate", folder, PROMPT, "--max-new-tokens", 1, "--json").out)
    assert lone["tokens"] == 1 and lone["tokens_per_second"] is None


def test_sampling_repeats_with_its_seed_alone(run: Run, folder: Path) -> None:
    def sampled(seed: int) -> str:
        options = ("--temperature", 9, "--top-k", 50, "--seed", seed, "--max-new-tokens", 10)
        result = run("generate", folder, "abc", *options)
        assert result.status == 0
        return result.out

    assert sampled(1) == sampled(1) != sampled(2)


@pytest.mark.parametrize("ending", ["", "\n"])
def test_the_prompt_may_come_from_standard_input(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(PROMPT + ending))
    assert run("generate", folder, "-", "--max-new-tokens", 4).out == expected(4) + "\n"


def test_chat_puts_the_prompt_into_the_template(run: Run, folder: Path) -> None:
    found = json.loads(run("generate", folder, "hi", "--chat", "--max-new-tokens", 5, "--json").out)
    assert found["prompt"] == "hi" and found["prompt_tokens"] == len("<user>hi\n")


def test_more_than_the_positions_is_warned_of(run: Run, folder: Path) -> None:
    result = run("generate", folder, "abc", "--max-new-tokens", 62)
    warning = r"WARNING: a prompt of 3 tokens and up to 62 new ones [^\n]+ 64 positions [^\n]+\n"
    assert re.match(warning, result.err), result


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--max-new-tokens", 0], "max_new_tokens should be greater than 0, it is 0"),
        (["--temperature", -1], "temperature should be greater than or equal to 0, it is -1.0"),
        (["--temperature", "nan"], "temperature should be a number, it is nan"),
        (["--temperature", 1, "--top-p", 1.5], "top_p should be less than or equal to 1, it is 1.5"),
        (["--top-k", 5], "no effect without sampling"),
        (["--device", "abacus"], "ONNX Runtime has no device 'abacus'"),
    ],
)
def test_options_that_cannot_be_meant(run: Run, folder: Path, options: list[Any], message: str) -> None:
    refused(run("generate", folder, "abc", *options), re.escape(message))
