"""`moe-compress generate` as a user runs it: the demo model's answers, streaming, JSON, Ctrl-C, refusals."""

import io
import json
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from compressor.cli.outputs import collect
from compressor.data.demo import demo_checkpoint
from compressor.evaluation import generate as generating
from tests import small
from tests.command_line import Run, refused

pytestmark = pytest.mark.usefixtures("offline")

SUM = "add mod 10: 375+032 ="  # each digit by itself: 307


@pytest.fixture(scope="module")
def demo() -> Iterator[Path]:
    with demo_checkpoint() as folder:
        yield folder


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small.save(tmp_path_factory.mktemp("generate") / "mixtral")


def test_the_demo_model_does_its_sum(run: Run, demo: Path) -> None:
    result = run("generate", demo, SUM, "--max-new-tokens", 4)
    assert (result.status, result.out, result.err) == (0, " 307\n", "")


def test_json_tells_what_it_took(run: Run, demo: Path) -> None:
    result = run("generate", demo, SUM, "--max-new-tokens", 4, "--json")
    found = json.loads(result.out)
    assert result.status == 0 and result.err == ""
    assert found.pop("seconds_to_first_token") > 0 and found.pop("tokens_per_second") > 0
    assert found == {"prompt": SUM, "text": " 307", "prompt_tokens": len(SUM), "tokens": 4, "stopped": "length"}
    lone = json.loads(run("generate", demo, SUM, "--max-new-tokens", 1, "--json").out)
    assert lone["tokens"] == 1 and lone["tokens_per_second"] is None


def test_sampling_repeats_with_its_seed_alone(run: Run, mixtral: Path) -> None:
    def sampled(seed: int) -> str:
        result = run("generate", mixtral, "abc", "--temperature", 2, "--top-k", 50, "--top-p", 0.95, "--seed", seed)
        assert result.status == 0
        return result.out

    assert sampled(1) == sampled(1) != sampled(2)


@pytest.mark.parametrize("ending", ["", "\n"])
def test_the_prompt_may_come_from_standard_input(
    run: Run, demo: Path, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(SUM + ending))
    assert run("generate", demo, "-", "--max-new-tokens", 4).out == " 307\n"


def test_chat_puts_the_prompt_into_the_template(run: Run, tmp_path: Path) -> None:
    folder = small.save(tmp_path / "model")
    small.tokenizer(small.CHAT).save_pretrained(folder)
    found = json.loads(run("generate", folder, "hi", "--chat", "--max-new-tokens", 5, "--json").out)
    assert found["prompt"] == "hi" and found["prompt_tokens"] == len("<user>hi\n")


def test_each_piece_is_out_before_the_next_is_made(capfd: pytest.CaptureFixture[str]) -> None:
    seen = []

    def pieces() -> Iterator[str]:
        for piece in ("a", " bc", "é"):
            yield piece
            seen.append(capfd.readouterr().out)

    assert collect(pieces(), show=True) == (["a", " bc", "é"], False)
    assert seen == ["a", " bc", "é"] and capfd.readouterr().out == "\n"


@pytest.mark.parametrize("terminal", [False, True])
def test_a_terminal_gets_nothing_that_it_would_obey(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, terminal: bool
) -> None:
    said = ["a\tb\n", "\x1b]0;x\x07", "\x9b2J\u202e", "c\rd\x08", "👩\u200d🚀 می\u200cر"]
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    assert collect(iter(said), show=True) == (said, False)
    shown = "a\tb\n\ufffd]0;x\ufffd\ufffd2J\ufffdcd\ufffd👩\u200d🚀 می\u200cر"
    assert capsys.readouterr().out == (shown if terminal else "".join(said)) + "\n"


@pytest.mark.parametrize("as_json", [False, True])
def test_ctrl_c_ends_cleanly(run: Run, demo: Path, monkeypatch: pytest.MonkeyPatch, as_json: bool) -> None:
    real = generating.continue_tokens

    def cut_short(*arguments: Any) -> Iterator[int]:
        tokens = real(*arguments)
        yield from (next(tokens), next(tokens))
        raise KeyboardInterrupt

    monkeypatch.setattr(generating, "continue_tokens", cut_short)
    result = run("generate", demo, SUM, *(["--json"] if as_json else []))
    assert result.status == 130 and result.err == ""
    if as_json:
        found = json.loads(result.out)
        assert (found["text"], found["tokens"], found["stopped"]) == (" 3", 2, "interrupted")
    else:
        assert result.out == " 3\n"


def test_more_than_the_positions_is_warned_of(run: Run, mixtral: Path) -> None:
    result = run("generate", mixtral, "abc", "--max-new-tokens", 62)
    assert result.status == 0
    assert re.fullmatch(r"WARNING: a prompt of 3 tokens and up to 62 new ones [^\n]+ 64 positions [^\n]+\n", result.err)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--max-new-tokens", 0], "max_new_tokens is 0; input should be greater than 0"),
        (["--temperature", -1], "temperature is -1.0; input should be greater than or equal to 0"),
        (["--temperature", "nan"], "temperature is nan; input should be a finite number"),
        (["--temperature", 1, "--top-p", 0], "top_p is 0.0; input should be greater than 0"),
        (["--temperature", 1, "--top-p", 1.5], "top_p is 1.5; input should be less than or equal to 1"),
        (["--temperature", 1, "--top-k", 0], "top_k is 0; input should be greater than 0"),
        (["--top-k", 5], "no effect without sampling"),
        (["--seed", -1], "seed is -1; input should be greater than or equal to 0"),
        (["--dtype", "int8"], "no dtype 'int8'"),
        (["--device", "abacus"], "device 'abacus' cannot be used"),
        (["--revision", "main"], "--revision is for Hub ids only"),
        (["--chat"], "no chat template"),
    ],
)
def test_options_that_cannot_be_meant(run: Run, mixtral: Path, options: list[Any], message: str) -> None:
    refused(run("generate", mixtral, "abc", *options), re.escape(message))


def without_opening(folder: Path) -> None:
    small.edit_json(folder / "tokenizer_config.json", lambda content: content.pop("bos_token"))


def tiny_vocabulary(folder: Path) -> None:
    small.edit_json(folder / "config.json", lambda content: content.update(vocab_size=50))


def only_pickle(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


@pytest.mark.parametrize(
    ("change", "prompt", "message"),
    [
        (lambda folder: (folder / "model.safetensors").unlink(), "abc", "has neither model.safetensors nor model.onnx"),
        (only_pickle, "abc", "only as pickle files"),
        (without_opening, "", "the prompt is empty"),
        (tiny_vocabulary, "zzz", "the model knows 50"),
        (lambda folder: (folder / "generation_config.json").write_text("{"), "abc", "is not valid JSON"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"0" * 20), "abc", "model.safetensors"),
    ],
)
def test_folders_that_cannot_be_run(
    run: Run, mixtral: Path, tmp_path: Path, change: Callable[[Path], Any], prompt: str, message: str
) -> None:
    folder = Path(shutil.copytree(mixtral, tmp_path / "copy"))
    change(folder)
    refused(run("generate", folder, prompt), re.escape(message))
