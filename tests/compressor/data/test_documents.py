"""Documents of calibration text: file formats, packing, floods, and refusals."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from datasets import Dataset
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from compressor.data.documents import Document, as_rows, documents, pack
from compressor.data.sources import GivenTexts, WeightedSource, parse_sources
from compressor.errors import CompressionError
from tests.support import small
from tests.support.texts import END, TOKENIZER, Words, decode, run, write


def texts_of(source: str | WeightedSource, tokenizer: Any = TOKENIZER) -> list[str]:
    weighted = WeightedSource(source, 1.0) if isinstance(source, str) else source
    return [document.text for document in documents(weighted, 0, tokenizer)]


def data_set(folder: Path) -> Path:
    path = folder / "set"
    path.mkdir()
    files = {"plain": {"train": "a.jsonl"}, "chat": {"train_sft": "b.jsonl", "test_sft": "c.jsonl"}}
    configs = [
        {"config_name": name, "data_files": [{"split": split, "path": file} for split, file in splits.items()]}
        for name, splits in files.items()
    ]
    (path / "README.md").write_text(f"---\n{yaml.safe_dump({'configs': configs})}---\n")
    write(path, "".join(json.dumps({"body": f"text {n}", "number": n}) + "\n" for n in range(3)), "a.jsonl")
    for file in ("b.jsonl", "c.jsonl"):
        asked = [{"role": "user", "content": file}, {"role": "assistant", "content": "yes"}]
        write(path, json.dumps({"prompt": "not this", "messages": asked}), file)
    return path


def test_a_data_set_is_read_by_configuration_split_and_column(tmp_path: Path, offline: None) -> None:
    path = data_set(tmp_path)
    assert sorted(texts_of(f"{path}:plain#body")) == ["text 0", "text 1", "text 2"]
    assert texts_of(f"{path}:chat@test_sft") == ["<user>c.jsonl\n<assistant>yes\n"]
    assert texts_of(f"{path}:chat@train_sft#prompt") == ["not this"]


HI, YO = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}
RENDERED = "<user>hi\n<assistant>yo\n"
CHATS: list[tuple[dict[str, Any], str]] = [
    ({"messages": [HI, {**YO, "name": None}]}, RENDERED),
    ({"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}]}, RENDERED),
    ({"conversations": [HI, YO], "messages": None}, RENDERED),
    ({"conversations": [{"from": "system", "value": "be"}]}, "<system>be\n"),
    ({"conversations": [{"from": "observation", "value": "3"}]}, "<tool>3\n"),
    ({"prompt": [HI], "completion": [YO]}, RENDERED),
    ({"messages": [HI], "tools": [{"name": "f", "unused": None}]}, "[f]<user>hi\n"),
    ({"messages": [HI], "tools": []}, "<user>hi\n"),
    ({"text": " ", "messages": [HI, YO]}, RENDERED),
    ({"messages": "", "conversations": [HI, YO], "text": ""}, RENDERED),
    ({"prompt": "", "completion": "", "instruction": "hi", "output": "yo", "text": "old"}, RENDERED),
    ({"text": "as written", "messages": [HI, YO], "id": "0", "seed": 0, "domain": "d"}, "as written"),
]


@pytest.mark.parametrize(("row", "text"), CHATS)
def test_chats_are_rendered_by_the_models_template(row: dict[str, Any], text: str, tmp_path: Path) -> None:
    tokenizer = small.tokenizer(
        "{% for tool in tools or [] %}[{{ tool.name }}{{ tool.unused }}]{% endfor %}" + small.CHAT
    )
    path = write(tmp_path, json.dumps(row), "a.jsonl")
    assert texts_of(str(path), tokenizer) == [text]


def test_the_same_rows_are_the_same_text_from_every_kind_of_source(tmp_path: Path, offline: None) -> None:
    rows = [{"messages": [{"role": "user", "content": f"number {n}"}], "tools": None} for n in range(9)]
    path, data = write(tmp_path, "".join(json.dumps(row) + "\n" for row in rows), "a.jsonl"), Dataset.from_list(rows)
    data.to_parquet(tmp_path / "a.parquet")
    given = [GivenTexts.of(data), GivenTexts.of(row for row in rows)]
    plain = GivenTexts.of(f"<user>number {n}\n" for n in range(9))
    sources = [str(path), f"{tmp_path}/a.parquet", *given, plain]
    found = [run(list(parse_sources([source])), samples=2, length=32) for source in sources]
    assert len({calibration.identity["sha256"] for calibration in found}) == 1
    names = [calibration.identity["source"] for calibration in found[2:]]
    assert names[0] == names[1] != names[2] and all(re.fullmatch("memory:[0-9a-f]{16}", name) for name in names)


def test_bad_rows_are_left_out_with_one_warning_or_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = ['{"text": "one"}', "{", '{"prompt": "no answer"}', '{"messages": [{"role": 3}, 4]}', "7", '{"text": "two"}']
    path = write(tmp_path, "\n".join(rows), "a.jsonl")
    assert sorted(decode(run(path, samples=1, length=8)).split("</s>")) == ["", "one", "two"]
    (record,) = caplog.records
    assert re.search("4 of 6 rows of .*a.jsonl are left out: .*line 2 .*line 3 .*line 4.*, and 1 more", record.message)
    with pytest.raises(CompressionError, match="line 2 is not valid JSON"):
        run(path, strict=True)


def test_line_separators_are_text_and_a_byte_order_mark_is_not(tmp_path: Path) -> None:
    content = json.dumps({"text": "a\u2028b\x85c"}, ensure_ascii=False) + "\n"
    assert decode(run(write(tmp_path, content, "data.jsonl"), samples=1, length=100)) == "a\u2028b\x85c</s>"
    for name, content in (("a.txt", "hello"), ("a.jsonl", '{"text": "hello"}')):
        assert decode(run(write(tmp_path, b"\xef\xbb\xbf" + content.encode(), name), samples=1, length=5)) == "hello"


REFUSED: list[tuple[str, str | bytes, str]] = [
    ("a.txt", "", "a.txt is empty; give it some text"),
    ("a.jsonl", '{"text": ""}\n{"text": " "}', "a.jsonl is empty"),
    ("a.txt", b"\xff\xfe", "a.txt: the document at line 1: .*a byte that is no UTF-8"),
    ("a.txt", b"two\r\n" * 9_999 + b"\xff", "a.txt: the document at line 1: .*a byte that is no UTF-8"),
    ("a.jsonl", "\ufeff".encode() + b"\n" * 9_999 + b'"\xc3"', "a.jsonl, line 10000: .*a byte that is no UTF-8"),
    ("a.jsonl", "[" * 99_999, "a.jsonl, line 1 is not valid JSON"),
    ("a.jsonl", "\n5\n", "a.jsonl, line 2: a row should be an object"),
    ("a.jsonl", '[{"text": "a"}]\n[{"text": "b"}]', "a row should be an object"),
    (
        "a.jsonl",
        '{"body": "a", "id": 1, "text": null}',
        r"has no column messages, .*, text or prompt.*; it has body, id \(SOURCE#",
    ),
    ("a.jsonl", '{"text": 5}', "line 1: text is 5, it should be text"),
    ("a.jsonl", '{"messages": [5]}', r"line 1: messages is \[5\], it should hold messages"),
    (
        "a.jsonl",
        '{"prompt": "a"}',
        "line 1 has no column messages, .* or prompt, .* or inputs with completion, .* or chosen; it has prompt ",
    ),
    ("a.jsonl", '{"prompt": "a", "completion": " "}', "line 1 has an empty completion; give it some text"),
    ("a.jsonl", '{"text": "\\ud800"}', "half a character"),
    ("a.parquet", "no table", "file .*a.parquet cannot be read"),
]


@pytest.mark.parametrize(("name", "content", "message"), REFUSED)
def test_bad_data_is_refused(name: str, content: str | bytes, message: str, tmp_path: Path) -> None:
    with pytest.raises(CompressionError, match=message) as fault:
        run(write(tmp_path, content, name))
    assert "\n" not in str(fault.value)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(st.sampled_from("a \r\n\t\x0b\u2028\ufeff"), max_size=30))
def test_a_text_file_is_split_as_a_whole_text_is(tmp_path: Path, content: str) -> None:
    path = write(tmp_path, content)
    whole = path.read_text(encoding="utf-8-sig")
    expected = [part.strip("\n") + "\n" for part in whole.split("\n\n") if part.strip()]
    if expected:
        assert sorted(texts_of(str(path))) == sorted(expected)
    else:
        with pytest.raises(CompressionError, match="is empty"):
            texts_of(str(path))


def test_a_document_without_end_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CompressionError, match="split it"):
        run(write(tmp_path, "a" * (2**27 + 1)))


def test_the_tokenizer_does_not_warn_of_long_text(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    tokenizer = small.tokenizer()
    tokenizer.model_max_length = 5
    run(write(tmp_path, small.TEXT), tokenizer)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("gone.txt", "gone.txt does not exist; name a text or JSONL file"),
        ("a.jsonl@train", r"has no configurations and splits; write .*a\.jsonl$"),
        ("a.jsonl#body", "line 1 has no column body; it has text"),
        ("empty", "cannot be read as a data set"),
        ("set", r"missing.*'plain', 'chat'.*; pass --calibration with a text .*, ID:CONFIGURATION@SPLIT of a data set"),
        ("set:no", r"'no' not found.*'plain', 'chat'"),
        ("set:chat", r"Bad split: train.*'train_sft', 'test_sft'"),
        ("set:plain@no#body", r"Bad split: no.*'train'"),
        ("set:plain#no", r"row \d has no column no; it has body, number"),
        ("set:plain", r"row \d has no column messages, .*; it has body, number"),
        ("memory:0123456789abcdef", "was given in Python and is in no file; name one with --calibration"),
    ],
)
def test_what_a_source_lacks_is_told_with_what_it_has(
    source: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offline: None
) -> None:
    data_set(tmp_path)
    (tmp_path / "empty").mkdir()
    write(tmp_path, '{"text": "a"}', "a.jsonl")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CompressionError, match=message):
        run(source)


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
    ids = pack(map(Document, documents), tokenizer, samples * length).ids
    assert ids.tolist() == stream
    sequences = [stream[begin : begin + length] for begin in range(0, len(stream) - length + 1, length)] or [stream]
    batches = as_rows(ids, length).split(batch)
    assert [row for block in batches for row in block.tolist()] == sequences
    assert all(len(block) == batch for block in batches[:-1])


def test_the_demo_is_evaluated_on_text_that_it_is_not_calibrated_with() -> None:
    heldout = documents(WeightedSource("demo", 1.0), 0, None, "heldout")
    assert not set(texts_of("demo")) & {document.text for document in heldout}
