"""Documents of calibration text: file formats, packing, floods, and refusals."""

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from compressor.data.documents import as_rows, documents, pack
from compressor.errors import CompressionError
from tests import small
from tests.texts import END, Words, decode, run, write


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
    ("a.txt", b"two\r\n" * 9_999 + b"\xff", "a.txt is not UTF-8 text .* at byte 49995"),
    ("a.jsonl", "\ufeff".encode() + b"\n" * 9_999 + b"\xc3", "a.jsonl is not UTF-8 text .* at byte 10002"),
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


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", "x\n" + 201 * "y", "a.txt, line 2 has more than 200 letters; split it up"),
        ("a.jsonl", "\n" + json.dumps({"text": 201 * "y"}), "a.jsonl, line 2 has more than 200 letters; split it up"),
        ("a.txt", "x\n\n" + 101 * "y\n", "a.txt: the document at line 3 has more than 200 letters; split it up"),
    ],
)
def test_a_line_or_document_without_end_is_refused(
    name: str, content: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("compressor.data.documents.MOST_LETTERS", 200)
    with pytest.raises(CompressionError, match=message):
        run(write(tmp_path, content, name))
    longest = ["y" * 199, "y\n" * 99, "z"]
    found = run(write(tmp_path, "\n\n\n".join(longest)), samples=1, length=1000)
    assert sorted(decode(found).split("</s>")[:-1]) == sorted(text.rstrip() + "\n" for text in longest)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(st.sampled_from("a \r\n\t\x0b\u2028\ufeff"), max_size=30))
def test_a_text_file_is_split_as_a_whole_text_is(tmp_path: Path, content: str) -> None:
    path = write(tmp_path, content)
    whole = path.read_text(encoding="utf-8-sig")
    expected = [part.strip("\n") + "\n" for part in whole.split("\n\n") if part.strip()]
    if expected:
        assert sorted(documents(str(path), 0, None)) == sorted(expected)
    else:
        with pytest.raises(CompressionError, match="is empty"):
            documents(str(path), 0, None)


def test_the_tokenizer_does_not_warn_of_long_text(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    tokenizer = small.tokenizer()
    tokenizer.model_max_length = 5
    run(write(tmp_path, small.TEXT), tokenizer)
    assert capfd.readouterr().err == ""


def test_messages_need_a_chat_template(tmp_path: Path) -> None:
    path = write(tmp_path, '{"messages": [{"role": "user", "content": "x"}]}', "a.jsonl")
    with pytest.raises(CompressionError, match="the tokenizer has no chat template"):
        run(path, small.tokenizer())


def test_sources_that_are_no_file(tmp_path: Path) -> None:
    with pytest.raises(CompressionError, match=r"gone.txt does not exist; name a text or JSONL file"):
        run(tmp_path / "gone.txt")
    with pytest.raises(CompressionError, match="is a folder"):
        run(tmp_path)


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
    ids = pack(documents, tokenizer, samples * length)
    assert ids.tolist() == stream
    sequences = [stream[begin : begin + length] for begin in range(0, len(stream) - length + 1, length)] or [stream]
    batches = as_rows(ids, length).split(batch)
    assert [row for block in batches for row in block.tolist()] == sequences
    assert all(len(block) == batch for block in batches[:-1])


def test_the_demo_is_evaluated_on_text_that_it_is_not_calibrated_with() -> None:
    assert not set(documents("demo", 0, None)) & set(documents("demo", 0, None, "evaluation"))
