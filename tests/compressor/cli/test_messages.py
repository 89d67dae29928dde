"""What is told of foreign names and faults: one sentence, of letters that can be seen, whatever a checkpoint holds."""

import contextlib
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, pre_tokenizers

from compressor.cli.terminal import print_json, progress_bars
from compressor.errors import CompressionError
from tests.support import small
from tests.support.command_line import Run, names, refused

HOSTILE = "[/b][red]\x1b[2J\x07\u202egpj.\u2066x\x9b31m"


def endless() -> pre_tokenizers.Split:
    """Splits by a pattern that takes exponential time on letters alone."""
    return pre_tokenizers.Split(Regex(r"^(([a-z])+.)+[A-Z]([a-z])+$"), "isolated")


def pattern_that_gives_up(folder: Path) -> Path:
    """A tokenizer whose regular expression backtracks until the library panics."""
    made = small.tokenizer()
    inner = made.backend_tokenizer
    inner.pre_tokenizer = pre_tokenizers.Sequence([endless(), inner.pre_tokenizer])
    made.save_pretrained(folder)
    return folder


def test_bars_take_no_name_for_markup(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "200")
    with progress_bars(quiet=False) as bars:
        bars.start("[/b] plan", 1)
        bars.advance(HOSTILE)
    said = capsys.readouterr().err
    assert "[/b] plan" in said and "[/b][red]" in said
    assert not set(said) & set("\x07\u202e\u2066\x9b") and "\x1b[2J" not in said


@given(st.recursive(st.text() | st.just(HOSTILE) | st.just("\ud800 \U000e0041"), lambda x: st.lists(x, max_size=3)))
def test_json_on_the_terminal_is_of_letters_that_can_be_seen(content: Any) -> None:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        print_json(content)
    text = printed.getvalue()
    assert json.loads(text) == content and all(x.isprintable() or x in "\n\xa0" for x in text)
    text.encode()


@given(st.text() | st.just(HOSTILE))
def test_a_sentence_hides_nothing(name: str) -> None:
    said = str(CompressionError(f"tensor {name} is odd; download it again"))
    assert said.startswith("tensor ") and said.endswith(" is odd; download it again")
    assert all(x.isprintable() or x in "\n\t\xa0" for x in said)
    assert not name.isprintable() or name in said


def test_a_tokenizer_that_gives_up_leaves_nothing(run: Run, offline: None, tmp_path: Path) -> None:
    folder = pattern_that_gives_up(small.save(tmp_path / "in"))
    text = small.text_file(tmp_path, "a" * 40)
    before = names(tmp_path)
    sizes = ("--samples", 2, "--sequence-length", 16)
    made = run("compress", folder, "-o", tmp_path / "out", "--experts", 2, "--calibration", text, *sizes)
    last = made.err.splitlines()[-1] + "\n"  # the library's own note of the panic comes first
    refused(
        replace(made, err=last),
        r"the tokenizer cannot take calibration data \S+calibration\.txt: .*retry-limit.*; restore the model's tok",
    )
    assert names(tmp_path) == before
