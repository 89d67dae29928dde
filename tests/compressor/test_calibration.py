"""Calibration text: formats, packing against a naive loop, seeds, independence of batches, and refusals."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compressor.calibration import Calibration, calibrate, cut, load_tokenizer, pack, sample_positions
from compressor.errors import CompressionError
from tests import small

TOKENIZER = small.tokenizer(small.CHAT)
END = 2  # </s>


def run(path: Path | str, tokenizer: Any = TOKENIZER, **settings: Any) -> Calibration:
    wanted = {"samples": 4, "length": 8, "seed": 0, "vocab": small.VOCABULARY} | settings
    return calibrate(str(path), tokenizer, **wanted)


def write(folder: Path, content: str | bytes, name: str = "data.txt") -> Path:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def decode(calibration: Calibration) -> str:
    ids = torch.cat([batch.reshape(-1) for batch in calibration.batches])
    return str(TOKENIZER.decode(ids, skip_special_tokens=False))


def test_documents_of_a_text_file_are_separated_by_blank_lines(tmp_path: Path) -> None:
    found = decode(run(write(tmp_path, "one\ntwo\n\n\nthree\n"), samples=1, length=100))
    assert sorted(found.split("</s>")) == ["", "one\ntwo\n", "three\n"]


def test_jsonl_with_text_and_messages(tmp_path: Path) -> None:
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    lines = [json.dumps({"text": "plain"}), "", json.dumps({"messages": talk})]
    found = decode(run(write(tmp_path, "\n".join(lines), "data.jsonl"), samples=1, length=100))
    assert sorted(found.split("</s>")) == ["", "<user>hi\n<assistant>yo\n", "plain"]


def test_line_separators_inside_json_text_are_text(tmp_path: Path) -> None:
    content = json.dumps({"text": "a\u2028b\x85c"}, ensure_ascii=False) + "\n"
    assert decode(run(write(tmp_path, content, "data.jsonl"), samples=1, length=100)) == "a\u2028b\x85c</s>"


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    for name, content in (("a.txt", "hello"), ("a.jsonl", '{"text": "hello"}')):
        assert decode(run(write(tmp_path, b"\xef\xbb\xbf" + content.encode(), name), samples=1, length=5)) == "hello"


REFUSED: list[tuple[str, str | bytes, str]] = [
    ("a.txt", "", "a.txt is empty; give it some text"),
    ("a.txt", "\n \n\t\n\n", "a.txt is empty"),
    ("a.jsonl", "", "a.jsonl is empty"),
    ("a.jsonl", '{"text": ""}\n{"text": " "}', "a.jsonl is empty"),
    ("a.txt", b"\xff\xfe\x00", "a.txt is not UTF-8 text .* at byte 0"),
    ("a.jsonl", '{"text": "a"}\n{', "a.jsonl, line 2 is not valid JSON"),
    ("a.jsonl", "[" * 99_999, "a.jsonl, line 1 is not valid JSON"),
    ("a.jsonl", "\n5\n", "a.jsonl, line 2: each line should be a JSON object with 'text' or 'messages'"),
    ("a.jsonl", '[{"text": "a"}]', "each line should be a JSON object"),
    ("a.jsonl", '{"body": "a"}', "line 1 has neither 'text' nor 'messages'"),
    ("a.jsonl", '{"text": 5}', "line 1 has neither 'text' nor 'messages'"),
    ("a.jsonl", '{"messages": [5]}', "line 1.*messages"),
]


@pytest.mark.parametrize(("name", "content", "message"), REFUSED)
def test_bad_data_is_refused(name: str, content: str | bytes, message: str, tmp_path: Path) -> None:
    with pytest.raises(CompressionError, match=message) as fault:
        run(write(tmp_path, content, name))
    assert "\n" not in str(fault.value)


def test_messages_need_a_chat_template(tmp_path: Path) -> None:
    path = write(tmp_path, '{"messages": [{"role": "user", "content": "x"}]}', "a.jsonl")
    with pytest.raises(CompressionError, match="the tokenizer has no chat template"):
        run(path, small.tokenizer())


def test_sources_that_are_no_file(tmp_path: Path) -> None:
    with pytest.raises(CompressionError, match=r"gone.txt does not exist; name a text or JSONL file"):
        run(tmp_path / "gone.txt")
    with pytest.raises(CompressionError, match="is a folder"):
        run(tmp_path)


def test_too_little_text_and_impossible_sizes(tmp_path: Path) -> None:
    path = write(tmp_path, "a")
    with pytest.raises(CompressionError, match="gives 1 tokens; give it more text"):
        run(write(tmp_path, '{"text": "a"}', "b.jsonl"), Words(None))
    with pytest.raises(CompressionError, match="--samples 0 and --sequence-length 8 leave nothing"):
        run(path, samples=0)
    with pytest.raises(CompressionError, match="leave nothing to run"):
        run(path, length=1)


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CompressionError, match=r"the tokenizer makes token \d+, the model knows 50"):
        run(write(tmp_path, "zzzzzz"), vocab=50)
    with pytest.raises(CompressionError, match="has no usable tokenizer"):
        load_tokenizer(tmp_path)


class Words:
    """A tokenizer with one token a character."""

    model_max_length = 5

    def __init__(self, end: int | None) -> None:
        self.eos_token_id = end

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        assert not add_special_tokens
        return {"input_ids": [ord(letter) % 90 + 3 for letter in text]}


@given(
    st.lists(st.text("abcdef", min_size=1, max_size=9), min_size=1, max_size=8),
    st.integers(1, 4), st.integers(2, 6), st.integers(1, 3), st.booleans(),
)  # fmt: skip
def test_packing_equals_a_naive_loop(documents: list[str], samples: int, length: int, batch: int, ends: bool) -> None:
    tokenizer = Words(END if ends else None)
    stream = []
    for document in documents:
        for letter in document:
            stream.append(ord(letter) % 90 + 3)
        if ends:
            stream.append(END)
    stream = stream[: samples * length]
    ids = pack(documents, tokenizer, samples, length)
    assert ids.tolist() == stream
    sequences = [stream[begin : begin + length] for begin in range(0, len(stream) - length + 1, length)] or [stream]
    batches = cut(ids, length, batch)
    assert [row for block in batches for row in block.tolist()] == sequences
    assert all(len(block) == batch for block in batches[:-1])


def test_seed_orders_documents_and_repeats(tmp_path: Path) -> None:
    path = write(tmp_path, "\n\n".join(f"{number:03d}" for number in range(50)))
    first, again, other = run(path, seed=1), run(path, seed=1), run(path, seed=2)
    assert first.identity == again.identity
    assert all(torch.equal(one, two) for one, two in zip(first.batches, again.batches, strict=True))
    assert first.identity["sha256"] != other.identity["sha256"]


def test_nothing_outside_the_seed_matters(tmp_path: Path) -> None:
    path = write(tmp_path, small.TEXT)
    expected = run(path).identity
    random.seed(5)
    torch.manual_seed(5)
    state = random.getstate()
    assert run(path).identity == expected
    assert random.getstate() == state
    assert run(path, batch_size=1).identity == expected
    assert TOKENIZER.model_max_length > 10**20 or TOKENIZER.model_max_length == small.tokenizer().model_max_length


def test_a_longer_run_begins_like_a_shorter_one(tmp_path: Path) -> None:
    path = write(tmp_path, small.TEXT)
    few = torch.cat([batch.reshape(-1) for batch in run(path, samples=2).batches])
    many = torch.cat([batch.reshape(-1) for batch in run(path, samples=5).batches])
    assert torch.equal(many[: len(few)], few)


def test_short_data_is_used_whole_and_said_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    calibration = run(write(tmp_path, "abc"), samples=4, length=100)
    assert [tuple(batch.shape) for batch in calibration.batches] == [(1, 5)]
    assert calibration.tokens == 5
    assert "fills 5 of 400 tokens" in caplog.text


@given(st.integers(0, 200), st.integers(0, 200), st.integers(0, 5))
def test_sampled_positions(tokens: int, count: int, seed: int) -> None:
    found = sample_positions(tokens, count, seed).tolist()
    assert found == sorted(set(found)) and len(found) == min(tokens, count)
    assert all(0 <= position < tokens for position in found)
    assert found == sample_positions(tokens, count, seed).tolist()
