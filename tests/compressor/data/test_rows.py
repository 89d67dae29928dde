"""Forms of files and data sets: the same rows come out of each."""

import csv
import gzip
import io
import json
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from datasets import Dataset, DatasetDict

from compressor.answers.prompts import read_prompts, usable_prompts
from compressor.data.batches import calibrate
from compressor.data.documents import documents
from compressor.data.rows import source_rows
from compressor.data.sources import WeightedSource, parse_sources
from compressor.errors import CompressionError
from compressor.quality_gate.teacher_forced import read_answers
from tests.support import pictures, small
from tests.support.texts import decode, run, write

ROWS = [{"instruction": f"sort {number}", "input": 'x;y, "z"', "output": "é\nok"} for number in range(3)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS)


def table(separator: str) -> str:
    stream = io.StringIO()
    writer = csv.DictWriter(stream, list(ROWS[0]), delimiter=separator)
    writer.writeheader()
    writer.writerows(ROWS)
    return stream.getvalue()


def zstd(content: str) -> bytes:
    return bytes(pyarrow.compress(content.encode(), codec="zstd", asbytes=True))


FILES: dict[str, str | bytes] = {
    "lines.ndjson": LINES,
    "LINES.JSONL": LINES,
    "lines": "\n" + LINES,
    "lines.txt": LINES,
    "array.json": json.dumps(ROWS),
    "indented.json": json.dumps(ROWS, indent=2),
    "array": "\ufeff" + json.dumps(ROWS, ensure_ascii=False),
    "table.csv": table(","),
    "semicolons.csv": table(";"),
    "table.TSV": table("\t"),
    "lines.jsonl.gz": gzip.compress(LINES.encode()),
    "lines.zst": zstd(LINES),
    "table.csv.gz": gzip.compress(table(",").encode()),
    "array.json.zst": zstd(json.dumps(ROWS, indent=1)),
}


def rows_of(path: Path) -> list[object]:
    return [row for _, row in source_rows(WeightedSource(str(path), 1.0), 0, "calibration").rows]


@pytest.mark.parametrize("name", FILES)
def test_rows_are_read_by_what_a_file_holds(name: str, tmp_path: Path) -> None:
    assert rows_of(write(tmp_path, FILES[name], name)) == ROWS


@pytest.mark.parametrize(
    "save",
    [
        lambda folder: Dataset.from_list(ROWS).save_to_disk(folder),
        lambda folder: DatasetDict({"train": Dataset.from_list(ROWS)}).save_to_disk(folder),
        lambda folder: Dataset.from_list(ROWS).to_parquet(folder),
    ],
)
def test_data_sets_that_were_saved_are_read(save: Callable[[Path], object], tmp_path: Path) -> None:
    save(tmp_path / "saved")
    assert sorted(map(str, rows_of(tmp_path / "saved"))) == sorted(map(str, ROWS))


def test_an_array_may_hold_strings_and_an_object_is_a_row(tmp_path: Path) -> None:
    assert rows_of(write(tmp_path, json.dumps(["one\n\ntwo", "three"]), "a.json")) == ["one\n\ntwo", "three"]
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    assert rows_of(write(tmp_path, json.dumps(chat, indent=1), "b.json")) == [chat]


def test_prose_that_begins_like_json_is_prose(tmp_path: Path) -> None:
    assert rows_of(write(tmp_path, "{\n  int x;\n}\n\nmore\n", "a.h")) == ["{\n  int x;\n}\n", "more\n"]
    assert rows_of(write(tmp_path, gzip.compress(b"[link](x)\n\nmore\n"), "a.md.gz")) == ["[link](x)\n", "more\n"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b"PK\x03\x04\x14\x00...", "a.jsonl is no text in UTF-8; convert it to JSON lines, CSV or parquet"),
        ("a.txt", "text".encode("utf-16"), "a.txt is no text in UTF-8"),
        ("a.gz", gzip.compress(LINES.encode() * 99)[:-40], "a.gz cannot be read"),
        ("a.csv", '"', "a.csv is empty"),
    ],
)
def test_what_is_not_read_is_said(name: str, content: str | bytes, message: str, tmp_path: Path) -> None:
    with pytest.raises(CompressionError, match=message):
        run(write(tmp_path, content, name))


def save_lines(folder: Path) -> None:
    folder.mkdir()
    write(folder, "".join(json.dumps(row) + "\n" for row in MANY), "train.jsonl")


def save_files(folder: Path) -> None:
    for number, begin in enumerate(range(0, len(MANY), 100)):
        Dataset.from_list(MANY[begin : begin + 100]).to_parquet(folder / f"train-{number}.parquet")


MANY = [{"text": f"row {number}"} for number in range(250)]
SAVERS: list[Callable[[Path], object]] = [
    save_lines,
    save_files,
    lambda folder: Dataset.from_list(MANY).save_to_disk(folder, num_shards=3),
    lambda folder: write(folder.parent, json.dumps(MANY), folder.name),
    lambda folder: write(folder.parent, "text\n" + "".join(f"{row['text']}\n" for row in MANY), f"{folder.name}.csv"),
]


@pytest.mark.parametrize("seed", [0, 7])
@pytest.mark.parametrize("save", SAVERS)
def test_a_seed_draws_the_same_rows_from_every_kind_of_source(
    save: Callable[[Path], object], seed: int, tmp_path: Path
) -> None:
    save(tmp_path / "rows")
    source = next(tmp_path.glob("rows*"))
    drawn = list(MANY)
    random.Random(seed).shuffle(drawn)
    read = documents(WeightedSource(str(source), 1.0), seed, small.tokenizer())
    assert [document.text for document in read] == [row["text"] for row in drawn]


def test_more_rows_than_are_shuffled_together_are_drawn_from_all_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("compressor.data.rows.WINDOW", 120)
    save_files(tmp_path / "rows")
    firsts = set[int]()
    for seed in range(9):
        rows = source_rows(WeightedSource(str(tmp_path / "rows"), 1.0), seed, "calibration").rows
        numbers = [int(row["text"].split()[1]) for _, row in rows]
        assert sorted(numbers) == list(range(250))
        (first, second, *others) = Counter(number // 100 for number in numbers[:120]).most_common()
        assert not others and (first[1] == 100 or {first[1], second[1]} == {50, 70}), "two files in turn"
        firsts |= {first[0], second[0]}
    assert firsts == {0, 1, 2}


def test_a_split_that_a_saved_data_set_lacks_is_named(tmp_path: Path) -> None:
    DatasetDict({"one": Dataset.from_list(ROWS), "two": Dataset.from_list(ROWS)}).save_to_disk(tmp_path / "saved")
    with pytest.raises(CompressionError, match="has no split 'train', but one, two"):
        rows_of(tmp_path / "saved")
    assert len(rows_of(Path(f"{tmp_path}/saved@two"))) == 3


# --- rows that cannot be used, wherever rows are read -----------------------------------------------------------------


def turns(*contents: Any, role: Any = "user", **more: Any) -> dict[str, Any]:
    answer = {"role": "assistant", "content": "yes"}
    return {"messages": [*({"role": role, "content": content} for content in contents), answer], **more}


PAIR = {"prompt": "one", "completion": "two", "answer": "two"}
MALFORMED: list[Any] = [  # rows, or the text of one
    *("{", '"', "7", "null", "true", "NaN", "[]", "{}", '[{"text": "a"}]', '{"other": 1}', '{"text": "a"'),
    *('{"text": 3}', '{"text": null}', '{"text": NaN}', '{"text": {}}', '{"text": [1]}', '{"text": true}'),
    *(99_999 * "[", f'{{"text": {20 * "["}{20 * "]"}}}', f'{{"text": "x", "n": 1{5000 * "0"}}}'),
    *(b'{"text": "caf\xe9", "prompt": "\xe9", "answer": "x"}', b"\xff\xfe{", b"\x80", b'{"text": "\x00"}'),
    *({"messages": wrong} for wrong in (5, True, {}, [], [5], [[]], [None], [{}], [{"content": "x"}])),
    *({"conversations": [{"from": wrong, "value": "x"}]} for wrong in (["human"], {}, None, 3)),
    *({"conversations": [{"from": "human", "value": wrong}]} for wrong in (3, ["x", 3], {}, None)),
    *(turns("x", role=wrong) for wrong in (3, None, "", {}, ["user"], "\ud83d")),
    *(turns(wrong) for wrong in (3, True, None, {"a": 1}, [3], [None], [["x"]], "\ud83d")),
    *(turns([part]) for part in ({"type": ["text"]}, {"type": {}}, {"type": "text", "text": 3}, {"text": ["x"]})),
    *({**PAIR, "prompt": wrong} for wrong in (3, " ", [], {"a": 1}, [{"role": "user", "content": 3}])),
    *({**PAIR, "history": wrong} for wrong in ([3], [["x"]], [[1, 2]], [["x", None]], [{"a": 1}], {"a": 1}, 3)),
    *(turns("x", role="assistant", tools=wrong) for wrong in ("{", "\ud800")),
    {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": None, "tool_calls": [3]}]},
]
PICTURES: list[Any] = [
    *({"image": wrong, "text": "dot"} for wrong in (3, [3], [[1]], {"bytes": 3}, {"bytes": ""}, "none.png", "a\0b")),
    *({"image": wrong, "text": "dot"} for wrong in ("../x.png", "/etc/hostname", "https://a.b/c.png", 300 * "x")),
    *(turns([{"type": "image", "image": wrong}, "dot"]) for wrong in (3, True, [], {}, "", {"path": 3}, {"bytes": ""})),
    *({wrong: "none", "text": "dot"} for wrong in ("video", "audio")),
    *({"image": "sound.png", **wrong} for wrong in ({}, {"text": 3}, {"messages": [{"content": "x"}]})),
    turns([{"type": "image_url", "image_url": {"url": ["x"]}}]),
    turns([{"type": "video", "path": "a\0"}]),
]


def read_as_text(path: Path, strict: bool) -> int:
    made = run(path, small.tokenizer(small.CHAT), samples=8, length=4, strict=strict)
    return decode(made).count("good")


def read_as_pictures(path: Path, strict: bool) -> int:
    sizes: dict[str, Any] = {"samples": 3, "length": 64, "seed": 0, "vocab": 96}
    return len(calibrate(parse_sources([str(path)]), pictures.llava_tokenizer(), strict=strict, **sizes).batches)


def read_as_prompts(path: Path, strict: bool) -> int:
    found = read_prompts([str(path)], strict=strict)
    return len(usable_prompts(found, small.tokenizer(small.CHAT), most=64, strict=strict))


def read_as_answers(path: Path, strict: bool) -> int:
    return len(read_answers([str(path)], small.tokenizer(small.CHAT), {1}, 64, strict))


GOOD: dict[Callable[[Path, bool], int], list[Any]] = {
    read_as_text: [{"text": "good"}, turns("good")],
    read_as_pictures: [{"image": "sound.png", "text": "dot"}, turns([{"type": "image", "path": "sound.png"}, "dot"])],
    read_as_prompts: [{"prompt": "a good one"}, turns("good")],
    read_as_answers: [{"prompt": "good", "answer": "good"}, turns("good")],
}


@pytest.mark.parametrize("reads", GOOD)
def test_a_row_that_cannot_be_used_is_left_out_wherever_rows_are_read(
    reads: Callable[[Path, bool], int],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    pictures.picture(0).save(tmp_path / "sound.png")
    first, second = (json.dumps(row).encode() for row in GOOD[reads])
    for number, row in enumerate([*MALFORMED, *(PICTURES if reads is read_as_pictures else ())]):
        text = row if isinstance(row, str | bytes) else json.dumps(row)
        path = tmp_path / f"{number}.jsonl"
        path.write_bytes(b"\n".join([first, text if isinstance(text, bytes) else text.encode(), second]))
        caplog.clear()
        assert reads(path, False) == 2, text[:100]
        (left_out,) = [record.message for record in caplog.records if "left out" in record.message]
        assert "1 of 3 " in left_out and f"{path}, line 2" in left_out and len(left_out) < 2500, text[:100]
        with pytest.raises(CompressionError, match="line 2"):
            reads(path, True)
